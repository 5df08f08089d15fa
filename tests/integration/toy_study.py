"""A study of toy trials, also as a program of its own that can be killed: ``toy_study.py NAME TRIALS``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.integration import toy_trial
from yunlu.executors.worker_process import recorded_worker
from yunlu.jobs import lifecycle
from yunlu.runs.run_store import RunStore
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.spec.load import job_from_mapping
from yunlu.tuning.study import Study

EPOCHS = 4


class ToySlots:
    """Shares of this machine for toys."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices

    def submit(self, job: Job, *, source: Path | None = None) -> RunStore:
        return lifecycle.submit(job, source=source)

    def start(
        self, run: RunStore, devices: int, *, most: int | None = None, promise: float = 0.0
    ) -> None:
        del devices, most, promise
        command = (sys.executable, toy_trial.__file__)
        if lifecycle.read_record(run).state is RunState.PENDING:
            lifecycle.start(run, command)
        else:
            lifecycle.resume(run, command=command)

    def resize(self, run: RunStore, devices: int, *, promise: float = 0.0) -> bool:
        del run, devices, promise
        return False

    def held(self, run: RunStore) -> int:
        worker = recorded_worker(run)
        return int(worker is not None and worker.detached and worker.is_alive())

    def usable(self, run: RunStore) -> int | None:
        del run
        return 1

    def release(self, run: RunStore, *, for_good: bool) -> None:
        pass

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        lifecycle.request_stop(run, now=now)


def toy_job(*, args: dict[str, Any] | None = None, **search: Any) -> Job:
    """A job that toys train."""
    request: dict[str, Any] = {
        "space": {"train.optimizer.lr": "1e-4 .. 1e-1 log"},
        "metric": "loss",
        "method": "random",
        "stop": "none",
    }
    return job_from_mapping(
        {
            "name": "toy",
            "task": "tabular-classification",
            "model": {"name": "mlp", "args": args or {}},
            "data": "sklearn:iris",
            "train": {"epochs": EPOCHS, "optimizer": {"lr": 0.01}},
            "search": request | search,
        }
    )


if __name__ == "__main__":
    study = Study(toy_job(trials=int(sys.argv[2]), stop=sys.argv[3], args={"step_s": 0.02}),
                  name=sys.argv[1])  # fmt: skip
    study.optimize(slots=ToySlots(), elastic=False)
