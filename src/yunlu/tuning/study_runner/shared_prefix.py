"""How much of their training two jobs have in common: what one has trained, the other need not. Pure.

Two jobs that differ only in what acts late (how long they train, how the rate falls) make the same steps
as long as their learning rates are the same: with ``wsd`` that is most of the run.
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
"""Fields that change nothing in the first steps, and all below them; the warm-up does."""
_LOOKS = 20_000
"""At most so many steps are compared: of longer runs, evenly spread ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLength:
    """How long a job trains, and with how much warm-up."""

    steps: int
    warmup_steps: int


def can_share_prefix(dimensions: Sequence[Dimension]) -> bool:
    """Whether trials of this space can have steps in common: some field acts late, others may agree."""
    late = [dimension for dimension in dimensions if _is_late(dimension.name)]
    others = [dimension for dimension in dimensions if not _is_late(dimension.name)]
    return bool(late) and all(_may_agree(dimension) for dimension in others)


def shared_rung(one: Job, other: Job, events: TrialEvents) -> int:
    """The last evaluation of the run of ``one`` from whose checkpoint ``other`` can go on; 0: none."""
    every = events.plan.evaluate_every if events.plan else 0
    if events.plan is None or not every or not events.train_samples:
        return 0
    steps = shared_steps(one, other, samples=events.train_samples, plan=events.plan)
    rungs = [
        rung
        for rung, found in events.evaluated.items()
        # One that was made because the run ended there is none of the other job.
        if found.step <= steps and found.step % every == 0 and found.step in events.checkpoints
    ]
    return max(rungs, default=0)


def shared_steps(one: Job, other: Job, *, samples: int, plan: Plan) -> int:
    """How many of the first steps two jobs make alike; ``plan`` is the one of the first."""
    if _early(one) != _early(other):
        return 0
    batch = plan.batch
    courses = [find_length(job, samples=samples, batch=batch) for job in (one, other)]
    least = min(course.steps for course in courses)
    specs = one.train.schedule, other.train.schedule
    if "plateau" in {spec.name for spec in specs} and specs[0] != specs[1]:
        return 0
    stride = -(-least // _LOOKS)
    slots = range(0, least, stride)

    def is_alike(step: int) -> bool:
        first, second = (
            rate(spec, step, steps=course.steps, warmup_steps=course.warmup_steps)
            for spec, course in zip(specs, courses, strict=True)
        )
        return first == second

    alike = [*takewhile(is_alike, slots)]
    if len(alike) == len(slots):
        return least
    return alike[-1] + 1 if alike else 0


def find_length(job: Job, *, samples: int, batch: int) -> TrainingLength:
    """The steps of a job, and those of them that warm up."""
    steps = count_steps(job, samples=samples, batch=batch)
    warmup, optimizer = job.train.schedule.warmup, job.train.optimizer
    if warmup == "auto":
        found, _ = warmup_steps_for(
            steps=steps,
            steps_per_epoch=-(-samples // batch),
            batch=batch,
            base_batch=optimizer.base_batch,
            rule=optimizer.scaling,
        )
    else:
        found = min(steps, round(warmup * steps) if warmup < 1 else round(warmup))
    return TrainingLength(steps=steps, warmup_steps=found)


def _is_late(name: str) -> bool:
    return name != "train.schedule.warmup" and any(
        name == field or name.startswith(f"{field}.") for field in _LATE
    )


def _may_agree(dimension: Dimension) -> bool:
    return bool(dimension.choices) or dimension.is_int or dimension.step is not None


def _early(job: Job) -> Job:
    """The job without what acts late, and without what changes nothing that is trained."""
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
        plain["name"] = job.name or "its batch changes on its way"
    return job.model_copy(update=plain)
