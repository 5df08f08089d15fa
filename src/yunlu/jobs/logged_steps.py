"""The steps of a run without those that later attempts repeated, and the attempts that made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from yunlu.runs.fold import read_view
from yunlu.runs.step_batches import LatestSteps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from yunlu.runs.fold import GroupGeneration, RunView
    from yunlu.runs.run_store import RunStore
    from yunlu.runs.step_batches import StepBatch

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """One attempt, from the start of its worker to the last event or step."""

    number: int
    """1 for the first."""
    started_at: float
    """When it began; for a worker of its own, when its process started."""
    ended_at: float
    resumed_from: int | None
    """Step it continued from; None for the first attempt, or where it is not known."""


class StepSource(Protocol):
    """Records in order, as often as they are asked for."""

    def batches(self) -> Iterator[StepBatch]:
        """All of them, some thousand at a time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """Both logs of a run. Steps that a crash undid and no attempt has reached again are left out."""

    view: RunView
    attempts: Sequence[AttemptSpan]
    steps: StepSource

    @property
    def wall_s(self) -> float:
        """Seconds that workers were alive: the time between two attempts costs nothing."""
        return sum(attempt.ended_at - attempt.started_at for attempt in self.attempts)

    def batches(self) -> Iterator[StepBatch]:
        """The records of the steps, one for each and in order, some thousand at a time."""
        for batch in self.steps.batches():
            mask = ~_undone(batch, self.attempts) & ~_left_behind(batch, self.view.worker_groups)
            if mask.any():
                yield batch.take(mask)


def read_run_log(run: RunStore) -> RunLog:
    """Read the events, and look once at all steps."""
    view, last_at = read_view(run), dict[int, float]()

    def track_latest(batch: StepBatch) -> None:
        has_time = batch.has("at")
        attempts = batch.get("attempt", 1.0)[has_time]
        for number in np.unique(attempts[np.isfinite(attempts)]):
            newest = float(batch.get("at")[has_time][attempts == number].max())
            last_at[int(number)] = max(last_at.get(int(number), 0.0), newest)

    steps = LatestSteps(run, on_batch=track_latest)
    attempts = [
        AttemptSpan(
            number=attempt.number,
            started_at=attempt.started_at,
            ended_at=max(attempt.last_event_at, last_at.get(attempt.number, 0.0)),
            resumed_from=attempt.resumed_from,
        )
        for attempt in view.attempts
    ]
    return RunLog(view=view, attempts=attempts, steps=steps)


def part_totals(log: RunLog, seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part; with ``other`` they add up to the time that workers were alive."""
    rest = log.wall_s - sum(seconds.values()) if log.attempts else 0.0
    return {**seconds, "other": max(rest, 0.0)}


def _undone(batch: StepBatch, attempts: Sequence[AttemptSpan]) -> BoolArray:
    """Whether a later attempt, which may not have made a step yet, went back to before a record."""
    result = np.zeros(batch.size, dtype=bool)
    for attempt in attempts:
        if attempt.resumed_from is not None:
            is_earlier = batch.get("attempt", 1.0) < attempt.number
            result |= is_earlier & (batch.step > attempt.resumed_from)
    return result


def _left_behind(batch: StepBatch, groups: Sequence[GroupGeneration]) -> BoolArray:
    """Whether a later generation, which may not have made a step yet, went back to before a record."""
    result = np.zeros(batch.size, dtype=bool)
    has = batch.has("generation")
    if not has.any():
        return result
    attempts, generations = batch.get("attempt", 1.0), batch.get("generation")
    for group in groups:
        attempt, generation = group.key
        is_earlier = (attempts < attempt) | ((attempts == attempt) & (generations < generation))
        result |= is_earlier & (batch.step > group.from_step)
    return result & has
