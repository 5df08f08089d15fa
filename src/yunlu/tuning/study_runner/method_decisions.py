"""Questions to the search method and its answers as the runner applies them. No side effects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from yunlu.tuning.values import Continue, Judgement, StudySnapshot, TrialState, Verdict

if TYPE_CHECKING:
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_runner.limits import StudyLimits
    from yunlu.tuning.study_runner.slot_allocation import SlotAllocation
    from yunlu.tuning.values import Action, Method


class MethodDecisions:
    """Queries the search method of a study."""

    def __init__(
        self, records: Records, method: Method, allocation: SlotAllocation, limits: StudyLimits
    ) -> None:
        self._records, self._method = records, method
        self._allocation, self._limits = allocation, limits

    def choose(self) -> Action:
        """Next action for a free slot."""
        return self._method.choose(self._snapshot())

    def judge(self, number: int) -> Judgement:
        """Verdict on a trial after its newest evaluation; ``until`` lies beyond where it continues."""
        trial, snapshot = self._records.trial(number), self._snapshot()
        judgement = self._method.judge(number, snapshot)
        until = max(trial.until, judgement.until)
        verdict = judgement.verdict
        if verdict is Verdict.GO_ON and until <= trial.rung:
            verdict = Verdict.HOLD
        if verdict is Verdict.HOLD and trial.rung >= trial.until:
            # It waits for the verdict: no need to leave where it would be resumed at once.
            move = self._method.choose(_as_held(snapshot, number))
            if isinstance(move, Continue) and move.number == number and move.until > trial.rung:
                verdict, until = Verdict.GO_ON, move.until
        return Judgement(verdict, until, judgement.reason)

    def _snapshot(self) -> StudySnapshot:
        request, trials = self._records.request, self._records.trials()
        left = None if request.trials is None else max(request.trials - len(trials), 0)
        return StudySnapshot(
            trials=trials,
            rungs=max(request.rungs, 1),
            objectives=len(request.metrics),
            trials_left=left,
            seconds_left=self._limits.seconds_left(),
            workers=self._allocation.workers,
        )


def _as_held(snapshot: StudySnapshot, number: int) -> StudySnapshot:
    trials = list(snapshot.trials)
    trials[number] = replace(trials[number], state=TrialState.HELD)
    return replace(snapshot, trials=trials)
