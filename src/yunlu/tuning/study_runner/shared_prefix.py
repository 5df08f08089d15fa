"""Shared training prefix of two jobs: steps that one need not repeat. Pure.

Two jobs that differ only in fields that act late (length, decay of the learning rate) make the same
steps as long as their learning rates agree: with ``wsd`` that is most of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from yunlu.planning.large_batch import warmup_steps_for
from yunlu.planning.planner import count_steps
from yunlu.planning.schedule import rate
from yunlu.spec.train import ScheduleSpec, TrainSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.tuning.study_runner.trial_events import TrialEvents
    from yunlu.tuning.values import Dimension

_LATE = ("train.schedule", "train.epochs", "train.steps")
"""Fields (and all below them) that do not affect the first steps; the warm-up does."""
_MOST_COMPARED = 20_000
"""Most steps that are compared; of longer runs, evenly spaced ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLength:
    """Length of a training and of its warm-up."""

    steps: int
    warmup_steps: int


def can_share_prefix(dimensions: Sequence[Dimension]) -> bool:
    """Whether trials of this space can share a prefix: some field acts late, the others can agree."""
    late = [dimension for dimension in dimensions if _is_late(dimension.name)]
    others = [dimension for dimension in dimensions if not _is_late(dimension.name)]
    return bool(late) and all(_may_agree(dimension) for dimension in others)


def shared_rung(one: Job, other: Job, events: TrialEvents) -> int:
    """Last rung of the run of ``one`` from whose checkpoint ``other`` can continue; 0: none."""
    every = events.plan.evaluate_every if events.plan else 0
    if events.plan is None or not every or not events.train_samples:
        return 0
    steps = shared_steps(one, other, samples=events.train_samples, plan=events.plan)
    rungs = [
        rung
        for rung, result in events.evaluated.items()
        # An evaluation at the end of the run need not exist in the other job.
        if result.step <= steps and result.step % every == 0 and result.step in events.checkpoints
    ]
    return max(rungs, default=0)


def shared_steps(one: Job, other: Job, *, samples: int, plan: Plan) -> int:
    """Number of first steps that two jobs share; ``plan`` belongs to the first."""
    if _early(one) != _early(other):
        return 0
    batch = plan.batch
    lengths = [find_length(job, samples=samples, batch=batch) for job in (one, other)]
    least = min(length.steps for length in lengths)
    specs = one.train.schedule, other.train.schedule
    if "plateau" in {spec.name for spec in specs} and specs[0] != specs[1]:
        return 0
    stride = -(-least // _MOST_COMPARED)
    slots = range(0, least, stride)

    def is_alike(step: int) -> bool:
        first, second = (
            rate(spec, step, steps=length.steps, warmup_steps=length.warmup_steps)
            for spec, length in zip(specs, lengths, strict=True)
        )
        return first == second

    alike = [*takewhile(is_alike, slots)]
    if len(alike) == len(slots):
        return least
    return alike[-1] + 1 if alike else 0


def find_length(job: Job, *, samples: int, batch: int) -> TrainingLength:
    """Steps and warm-up steps of a job."""
    steps = count_steps(job, samples=samples, batch=batch)
    warmup, optimizer = job.train.schedule.warmup, job.train.optimizer
    if warmup == "auto":
        result, _ = warmup_steps_for(
            steps=steps,
            steps_per_epoch=-(-samples // batch),
            batch=batch,
            base_batch=optimizer.base_batch,
            rule=optimizer.scaling,
        )
    else:
        result = min(steps, round(warmup * steps) if warmup < 1 else round(warmup))
    return TrainingLength(steps=steps, warmup_steps=result)


def _is_late(name: str) -> bool:
    return name != "train.schedule.warmup" and any(
        name == field or name.startswith(f"{field}.") for field in _LATE
    )


def _may_agree(dimension: Dimension) -> bool:
    return bool(dimension.choices) or dimension.is_int or dimension.step is not None


def _early(job: Job) -> Job:
    """The job without fields that act late or do not affect training."""
    empty = TrainSpec()
    train = job.train.model_copy(
        update={
            "schedule": ScheduleSpec(),
            "epochs": None,
            "steps": None,
            "checkpoint": empty.checkpoint,
            "trial_share": empty.trial_share,
        }
    )
    plain: dict[str, Any] = {"name": None, "trackers": [], "train": train, "search": None}
    if job.train.grow_batch is not None or job.train.adapt_batch is not None:
        plain["name"] = job.name or "its batch changes during training"
    return job.model_copy(update=plain)
