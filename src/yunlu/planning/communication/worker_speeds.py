"""Step time of each worker, from its steps so far or a short benchmark. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from pydantic import Field

from yunlu.planning.machine_profile import FiniteFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIKE = 1.25
"""Bursts that differ by less differ by chance."""


class WorkerSpeed(FiniteFigures):
    """Compute speed of a worker."""

    turns_per_s: float = Field(gt=0)
    """From a burst that all workers made at the same time."""
    step_s: float | None = Field(default=None, gt=0)
    """Forward and backward of its share of a step, if it has made steps."""


def is_doubtful(paces: Sequence[WorkerSpeed]) -> bool:
    """Whether a worker differs so much from most that it should be measured again."""
    usual = statistics.median(pace.turns_per_s for pace in paces)
    return any(not 1 / _ALIKE < pace.turns_per_s / usual < _ALIKE for pace in paces)


def steps_of(paces: Sequence[WorkerSpeed], *, planned_s: float) -> tuple[float, ...]:
    """Step time of each worker: measured, or in proportion to a worker whose time is known.

    Args:
        paces: Of all workers; the first is on the machine that the plan was made on.
        planned_s: What the first one's should take, where nobody has made a step.
    """
    usual = statistics.median(pace.turns_per_s for pace in paces)
    slower = [
        1.0 if 1 / _ALIKE < usual / pace.turns_per_s < _ALIKE else usual / pace.turns_per_s
        for pace in paces
    ]
    seen = [
        item.step_s / times
        for item, times in zip(paces, slower, strict=True)
        if item.step_s is not None
    ]
    unit_s = statistics.median(seen) if seen else planned_s / slower[0]
    return tuple(
        unit_s * times if item.step_s is None else item.step_s
        for item, times in zip(paces, slower, strict=True)
    )
