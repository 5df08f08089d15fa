"""One run: a worker on each host of a rig, and what they wrote down, put together.

By hand, for one method: ``python -m benchmarks.comm_parts.trial ring --rate 100mbit --steps 100``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.comm_parts.figures import time_to
from benchmarks.faults_parts.processes import ROOT
from benchmarks.netrig import Rig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PORT = 29400
"""Of the first worker, where all meet; every rig has its own."""
_LOOK_S = 0.05


class TrialError(Exception):
    """A run that gave no figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run of all workers did."""

    method: str
    rate: str
    hosts: int
    setting: str
    round: int
    step_s: float
    """Median over the steps after the first tenth."""
    mean_step_s: float
    """Of all steps together: what rare exchanges cost is in it."""
    step_bytes: float
    """Sent by a host, mean of hosts: counted at the cable, Ethernet and TCP included."""
    wire_bytes: float | None
    """By the method's own count, where it has one."""
    cpu_step_s: float
    """Processor seconds of a worker."""
    ends_s: tuple[float, ...]
    """When the last worker had done each step."""
    losses: tuple[float, ...]
    """Of training, mean of workers."""
    held_out: tuple[tuple[int, float], ...]
    """Steps, and the loss of the weights then."""
    is_equal: bool | None
    """Whether weights that should be the same on all workers were; none where they need not be."""


def run_trial(
    rig: Rig,
    method: str,
    *,
    steps: int,
    every: int = 25,
    rate: str,
    setting: str = "",
    round_number: int = 0,
    busy: Mapping[int, int] | None = None,
    workload: Mapping[str, Any] | None = None,
    within_s: float = 1800.0,
    directory: Path | None = None,
) -> Result:
    """Train on all hosts of a rig, as it is limited now.

    Args:
        rig: Up.
        method: See ``methods.py``.
        steps: Of training.
        every: Steps between two evaluations.
        rate: What the rig's limit is called in the figures.
        setting: What else is special.
        round_number: Of the benchmark.
        busy: How many competitors a host's worker has.
        workload: Changes of the workload.
        within_s: After which it counts as failed.
        directory: For logs; else they are thrown away.
    """
    place = directory or Path(tempfile.mkdtemp(prefix="yunlu-comm-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        children = [
            _start(rig, host, method, steps, every, place=place, busy=busy, workload=workload)
            for host in rig.hosts
        ]
        wait_for(children, place, within_s)
        records = [json.loads((place / f"worker-{host}.json").read_text()) for host in rig.hosts]
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)
    return _combine(records, method=method, rate=rate, setting=setting, round_number=round_number)


def _start(
    rig: Rig,
    host: int,
    method: str,
    steps: int,
    every: int,
    *,
    place: Path,
    busy: Mapping[int, int] | None,
    workload: Mapping[str, Any] | None,
) -> subprocess.Popen[Any]:
    command = [
        sys.executable, "-m", "benchmarks.comm_parts.worker",
        "--method", method, "--rank", str(host), "--size", str(len(rig.hosts)),
        "--store", f"{rig.address(0)}:{PORT}", "--address", rig.address(host),
        "--directory", str(place), "--steps", str(steps), "--every", str(every),
        "--workload", json.dumps(dict(workload or {})),
    ]  # fmt: skip
    with (place / f"worker-{host}.log").open("wb") as log:
        return rig.run(
            host, command, busy=(busy or {}).get(host, 0), environment={"OMP_NUM_THREADS": "1"},
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def wait_for(children: Sequence[subprocess.Popen[Any]], place: Path, within_s: float) -> None:
    """Until all workers have ended well; else they are all ended, and the first failure is told."""
    until = time.monotonic() + within_s
    try:
        while any(child.poll() is None for child in children):
            failed = [n for n, child in enumerate(children) if child.poll()]
            if failed:
                raise TrialError(f"worker {failed[0]} failed: {_last_words(place, failed[0])}")
            if time.monotonic() > until:
                raise TrialError(f"not done within {within_s:.0f} s")
            time.sleep(_LOOK_S)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
    for number, child in enumerate(children):
        if child.returncode:
            raise TrialError(f"worker {number} failed: {_last_words(place, number)}")


def _last_words(place: Path, worker: int) -> str:
    lines = (place / f"worker-{worker}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _combine(
    records: list[dict[str, Any]], *, method: str, rate: str, setting: str, round_number: int
) -> Result:
    ends = [max(each) for each in zip(*(record["ends_s"] for record in records), strict=True)]
    steps = len(ends)
    spans = [late - early for early, late in zip([0.0, *ends], ends, strict=False)]
    held_out: dict[int, float] = {}
    for record in records:
        held_out |= {int(step): loss for step, loss in record["held_out"].items()}
    transport = [record["wire_bytes"] for record in records]
    is_replicated = all(record["is_replicated"] for record in records)
    digests = {tuple(record["digests"]) for record in records}
    return Result(
        method=method,
        rate=rate,
        hosts=len(records),
        setting=setting,
        round=round_number,
        step_s=median(spans[steps // 10 :]),
        mean_step_s=ends[-1] / steps,
        step_bytes=fmean(record["sent_bytes"] or 0 for record in records) / steps,
        wire_bytes=None if None in transport else fmean(transport) / steps,
        cpu_step_s=fmean(record["cpu_s"] for record in records) / steps,
        ends_s=tuple(round(end, 5) for end in ends),
        losses=tuple(fmean(each) for each in zip(*(r["losses"] for r in records), strict=True)),
        held_out=tuple(sorted(held_out.items())),
        is_equal=len(digests) == 1 if is_replicated else None,
    )


def main() -> int:
    """One method, one rate; its figures as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+", help="one after another, on the same rig")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=25, help="steps between two evaluations")
    parser.add_argument("--target", type=float, help="a loss: seconds until it was reached")
    parser.add_argument("--workload", default="{}", help="changes of the workload, as JSON")
    parser.add_argument("--slow", action="append", default=[], help="HOST=RATE; repeat")
    parser.add_argument("--busy", action="append", default=[], help="HOST=COMPETITORS; repeat")
    parser.add_argument("--keep", type=Path, help="directory for logs")
    parser.add_argument("--full", action="store_true", help="every step in the JSON, too")
    asked = parser.parse_args()
    busy = {int(host): int(many) for host, many in (each.split("=") for each in asked.busy)}
    with Rig(asked.hosts, rate=asked.rate, pin=bool(busy)) as rig:
        for host, rate in (each.split("=") for each in asked.slow):
            rig.rate(int(host), rate)
        for number, method in enumerate(asked.methods):
            try:
                result = run_trial(
                    rig, method, steps=asked.steps, every=asked.every, rate=asked.rate, busy=busy,
                    workload=json.loads(asked.workload),
                    directory=asked.keep and asked.keep / f"{number}",
                )  # fmt: skip
            except TrialError as error:
                print(f"{method}: {error}", file=sys.stderr)  # noqa: T201
                continue
            shown = asdict(result)
            if not asked.full:
                del shown["ends_s"], shown["losses"]
            if asked.target is not None:
                shown["to_target_s"] = time_to(result, asked.target)
            print(json.dumps(shown), flush=True)  # noqa: T201 (its product)
    return 0


if __name__ == "__main__":
    sys.exit(main())
