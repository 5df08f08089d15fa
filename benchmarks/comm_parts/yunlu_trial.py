"""One run of ``yunlu train`` itself: started once on each host, as torchrun or srun would start it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.comm_parts.trial import PORT, Result, TrialError, wait_for
from benchmarks.comm_parts.workload import Workload, make_text
from benchmarks.faults_parts.processes import ROOT
from yunlu.runs.home import open_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.netrig import Rig

GUARANTEES = ("exact", "near", "relaxed")


@dataclass(frozen=True, slots=True)
class YunluRun:
    """Figures, and what was chosen with which prediction."""

    result: Result
    chosen: str


def make_job(
    text: Path, workload: Workload, *, steps: int, hosts: int, communication: str
) -> dict[str, Any]:
    """The same model, text, batch and optimiser as the plain loop's."""
    batch = workload.host_batch * hosts
    return {
        "name": "bench-comm",
        "task": "language-modeling",
        "model": {"name": "transformer", "args": workload.model_args()},
        "data": {
            "train": str(text),
            "tokenizer": "bytes",
            "max_length": workload.length,
            "split": {"validation": 0.0, "test": 0.0},
        },
        "train": {
            "steps": steps,
            "batch": batch,
            "micro_batch": workload.host_batch,
            "optimizer": {
                "name": "adamw",
                "lr": workload.lr,
                "weight_decay": workload.weight_decay,
                "kernel": "fused",
            },
            "schedule": {"name": "constant", "warmup": workload.warmup},
            "clip": workload.clip,
            "precision": "fp32",
            "compile": False,
            "threads": 1,
            "workers": 0,
            "padding": "pad",
            "recompute": "none",
            "evaluate": "never",
            "checkpoint": {"every": steps, "keep_best": 0},
            "seed": workload.seed,
        },
        "layout": f"dp{hosts}",
        "communication": communication,
    }


def run_yunlu(
    rig: Rig,
    communication: str,
    *,
    steps: int,
    rate: str,
    setting: str = "",
    round_number: int = 0,
    busy: Mapping[int, int] | None = None,
    workload: Mapping[str, Any] | None = None,
    within_s: float = 3600.0,
    directory: Path | None = None,
) -> YunluRun:
    """Train a job on all hosts of a rig; ``communication`` as a job says it."""
    place = directory or Path(tempfile.mkdtemp(prefix="yunlu-comm-"))
    place.mkdir(parents=True, exist_ok=True)
    work = Workload(**(workload or {}))
    hosts = len(rig.hosts)
    text = place / "text.txt"
    text.write_bytes(make_text(work, steps * work.host_batch * hosts, part=0))
    job = make_job(text, work, steps=steps, hosts=hosts, communication=communication)
    (place / "job.yaml").write_text(yaml.safe_dump(job))
    before = rig.count_all()
    try:
        children = [_start(rig, host, place, (busy or {}).get(host, 0)) for host in rig.hosts]
        try:
            wait_for(children, place, within_s)
        except TrialError as error:
            raise TrialError(_find_error(place) or str(error)) from error
        run = next((place / "home").glob("*/events.jsonl"), None)
        if run is None:
            raise TrialError("no run was made")
        sent = fmean(
            (now - then).sent_bytes for now, then in zip(rig.count_all(), before, strict=True)
        )
        return _read(
            run.parent, f"yunlu {communication}", steps=steps, hosts=hosts, rate=rate,
            setting=setting, round_number=round_number, sent_bytes=sent,
        )  # fmt: skip
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)


def _start(rig: Rig, host: int, place: Path, busy: int) -> subprocess.Popen[Any]:
    environment = {
        "OMP_NUM_THREADS": "1",
        "YUNLU_HOME": str(place / "home"),
        "YUNLU_CACHE": str(place / "cache"),
        "RANK": str(host),
        "WORLD_SIZE": str(len(rig.hosts)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": rig.address(0),
        "MASTER_PORT": str(PORT),
    }
    command = [sys.executable, "-m", "yunlu.cli.main", "train", str(place / "job.yaml")]
    with (place / f"worker-{host}.log").open("wb") as log:
        return rig.run(
            host, command, busy=busy, environment=environment, cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _read(
    run: Path,
    method: str,
    *,
    steps: int,
    hosts: int,
    rate: str,
    setting: str,
    round_number: int,
    sent_bytes: float,
) -> YunluRun:
    records = {record["step"]: record for record, _ in open_run(run).read_metrics()}
    if len(records) < steps:
        raise TrialError(f"{len(records)} of {steps} steps were done")
    at = [records[step]["at"] for step in range(1, steps + 1)]
    spans = [late - early for early, late in pairwise(at)]
    # What comes before the first step is not training: the plain loop's clock starts there, too.
    began_at = at[0] - median(spans)
    ends = tuple(round(each - began_at, 5) for each in at)
    chosen = [
        _show_choice(event)
        for event in _lines(run / "events.jsonl")
        if event["kind"] == "communication"
    ]
    counted = [record["sent_bytes"] for record in records.values() if record.get("sent_bytes")]
    # At the cable, all is counted from start to end: measuring the links, too.
    result = Result(
        method=method,
        rate=rate,
        hosts=hosts,
        setting=setting,
        round=round_number,
        step_s=median(spans[steps // 10 :]),
        mean_step_s=ends[-1] / steps,
        step_bytes=sent_bytes / steps,
        wire_bytes=fmean(counted) if counted else None,
        cpu_step_s=0.0,
        ends_s=ends,
        losses=tuple(records[step]["loss"] for step in range(1, steps + 1)),
        held_out=(),
        is_equal=None,
    )
    return YunluRun(result, ", then ".join(chosen))


def _show_choice(told: dict[str, Any]) -> str:
    """What was chosen, with what a step was predicted to take."""
    step_s = (told.get("predicted") or {}).get("step_s")
    return str(told.get("chosen", "")) + (f" ({step_s:.3f} s predicted)" if step_s else "")


def _find_error(place: Path) -> str:
    """What the run says went wrong."""
    events = [event for path in (place / "home").glob("*/events.jsonl") for event in _lines(path)]
    told = [str(event["message"]) for event in events if event["kind"] == "error"]
    # Who fails first is heard of a moment later; its own log has it at once.
    logs = [path.read_text(errors="replace") for path in (place / "home").glob("*/logs/*.log")]
    told += [text.strip().splitlines()[-1] for text in logs if "Traceback" in text]
    return told[0] if told else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
