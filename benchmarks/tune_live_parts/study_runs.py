"""One study, for real: trials on shares of this machine, with sizes that stay or that change."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from yunlu.jobs.lifecycle import make_plan
from yunlu.runs.events import AttemptStarted, DataOpened, WorkerGroupFormed
from yunlu.runs.home import open_run
from yunlu.spec.load import job_from_mapping
from yunlu.tuning.forecast import StudyForecast, predict_search, trial_time_of
from yunlu.tuning.study import Study
from yunlu.tuning.study_runner.slots import LocalSlots
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.tuning.facts import StudyView

Mode = Literal["static", "elastic"]
BATCH = 128
ETA = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """What became of a study."""

    mode: Mode
    makespan_s: float
    trials: int
    done: int
    best: float
    attempts: int
    resizes: int
    """While the trial went on."""
    samples_lost: int
    """Missing, or trained on twice."""
    sizes: dict[int, list[tuple[float, int]]]
    """Of each trial: seconds since the study began, and workers from then on."""


def make_job(*, trials: int, steps: int, seed: int) -> Job:
    """Halving over small convolutional networks: much to compute, little to exchange."""
    rungs = ETA**2
    return job_from_mapping(
        {
            "name": "live",
            "task": "image-classification",
            "model": {"name": "cnn", "args": {"channels": [64, 128]}},
            "data": "sklearn:digits",
            "train": {
                "steps": rungs * steps,
                "batch": BATCH,
                "micro_batch": BATCH // 4,
                "precision": "fp32",
                "evaluate": steps,
                "checkpoint": {"every": 100_000, "keep_best": 0},
            },
            "spares": 0,
            "search": {
                "space": {"train.optimizer.lr": "1e-4 .. 3e-1 log"},
                "metric": "loss",
                "method": "random",
                "stop": {"name": "asha", "eta": ETA},
                "trials": trials,
                "seed": seed,
            },
        }
    )


def predict_study(job: Job, *, devices: int) -> dict[Mode, StudyForecast]:
    """What both would take, before they begin, from one plan of the job, measured on one core."""
    assert job.search is not None
    os.environ["OMP_NUM_THREADS"] = "1"  # noqa: TID251 (a share is less than a core)
    plan = make_plan(job.model_copy(update={"search": None, "devices": 1}))
    trial = trial_time_of(plan, devices=devices)
    return {
        mode: predict_search(
            job, job.search, rungs=ETA**2, devices=devices, trial=trial, elastic=mode == "elastic"
        )
        for mode in ("static", "elastic")
    }


def run_study(
    job: Job, home: Path, *, mode: Mode, devices: int, watch: Callable[[StudyView], None]
) -> StudyRecord:
    """Carry a study out."""
    os.environ["YUNLU_HOME"] = str(home)  # noqa: TID251 (each study has runs of its own)
    with Study(job, name=f"live-{mode}") as study:
        began_at = time.time()
        study.optimize(slots=LocalSlots(devices), elastic=mode == "elastic", on_change=watch)
        ended_at = time.time()
        view = study.view()
    assert view.best is not None
    runs = {facts.number: open_run(home / facts.run) for facts in view.trials if facts.run}
    events = {number: [event for event, _ in run.read_events()] for number, run in runs.items()}
    attempts = sum(isinstance(event, AttemptStarted) for each in events.values() for event in each)
    return StudyRecord(
        mode=mode,
        makespan_s=ended_at - began_at,
        trials=len(view.trials),
        done=sum(facts.state is TrialState.DONE for facts in view.trials),
        best=min(point.value for facts in view.trials for point in facts.points),
        attempts=attempts,
        resizes=sum(_count_resizes(each) for each in events.values()),
        samples_lost=sum(count_lost(run, events[number]) for number, run in runs.items()),
        sizes={number: _sizes(each, began_at) for number, each in events.items()},
    )


def count_lost(run: RunStore, events: list[Event]) -> int:
    """By the log of steps: each once, with all of its samples, however often the worker group changed."""
    count = next((int(e.train) for e in events if isinstance(e, DataOpened)), 0)
    full, rest = divmod(count, BATCH)
    epoch = [BATCH] * full + [rest] * (rest > 0)
    lost, before, due = 0, 0, 0
    for record, _ in run.read_metrics():
        step = int(record["step"])
        if step != before + 1:
            lost += BATCH * abs(step - before - 1)
        due += epoch[(step - 1) % len(epoch)]
        before = step
        last = int(record["samples"])
        if last != due:
            lost, due = lost + abs(last - due), last
    return lost


def _count_resizes(events: list[Event]) -> int:
    groups = sum(isinstance(event, WorkerGroupFormed) for event in events)
    supervised = sum(
        isinstance(event, AttemptStarted) and _has_supervisor(events, place)
        for place, event in enumerate(events)
    )
    return max(groups - supervised, 0)


def _has_supervisor(events: list[Event], place: int) -> bool:
    """Whether the attempt that begins here has a supervisor."""
    for event in events[place + 1 :]:
        if isinstance(event, AttemptStarted):
            return False
        if isinstance(event, WorkerGroupFormed):
            return True
    return False


def _sizes(events: list[Event], began_at: float) -> list[tuple[float, int]]:
    sizes: list[tuple[float, int]] = []
    for place, event in enumerate(events):
        workers: Any = None
        if isinstance(event, WorkerGroupFormed):
            workers = len(event.ranks)
        elif isinstance(event, AttemptStarted) and not _has_supervisor(events, place):
            workers = 1
        if workers is not None:
            sizes.append((round(event.at - began_at, 1), workers))
    return sizes
