"""What the method is told, and its answers in the words of the conductor. Nothing is done here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from yunlu.tuning.values import Continue, Judgement, StudySnapshot, TrialState, Verdict

if TYPE_CHECKING:
    from yunlu.tuning.study_runner.slot_allocation import SlotAllocation
    from yunlu.tuning.study_runner.limits import StudyLimits
    from yunlu.tuning.records import Records
    from yunlu.tuning.values import Method, Action


class MethodDecisions:
    """Asks the method of a study."""

    def __init__(self, records: Records, method: Method, hosting: SlotAllocation, limits: StudyLimits) -> None:
        self._records, self._method = records, method
        self._hosting, self._limits = hosting, limits

    def choose(self) -> Action:
        """What to do with a free place."""
        return self._method.choose(self._stand())

    def judge(self, number: int) -> Judgement:
        """What becomes of a trial after its newest evaluation; one that goes on has room to."""
        trial, stand = self._records.trial(number), self._stand()
        judged = self._method.judge(number, stand)
        until = max(trial.until, judged.until)
        verdict = judged.verdict
        if verdict is Verdict.GO_ON and until <= trial.rung:
            verdict = Verdict.HOLD
        if verdict is Verdict.HOLD and trial.rung >= trial.until:
            # It waits at the gate: it need not leave where it would be taken up again at once.
            move = self._method.choose(_as_held(stand, number))
            if isinstance(move, Continue) and move.number == number and move.until > trial.rung:
                verdict, until = Verdict.GO_ON, move.until
        return Judgement(verdict, until, judged.reason)

    def _stand(self) -> StudySnapshot:
        asked, trials = self._records.asked, self._records.trials()
        left = None if asked.trials is None else max(asked.trials - len(trials), 0)
        return StudySnapshot(
            trials=trials,
            rungs=max(asked.rungs, 1),
            objectives=len(asked.metrics),
            trials_left=left,
            seconds_left=self._limits.seconds_left(),
            workers=self._hosting.workers,
        )


def _as_held(stand: StudySnapshot, number: int) -> StudySnapshot:
    trials = list(stand.trials)
    trials[number] = replace(trials[number], state=TrialState.HELD)
    return replace(stand, trials=trials)
