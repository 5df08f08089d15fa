"""Early stopping: how far a trial is trained.

Rules over the snapshot; each composes with any sampler.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from yunlu.tuning.values import (
    Continue,
    EndStudy,
    Judgement,
    StartTrial,
    TrialState,
    Verdict,
    WaitForResults,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.tuning.methods.samplers import Sampler
    from yunlu.tuning.methods.trial_table import TrialTable
    from yunlu.tuning.values import Action, StudySnapshot, Trial

    Indices = NDArray[np.intp]
    Mask = NDArray[np.bool_]


def find_milestones(rungs: int, first: float, growth: float) -> list[int]:
    """Rungs at which trials are compared, growing geometrically."""
    milestones = [max(round(first * rungs), 1)]
    while milestones[-1] < rungs:
        milestones.append(min(max(milestones[-1] + 1, round(milestones[-1] * growth)), rungs))
    return milestones


def next_milestone(milestones: list[int], rung: int) -> int:
    """The first one after a rung."""
    return next(milestone for milestone in milestones if milestone > rung)


def rank(table: TrialTable, rows: Indices, milestones: list[int]) -> tuple[Indices, Indices]:
    """Number of better trials at the last milestone that each has passed, and of how many."""
    at = np.searchsorted(milestones, table.rungs[rows], side="right") - 1
    columns = table.ladder[:, np.maximum(at, 0)]
    own = columns[rows, np.arange(len(rows))]
    earlier = np.arange(len(columns))[:, None] < rows[None, :]
    better = (columns < own) | ((columns == own) & earlier)
    passed = at >= 0
    return better.sum(axis=0) * passed, np.isfinite(columns).sum(axis=0) * passed


def may_promote(table: TrialTable, rows: Indices, milestones: list[int], halving: float) -> Mask:
    """Whether each is among the trials of its milestone that may continue to the next."""
    better, of = rank(table, rows, milestones)
    known = np.array(milestones, dtype=np.float64)
    at = np.clip(np.searchsorted(milestones, table.rungs[rows], side="right") - 1, 0, None)
    longer = known[np.minimum(at + 1, len(known) - 1)] / known[at]
    return better < np.maximum(of * longer ** -np.log2(halving), 1.0)


class Stopping(Protocol):
    """An early-stopping rule."""

    def first_until(self, number: int, rungs: int) -> int:
        """How far the trial with this number may run at first."""
        ...

    def judge(self, trial: Trial, snapshot: StudySnapshot) -> Judgement:
        """Decide on a running trial after its newest evaluation."""
        ...

    def promote(self, snapshot: StudySnapshot) -> Continue | None:
        """A held trial to promote."""
        ...

    def finish(self, snapshot: StudySnapshot) -> Continue | None:
        """A held trial worth finishing when nothing else is left to do."""
        ...


class SamplerWithStopping:
    """A method composed of a sampler and an early-stopping rule."""

    def __init__(self, sampler: Sampler, stopping: Stopping) -> None:
        """Both see the whole snapshot."""
        self._sampler = sampler
        self._stopping = stopping

    def choose(self, snapshot: StudySnapshot) -> Action:
        """Promote a trial, else start another."""
        if snapshot.seconds_left is not None and snapshot.seconds_left <= 0:
            return EndStudy("the deadline has passed")
        if promoted := self._stopping.promote(snapshot):
            return promoted
        if snapshot.trials_left == 0:
            return self._close(snapshot, f"all {len(snapshot.trials)} trials were made")
        params = self._sampler.suggest(snapshot)
        if params is None:
            return self._close(snapshot, "every setting was tried")
        return StartTrial(params, self._stopping.first_until(len(snapshot.trials), snapshot.rungs))

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """By the rule."""
        return self._stopping.judge(find_trial(number, snapshot), snapshot)

    def _close(self, snapshot: StudySnapshot, reason: str) -> Action:
        if any(t.state in {TrialState.RUNNING, TrialState.WAITING} for t in snapshot.trials):
            return WaitForResults()
        return self._stopping.finish(snapshot) or EndStudy(reason)


class NoStopping:
    """Every trial is trained to its end."""

    def first_until(self, number: int, rungs: int) -> int:  # noqa: ARG002
        """The end."""
        return rungs

    def judge(self, trial: Trial, snapshot: StudySnapshot) -> Judgement:  # noqa: ARG002
        """Always continue."""
        return Judgement(Verdict.GO_ON, until=snapshot.rungs)

    def promote(self, snapshot: StudySnapshot) -> Continue | None:
        """A trial held by an earlier rule."""
        held = next((t for t in snapshot.trials if t.state is TrialState.HELD), None)
        return None if held is None else Continue(held.number, snapshot.rungs)

    def finish(self, snapshot: StudySnapshot) -> Continue | None:  # noqa: ARG002
        """Nothing is held."""
        return None


class MedianStopping(NoStopping):
    """Prune a trial whose best so far is worse than the others' median up to the same rung.

    The rule of Golovin et al. (2017, Vizier): the others count with the mean of their course.
    """

    def __init__(self, *, first: int = 1, trials: int = 5) -> None:
        """No trial is judged before rung ``first``, nor before ``trials`` others have reached its rung."""
        self._first = first
        self._trials = trials

    def judge(self, trial: Trial, snapshot: StudySnapshot) -> Judgement:
        """Compared with all trials that have reached its rung."""
        if trial.rung < self._first:
            return super().judge(trial, snapshot)
        means = sorted(
            _mean_until(other, trial.rung)
            for other in snapshot.trials
            if other.number != trial.number and other.rung >= trial.rung
        )
        if len(means) < self._trials:
            return super().judge(trial, snapshot)
        middle = len(means) // 2
        median = means[middle] if len(means) % 2 else (means[middle - 1] + means[middle]) / 2
        if best_of(trial) <= median:
            return super().judge(trial, snapshot)
        return Judgement(Verdict.PRUNE, reason=f"its best is worse than the median of {len(means)}")


class PatienceStopping(NoStopping):
    """Prune a trial after this many evaluations without improvement."""

    def __init__(self, *, patience: int = 5, min_delta: float = 0.0) -> None:
        """A change below ``min_delta`` is none."""
        self._patience = patience
        self._min_delta = min_delta

    def judge(self, trial: Trial, snapshot: StudySnapshot) -> Judgement:
        """By its own curve."""
        best, waited = math.inf, 0
        for point in trial.points:
            if as_value(point.value) < best - self._min_delta:
                best, waited = as_value(point.value), 0
            else:
                waited += 1
        if waited < self._patience:
            return super().judge(trial, snapshot)
        return Judgement(
            Verdict.PRUNE, reason=f"no better for {waited} evaluation{'s' * (waited != 1)}"
        )


class SuccessiveHalving:
    """Asynchronous successive halving (ASHA, Li et al. 2020), in one bracket or Hyperband's.

    A trial is held at each of a few rungs, ``eta`` times as far each; the best one in ``eta`` of
    those that came there is promoted. Never more than that are promoted (the published rule also keeps
    those that were overtaken later). Hyperband (Li et al. 2018) has several brackets
    that begin with rungs of their own: a trial's number says which is its.
    """

    def __init__(self, *, eta: int = 3, first: int = 1, brackets: int | None = 1) -> None:
        """``brackets`` None: as many as the rungs allow."""
        self._eta = eta
        self._first = first
        self._brackets = brackets
        self._rounds: dict[int, list[int]] = {}

    def first_until(self, number: int, rungs: int) -> int:
        """The first rung of its bracket."""
        return self.milestones(number, rungs)[0]

    def judge(self, trial: Trial, snapshot: StudySnapshot) -> Judgement:
        """At a rung of its bracket: among the best, or held."""
        milestones = self.milestones(trial.number, snapshot.rungs)
        if trial.rung < trial.until:
            return Judgement(Verdict.GO_ON, until=trial.until)
        following = next((rung for rung in milestones if rung > trial.rung), snapshot.rungs)
        if trial.rung not in milestones:
            return Judgement(Verdict.GO_ON, until=following)
        if trial.rung >= snapshot.rungs:
            return Judgement(Verdict.GO_ON, until=snapshot.rungs)
        rivals = self._rivals(trial.number, snapshot)
        if trial.number in self._promotable(rivals, trial.rung, arriving=trial.number):
            return Judgement(Verdict.GO_ON, until=following)
        return Judgement(Verdict.HOLD, reason=f"not yet among the best in {self._eta} at its rung")

    def promote(self, snapshot: StudySnapshot) -> Continue | None:
        """The best held trial of the highest rung with room for a promotion."""
        for rivals in self._all_rivals(snapshot):
            milestones = self.milestones(rivals[0].number, snapshot.rungs)
            for rung, following in reversed(list(pairwise(milestones))):
                if rising := self._promotable(rivals, rung):
                    return Continue(rising[0], following)
        return None

    def finish(self, snapshot: StudySnapshot) -> Continue | None:
        """The best of those that came farthest, where none was trained to its end."""
        if any(trial.state is TrialState.DONE for trial in snapshot.trials):
            return None
        held = [trial for trial in snapshot.trials if trial.state is TrialState.HELD]
        if not held:
            return None
        best = min(held, key=lambda trial: (-trial.rung, best_of(trial), trial.number))
        return Continue(best.number, snapshot.rungs)

    def milestones(self, number: int, rungs: int) -> list[int]:
        """The rungs at which the trial with this number is compared; the last is the end."""
        ladder = self._ladder(rungs)
        return ladder[self.bracket_of(number, rungs) :]

    def bracket_of(self, number: int, rungs: int) -> int:
        """Which bracket it is in: 0 begins with the first rung."""
        if self._brackets == 1:
            return 0
        if rungs not in self._rounds:
            sizes = enumerate(self._bracket_sizes(rungs))
            self._rounds[rungs] = [bracket for bracket, size in sizes for _ in range(size)]
        return self._rounds[rungs][number % len(self._rounds[rungs])]

    def _ladder(self, rungs: int) -> list[int]:
        ladder: list[int] = []
        rung = self._first
        while rung < rungs:
            ladder.append(rung)
            rung *= self._eta
        return [*ladder, rungs]

    def _bracket_sizes(self, rungs: int) -> list[int]:
        """How many of a round of trials each bracket gets: about the same training for each."""
        most = len(self._ladder(rungs))
        count = min(self._brackets or most, most)
        return [
            max(round(most / (most - bracket) * self._eta ** (most - 1 - bracket)), 1)
            for bracket in range(count)
        ]

    def _rivals(self, number: int, snapshot: StudySnapshot) -> list[Trial]:
        bracket = self.bracket_of(number, snapshot.rungs)
        return [t for t in snapshot.trials if self.bracket_of(t.number, snapshot.rungs) == bracket]

    def _all_rivals(self, snapshot: StudySnapshot) -> list[list[Trial]]:
        result: dict[int, list[Trial]] = {}
        for trial in snapshot.trials:
            result.setdefault(self.bracket_of(trial.number, snapshot.rungs), []).append(trial)
        return [result[bracket] for bracket in sorted(result)]

    def _promotable(
        self, rivals: Sequence[Trial], rung: int, *, arriving: int | None = None
    ) -> list[int]:
        """Trials at the rung that may be promoted now, the best first."""
        came = [trial for trial in rivals if trial.rung >= rung]
        share = len(came) // self._eta
        room = share - sum(has_gone_beyond(trial, rung) for trial in came)
        if room <= 0:
            return []
        ranked = sorted((value_at(trial, rung), trial.number, trial) for trial in came)
        able = [
            number
            for _, number, trial in ranked[:share]
            if not has_gone_beyond(trial, rung)
            and (trial.state is TrialState.HELD or number == arriving)
        ]
        return able[:room]


def find_trial(number: int, snapshot: StudySnapshot) -> Trial:
    """The trial with this number."""
    trials = snapshot.trials
    if number < len(trials) and trials[number].number == number:
        return trials[number]
    return next(trial for trial in trials if trial.number == number)


def has_gone_beyond(trial: Trial, rung: int) -> bool:
    """Whether it was promoted from the rung."""
    return trial.rung > rung or trial.until > rung


def best_of(trial: Trial) -> float:
    """Its best evaluation."""
    return min((as_value(point.value) for point in trial.points), default=math.inf)


def value_at(trial: Trial, rung: int) -> float:
    """Its evaluation at the rung; infinite where there is none."""
    if 0 < rung <= len(trial.points) and trial.points[rung - 1].rung == rung:
        return as_value(trial.points[rung - 1].value)
    return next((as_value(p.value) for p in trial.points if p.rung == rung), math.inf)


def as_value(value: float) -> float:
    """What is not a number is the worst."""
    return math.inf if math.isnan(value) else value


def _mean_until(trial: Trial, rung: int) -> float:
    values = [as_value(point.value) for point in trial.points if point.rung <= rung]
    return math.fsum(values) / len(values) if values else math.inf
