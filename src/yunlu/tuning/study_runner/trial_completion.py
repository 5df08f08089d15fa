"""What becomes of a trial whose run rests: it is over, held, or has to be started again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from yunlu.runs.states import RunState
from yunlu.tuning.study_runner.objectives import check_failures
from yunlu.tuning.study_runner.trial_runs import drop_checkpoints, find_run
from yunlu.tuning.facts import find_best
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from yunlu.tuning.study_runner.slot_allocation import SlotAllocation
    from yunlu.tuning.study_runner.watched_trial import WatchedTrial
    from yunlu.tuning.study_runner.slots import Slots
    from yunlu.tuning.study_runner.trial_start import TrialStarter
    from yunlu.tuning.records import Records

_LOST = 3
"""Times that a worker may vanish before its next evaluation."""


class TrialCompletion:
    """Takes runs that rest from those that are watched."""

    def __init__(
        self,
        records: Records,
        hosting: SlotAllocation,
        places: Slots,
        starter: TrialStarter,
        lives: dict[int, WatchedTrial],
    ) -> None:
        """``lives``: those that are watched, by the numbers of their trials."""
        self._records, self._hosting, self._places = records, hosting, places
        self._starter, self._lives = starter, lives

    def forget(self, live: WatchedTrial) -> None:
        """Watch a run no longer."""
        self._lives.pop(live.number, None)
        self._hosting.leave(live.run)

    def take(self, live: WatchedTrial, *, is_ending: bool) -> None:
        """A run rests; nothing is started again where the study is ending."""
        story, spent_s = live.story, live.story.device_seconds(time.time())
        cost: dict[str, Any] = {
            "device_seconds": spent_s,
            "dollars": self._hosting.dollars(spent_s),
            "devices": 0,
        }
        match story.state:
            case RunState.FINISHED:
                self.forget(live)
                self._finish(live, cost)
            case RunState.STOPPED if live.ruled == "prune" or story.reason.startswith("pruned"):
                self.forget(live)
                self._records.end(live.number, TrialState.PRUNED, reason=story.reason, **cost)
                self._places.let_go(live.run, for_good=True)
                drop_checkpoints(live.run)
            case RunState.STOPPED:
                self.forget(live)
                self._hold(live, cost, is_ending=is_ending)
            case RunState.LOST if live.lost < _LOST and not is_ending:
                live.lost += 1
                self._records.change_trial(live.number, **cost)
                self._hosting.enqueue(live.number, live.run)
                self._hosting.leave(live.run)
            case _:
                self.forget(live)
                self._fail(live, cost)

    def _finish(self, live: WatchedTrial, cost: dict[str, Any]) -> None:
        """Of those that are done, the best alone keeps its checkpoints: all have their models."""
        before = find_best(self._records.facts())
        self._records.end(live.number, TrialState.DONE, reason="", **cost)
        best = find_best(self._records.facts())
        is_best = best is not None and best.number == live.number
        worse = before if is_best else self._records.facts()[live.number]
        if worse is not None and worse.state is TrialState.DONE and not self._starter.saves:
            run = find_run(worse.run or "")
            if run is not None:
                drop_checkpoints(run)

    def _hold(self, live: WatchedTrial, cost: dict[str, Any], *, is_ending: bool) -> None:
        trial = self._records.trial(live.number)
        goes_on = not live.ruled and trial.until > trial.rung and not is_ending
        state = TrialState.RUNNING if goes_on else TrialState.HELD
        self._records.change_trial(live.number, state=state, reason=live.story.reason, **cost)
        if goes_on:  # it had not heard in time that it may, or somebody else has stopped it
            self._hosting.enqueue(live.number, live.run)
        else:
            self._places.let_go(live.run, for_good=False)

    def _fail(self, live: WatchedTrial, cost: dict[str, Any]) -> None:
        error = live.story.error
        message = (error.message if error else live.story.reason) or "its worker vanished"
        self._records.end(live.number, TrialState.FAILED, error=message, **cost)
        check_failures(self._records.facts(), message, hint=error.hint if error else None)
