"""What the records of a worker group say: when it went on, what it did twice, what it left out. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.faults_parts.journal import Step


def next_step(steps: Iterable[Step], *, after: float, group: str) -> Step | None:
    """The first step that a worker group other than the one that was hurt completed.

    The hurt one may still complete what it had all but done: that is no recovery.
    """
    later = (step for step in steps if step.at > after and step.group != group)
    return min(later, key=lambda step: step.at, default=None)


def next_of_size(steps: Iterable[Step], *, after: float, size: int, group: str) -> Step | None:
    """The first step of a later group of at least this size."""
    return next_step((step for step in steps if step.size >= size), after=after, group=group)


def longest_pause_s(steps: Sequence[Step], *, after: float, until: float) -> float:
    """The longest time without a completed step between two instants that are steps themselves."""
    times = sorted({after, until, *(step.at for step in steps if after <= step.at <= until)})
    return max((late - early for early, late in pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of the samples."""

    redone_steps: int
    """Done, forgotten and done again."""
    lost: int
    """Samples of completed steps that the weights never saw."""
    repeated: int
    """Samples that the weights saw twice."""


def account(steps: Sequence[Step], samples_of: Callable[[int], Sequence[int]]) -> Account:
    """Follow the weights: a step done again replaces all that was done from it on.

    A worker group whose members each write their own share writes a step more than once; within one group
    shares add up.
    """
    history: dict[int, list[Step]] = {}
    redone = 0
    for step in sorted(steps, key=lambda each: each.at):
        before = history.get(step.step, [])
        if before and before[0].group != step.group:
            for number in [number for number in history if number >= step.step]:
                redone += 1
                del history[number]
        history.setdefault(step.step, []).append(step)
    lost = repeated = 0
    for number in range(min(history, default=0), max(history, default=-1) + 1):
        seen = Counter(sample for step in history.get(number, []) for sample in step.samples)
        wanted = Counter(samples_of(number))
        lost += (wanted - seen).total()
        repeated += (seen - wanted).total()
    return Account(redone_steps=redone, lost=lost, repeated=repeated)


def step_times(steps: Sequence[Step]) -> list[float]:
    """Between steps of the same group, one after another."""
    found: dict[tuple[str, int], float] = {}
    for step in steps:
        key = (step.group, step.step)
        found[key] = min(found.get(key, step.at), step.at)
    return [
        at - found[group, number - 1]
        for (group, number), at in found.items()
        if (group, number - 1) in found
    ]


def effective_share(
    steps: Sequence[Step], *, faults: Sequence[float], began_at: float, ended_at: float
) -> float:
    """The share of the time in which training moved on.

    Lost is, for each fault, the time until a step beyond all steps before it is completed, less
    the time that a step takes anyway: waiting, and doing again what was forgotten.
    """
    usual_s = median(step_times(steps) or [0.0])
    lost_s = 0.0
    counted_until = began_at
    for fault in sorted(faults):
        reached = max((step.step for step in steps if step.at <= fault), default=-1)
        beyond = (step.at for step in steps if step.at > fault and step.step > reached)
        moved_on = min(beyond, default=ended_at)
        # A fault that strikes during the recovery from another is one loss, not two.
        lost_s += max(0.0, moved_on - max(fault, counted_until) - usual_s)
        counted_until = max(counted_until, moved_on)
    return max(0.0, 1.0 - lost_s / (ended_at - began_at))
