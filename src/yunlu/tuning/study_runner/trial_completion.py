"""Handles ended runs: the trial is over, held, or started again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from yunlu.runs.states import RunState
from yunlu.tuning.facts import find_best
from yunlu.tuning.study_runner.objectives import check_failures
from yunlu.tuning.study_runner.trial_runs import drop_checkpoints, find_run
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_runner.slot_allocation import SlotAllocation
    from yunlu.tuning.study_runner.slots import Slots
    from yunlu.tuning.study_runner.trial_start import TrialStarter
    from yunlu.tuning.study_runner.watched_trial import WatchedTrial

_LOST = 3
"""Lost workers allowed between two evaluations."""


class TrialCompletion:
    """Updates trials whose run has ended."""

    def __init__(
        self,
        records: Records,
        allocation: SlotAllocation,
        slots: Slots,
        starter: TrialStarter,
        watched_trials: dict[int, WatchedTrial],
    ) -> None:
        """``watched_trials``: by trial number; ended ones are removed."""
        self._records, self._allocation, self._slots = records, allocation, slots
        self._starter, self._watched_trials = starter, watched_trials

    def unwatch(self, watched: WatchedTrial) -> None:
        """Stop watching a run."""
        self._watched_trials.pop(watched.number, None)
        self._allocation.leave(watched.run)

    def complete(self, watched: WatchedTrial, *, is_ending: bool) -> None:
        """Update the trial of an ended run; nothing is restarted while the study ends."""
        events, spent_s = watched.events, watched.events.device_seconds(time.time())
        cost: dict[str, Any] = {
            "device_seconds": spent_s,
            "dollars": self._allocation.dollars(spent_s),
            "devices": 0,
        }
        match events.state:
            case RunState.FINISHED:
                self.unwatch(watched)
                self._finish(watched, cost)
            case RunState.STOPPED if watched.verdict_sent == "prune" or events.reason.startswith(
                "pruned"
            ):
                self.unwatch(watched)
                self._records.end(watched.number, TrialState.PRUNED, reason=events.reason, **cost)
                self._slots.release(watched.run, for_good=True)
                drop_checkpoints(watched.run)
            case RunState.STOPPED:
                self.unwatch(watched)
                self._hold(watched, cost, is_ending=is_ending)
            case RunState.LOST if watched.lost < _LOST and not is_ending:
                watched.lost += 1
                self._records.change_trial(watched.number, **cost)
                self._allocation.enqueue(watched.number, watched.run)
                self._allocation.leave(watched.run)
            case _:
                self.unwatch(watched)
                self._fail(watched, cost)

    def _finish(self, watched: WatchedTrial, cost: dict[str, Any]) -> None:
        """Of finished trials, only the best keeps its checkpoints; all keep their exported models."""
        before = find_best(self._records.facts())
        self._records.end(watched.number, TrialState.DONE, reason="", **cost)
        best = find_best(self._records.facts())
        is_best = best is not None and best.number == watched.number
        worse = before if is_best else self._records.facts()[watched.number]
        if (
            worse is not None
            and worse.state is TrialState.DONE
            and not self._starter.saves_checkpoints
        ):
            run = find_run(worse.run or "")
            if run is not None:
                drop_checkpoints(run)

    def _hold(self, watched: WatchedTrial, cost: dict[str, Any], *, is_ending: bool) -> None:
        trial = self._records.trial(watched.number)
        goes_on = not watched.verdict_sent and trial.until > trial.rung and not is_ending
        state = TrialState.RUNNING if goes_on else TrialState.HELD
        self._records.change_trial(
            watched.number, state=state, reason=watched.events.reason, **cost
        )
        if goes_on:  # its extension came too late, or somebody else stopped it
            self._allocation.enqueue(watched.number, watched.run)
        else:
            self._slots.release(watched.run, for_good=False)

    def _fail(self, watched: WatchedTrial, cost: dict[str, Any]) -> None:
        error = watched.events.error
        message = (error.message if error else watched.events.reason) or "its worker was lost"
        self._records.end(watched.number, TrialState.FAILED, error=message, **cost)
        check_failures(self._records.facts(), message, hint=error.hint if error else None)
