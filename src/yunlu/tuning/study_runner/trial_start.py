"""Creates the runs of trials: from scratch, from another trial's checkpoint, or as a copy of a result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.tuning.study_runner.cloning import clone
from yunlu.tuning.study_runner.shared_prefix import can_share_prefix, shared_rung
from yunlu.tuning.study_runner.trial_events import read_trial_events
from yunlu.tuning.study_runner.trial_runs import find_run, make_job, make_run
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.tuning.facts import TrialFacts
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_runner.slots import Slots
    from yunlu.tuning.values import Params, StartTrial

_ALL = 10_000
"""Checkpoints to keep: more than a trial has rungs."""


class TrialStarter:
    """Creates each trial's run once."""

    def __init__(self, records: Records, slots: Slots) -> None:
        self._records, self._slots = records, slots
        job = records.request.job
        is_population = job is not None and job.search is not None and job.search.stop.name == "pbt"
        self._shares = can_share_prefix(records.request.dimensions) and not is_population
        self.saves_checkpoints = self._shares or is_population
        """Whether trials save at each evaluation, for others to start from."""

    def record_duplicate(self, move: StartTrial) -> bool:
        """Record a trial whose setting was tried before, with that result; false where it is new."""
        if move.copy_from is not None:
            return False
        original = next(
            (fact for fact in self._records.facts() if _is_duplicate(fact, move.params)), None
        )
        if original is None:
            return False
        state = original.state if original.state.is_over else TrialState.PRUNED
        points = [*zip(original.points, original.times, strict=True)]
        number = self._records.begin(
            move.params, until=move.until, points=points, copied_from=(original.number, 0)
        )
        self._records.end(number, state, reason=f"the same setting as trial {original.number}")
        return True

    def begin(self, move: StartTrial) -> int:
        """Record a new trial and return its number."""
        if move.copy_from is not None:
            return self._records.begin(move.params, until=move.until, copied_from=move.copy_from)
        source, rung = self._find_prefix(move.params)
        if source is None:
            return self._records.begin(move.params, until=move.until)
        points = [*zip(source.points, source.times, strict=True)][:rung]
        return self._records.begin(
            move.params,
            until=max(move.until, rung),
            points=points,
            copied_from=(source.number, rung),
        )

    def make_run(self, number: int) -> RunStore:
        """The run of a recorded trial; created once, even across kills of the runner."""
        request, trial = self._records.request, self._records.trial(number)
        # Other trials may start from any of its rungs; a population only from the newest.
        keep = _ALL if self._shares else 3 if self.saves_checkpoints else 1
        job = make_job(request, number, trial.params, keep=keep)
        is_copy = trial.copied_from is not None
        run = make_run(
            request,
            number,
            trial.params,
            job,
            self._slots,
            saves_checkpoints=self.saves_checkpoints,
            is_copy=is_copy,
        )
        if trial.copied_from is not None:
            source, rung = trial.copied_from
            parent = find_run(self._records.facts()[source].run or "")
            if parent is None or not clone(parent, run, rung):
                run.warn(
                    f"The checkpoint of trial {source} at rung {rung} is gone: started from scratch."
                )
        self._records.change_trial(number, run=run.id)
        return run

    def _find_prefix(self, params: Params) -> tuple[TrialFacts | None, int]:
        """The trial with the longest shared prefix, and its last shared rung."""
        best: tuple[TrialFacts | None, int] = (None, 0)
        if not self._shares:
            return best
        request = self._records.request
        job = make_job(request, 0, params)
        for facts in self._records.facts():
            run = find_run(facts.run) if facts.run else None
            if run is None or len(facts.points) <= best[1]:
                continue
            rung = shared_rung(
                make_job(request, 0, dict(facts.params)), job, read_trial_events(run)
            )
            if best[1] < rung <= len(facts.points):
                best = (facts, rung)
        return best


def _is_duplicate(facts: TrialFacts, params: Params) -> bool:
    is_own = facts.trial.copied_from is None or any(point.rung == 1 for point in facts.points)
    return facts.state is not TrialState.FAILED and is_own and dict(facts.params) == params
