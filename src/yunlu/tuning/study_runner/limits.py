"""Limits of a study: deadline, budget, stop request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yunlu.tuning.facts import StudyState, TrialFacts
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_runner.slot_allocation import SlotAllocation
    from yunlu.tuning.study_runner.watched_trial import WatchedTrial


class StudyLimits:
    """Remaining time and budget."""

    def __init__(
        self,
        records: Records,
        allocation: SlotAllocation,
        watched_trials: Mapping[int, WatchedTrial],
        *,
        clock_at: float,
    ) -> None:
        """``clock_at`` is the start of the deadline."""
        self._records, self._allocation, self._watched_trials = records, allocation, watched_trials
        self._clock_at = clock_at

    def seconds_left(self) -> float | None:
        """Until the deadline or the end of the budget, whichever comes first; None: no limit."""
        ends = [left for left in (self._time_left(), self._money_left()) if left is not None]
        return max(min(ends), 0.0) if ends else None

    def pays_for_start(self) -> bool:
        """Whether the budget pays for the start-up of one more trial."""
        left, starts = self._money_left(), len(self._allocation.queue) + 1
        return left is None or left >= self._allocation.wall_s_of(starts * self._allocation.start_s)

    def find_end(self, is_asked_to_stop: Callable[[], bool]) -> tuple[StudyState, str] | None:
        """State and reason with which the study ends now; None while it continues."""
        if is_asked_to_stop() or self._records.dir.stop.exists():
            return "stopped", "asked to stop"
        for left, reason in (
            (self._time_left(), "the deadline has passed"),
            (self._money_left(), "the budget is spent"),
        ):
            if left is not None and left <= 0:
                return "finished", reason
        return None

    def _time_left(self) -> float | None:
        deadline = self._records.request.deadline_s
        return None if deadline is None else self._clock_at + deadline - time.time()

    def _money_left(self) -> float | None:
        """In wall seconds of all devices."""
        dollars = self._records.request.dollars
        if dollars is None:
            return None
        now = time.time()
        spent_s = sum(self._spent_s(facts, now) for facts in self._records.facts())
        return self._allocation.seconds_for(dollars - (self._allocation.dollars(spent_s) or 0.0))

    def _spent_s(self, facts: TrialFacts, now: float) -> float:
        watched = self._watched_trials.get(facts.number)
        if watched is None:
            return facts.device_seconds
        spent_s = watched.events.device_seconds(now)
        if watched.events.state not in {RunState.PENDING, RunState.PLANNING}:
            return spent_s
        # A worker reads a stop request only once it has started: its start-up counts as spent.
        return max(spent_s, facts.device_seconds + self._allocation.start_s)
