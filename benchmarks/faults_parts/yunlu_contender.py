"""Yunlu as a contender: a job started by ``yunlu train``, watched through its run directory."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.faults_parts.contenders import Contender, ContenderError
from benchmarks.faults_parts.journal import Journal, Step, Worker
from benchmarks.faults_parts.processes import is_alive
from benchmarks.faults_parts.workload import SEED, Workload
from yunlu.runs.home import open_run

if TYPE_CHECKING:
    from pathlib import Path

_SUBMIT_S, _RESIZE_S = 60.0, 180.0


class Yunlu(Contender):
    """Two workers under one supervisor, or one on each of two nodes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._home = self.directory / "home"
        self.processes.environment = {
            **self.processes.environment,
            "YUNLU_HOME": str(self._home),
            "YUNLU_CACHE": str(self.directory / "cache"),
            "YUNLU_BIND": self.address(0),
        }
        self.journal = self._journal = RunJournal([], workload=self.workload)

    def start(self) -> None:
        """As a user would; the command returns and the run goes on."""
        job = self.directory / "job.yaml"
        job.write_text(yaml.safe_dump(make_job(self.directory / "text.txt", self.workload)))
        self._call("train", str(job), "--devices", "2", "--detach")
        self._journal.follow(self._find_run())
        if self.nodes:
            self._shrink()
            self.start_node(1)

    def start_alone(self) -> None:
        """Started with two, since one alone has no supervisor to ask."""
        self.start()
        self._shrink()

    def enlarge(self) -> float:
        """``yunlu resize``."""
        now = time.time()
        self._call("resize", self._run.name, "--devices", "2")
        return now

    def start_node(self, node: int) -> None:
        """Another machine that sees the run's directory lends one device."""
        group = json.loads((self._run / "worker_group.json").read_bytes())
        token = self.directory / "token"
        token.write_text(group["token"])
        words = ["join", f"{group['host']}:{group['port']}", "--token-file", str(token)]
        self._call(*words, "--devices", "1", node=node)

    def committed(self) -> list[Step]:
        """From the ledger, which is written with the step."""
        self.journal.refresh()
        return self._journal.read_ledger() or self.journal.steps

    def samples_of(self, step: int) -> list[int]:
        """In Yunlu's own order."""
        return self._journal.samples_of(step)

    @property
    def _run(self) -> Path:
        assert self._journal.run is not None, "the group is started"
        return self._journal.run

    def _call(self, *words: str, node: int = 0) -> None:
        command = [sys.executable, "-m", "yunlu.cli.main", *words]
        self.processes.start(self.on_host(node, command), node=node)

    def _shrink(self) -> None:
        """To one worker on this node."""
        self._wait_for_size(2)
        self._call("resize", self._run.name, "--devices", "1")
        self._wait_for_size(1)
        self.ready_at = time.time()

    def _wait_for_size(self, size: int) -> None:
        until = time.monotonic() + _RESIZE_S
        while time.monotonic() < until:
            self.journal.refresh()
            if self.journal.steps and self.journal.steps[-1].size == size:
                return
            time.sleep(0.02)
        raise ContenderError(f"no step of {size} within {_RESIZE_S:.0f} s")

    def _find_run(self) -> Path:
        until = time.monotonic() + _SUBMIT_S
        while time.monotonic() < until:
            for found in self._home.glob("*/events.jsonl"):
                return found.parent
            time.sleep(0.02)
        raise ContenderError(f"no run appeared within {_SUBMIT_S:.0f} s")


@dataclass(slots=True)
class RunJournal(Journal):
    """The run directory, read as the journal of a worker group."""

    workload: Workload = field(default_factory=Workload)
    run: Path | None = None
    _sizes: dict[int, int] = field(default_factory=dict[int, int])
    _samples: int = 0
    _metrics: int = 0

    def follow(self, run: Path) -> None:
        """From now on."""
        self.run = run

    def refresh(self) -> None:
        """Events tell who is there; metrics, which steps are completed."""
        if self.run is None:
            return
        for event in self._new_records(self.run / "events.jsonl"):
            self._take(event)
        for record, after in open_run(self.run).read_metrics(offset=self._metrics):
            self._metrics = after
            generation = int(record.get("generation", 0))
            step = record["step"] - 1
            self.steps.append(
                Step(
                    step=step,
                    at=record["at"],
                    group=str(generation),
                    size=self._sizes.get(generation, 1),
                    samples=tuple(self.samples_of(step)),
                )
            )
        self.steps.sort(key=lambda step: step.at)
        self.workers[:] = self._read_workers()

    def samples_of(self, step: int) -> list[int]:
        """The samples of a step, counted from 0."""
        return _samples_of(self._samples or self.workload.samples, self.workload.batch, step)

    def read_ledger(self) -> list[Step]:
        """Every committed step; one whose samples are not those of the step answers for none."""
        assert self.run is not None
        path = self.run / "ledger.jsonl"
        records = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        return [
            Step(
                step=record["step"] - 1,
                at=float(place),  # in the order of the ledger
                group=str(record["generation"]),
                size=self._sizes.get(record["generation"], 1),
                samples=tuple(self._answered(record)),
            )
            for place, record in enumerate(records)
        ]

    def _answered(self, record: dict[str, Any]) -> list[int]:
        wanted = self.samples_of(record["step"] - 1)
        digest = _digest(tuple(wanted))
        return wanted if (record["samples"], record["digest"]) == (len(wanted), digest) else []

    def _take(self, event: dict[str, Any]) -> None:
        if event["kind"] == "data":
            self._samples = event["train"]
        elif event["kind"] == "worker_group":
            self._sizes[event["generation"]] = len(event["ranks"])

    def _read_workers(self) -> list[Worker]:
        assert self.run is not None
        try:
            group = json.loads((self.run / "worker_group.json").read_bytes())
        except (OSError, ValueError):  # not there yet
            return []
        return [
            Worker(rank=member["rank"], pid=member["pid"], at=member["process_started_at"])
            for member in group["workers"]
            if member["rank"] is not None and is_alive(member["pid"])
        ]


@lru_cache(maxsize=4096)
def _samples_of(samples: int, batch: int, step: int) -> list[int]:
    from yunlu.training.data.sample_order import StepOrder  # noqa: PLC0415 (not for the peers)

    order = StepOrder(samples=samples, batch=batch, seed=SEED)
    return next(order.steps_from(step)).tolist()


def _digest(samples: tuple[int, ...]) -> str:
    import numpy as np  # noqa: PLC0415

    from yunlu.training.data.sample_order import digest_of  # noqa: PLC0415

    return f"{digest_of(np.array(samples, dtype=np.int64)):016x}"


def make_job(text: Path, workload: Workload) -> dict[str, Any]:
    """The same model, data, batch and optimiser as the peers'; the rest is as it comes."""
    return {
        "name": "bench-faults",
        "task": "language-modeling",
        "model": {"name": "transformer", "args": workload.model_args()},
        "data": {
            "train": str(text),
            "tokenizer": "bytes",
            "max_length": workload.length,
            "split": {"validation": 0.0, "test": 0.0},
        },
        "train": {
            "steps": 10_000_000,
            "batch": workload.batch,
            "micro_batch": workload.batch // 2,
            "optimizer": {"name": "adamw", "lr": workload.lr, "weight_decay": 0.01},
            "schedule": {"name": "constant", "warmup": 0},
            "precision": "fp32",
            "compile": False,
            "threads": 1,
            "workers": 0,
            "recompute": "none",
            "evaluate": "never",
            "seed": SEED,
        },
        # Replicas, as the peers': how many is left open, for workers come and go.
        "layout": {"fsdp": 1, "tp": 1, "pp": 1},
    }
