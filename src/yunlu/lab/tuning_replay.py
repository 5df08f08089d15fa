"""A study on recorded learning curves: the method decides, a simulated clock trains.

Only training takes time: workers train trials rung by rung at the recorded pace, a decision is
instantaneous, and a held trial goes on where it stood, on any worker.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from yunlu.tuning.values import (
    Continue,
    EndStudy,
    Point,
    StartTrial,
    StudySnapshot,
    Trial,
    TrialState,
    Verdict,
    WaitForResults,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.values import Action, Dimension, Judgement, Method, Params


class RecordedCurves(Protocol):
    """Learning curves of every setting of one task."""

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The space to search."""
        ...

    @property
    def rungs(self) -> int:
        """Evaluations of a full training."""
        ...

    def curve(self, params: Params) -> tuple[Sequence[float], Sequence[float]]:
        """The value at each rung (smaller is better), and the seconds of training until it."""
        ...


@dataclass(frozen=True, slots=True)
class ReplayedEvaluation:
    """One evaluation and its time."""

    at_s: float
    number: int
    rung: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTrace:
    """Events in order of time."""

    trials: tuple[Trial, ...]
    evaluations: tuple[ReplayedEvaluation, ...]
    ended_at_s: float
    """Time of the last evaluation, or the end of the budget."""
    resumed: int
    """Number of resumed trials."""
    reason: str = ""
    """Why the method ended the study; empty where the budget did."""

    def improvements(self) -> list[tuple[float, float]]:
        """Times at which the best value improved, and that value."""
        matches: list[tuple[float, float]] = []
        for evaluation in self.evaluations:
            if not matches or evaluation.value < matches[-1][1]:
                matches.append((evaluation.at_s, evaluation.value))
        return matches


def replay(
    method: Method, curves: RecordedCurves, *, workers: int, budget_s: float, resume_s: float = 0.0
) -> ReplayTrace:
    """Run a study for ``budget_s`` on the clock; ``resume_s``: what it takes a held trial to go on.

    What is under way when the time is up is lost.
    """
    if workers < 1:
        raise ValueError(f"{workers} workers: at least 1 is needed")
    return _Replay(method, curves, workers, budget_s, resume_s).run()


class _Replay:
    """State of one replay."""

    def __init__(
        self, method: Method, curves: RecordedCurves, workers: int, budget_s: float, resume_s: float
    ) -> None:
        self._method, self._curves = method, curves
        self._workers, self._budget_s, self._resume_s = workers, budget_s, resume_s
        self._now_s = 0.0
        self._idle = workers
        self._due: list[tuple[float, int, int]] = []
        """Time, scheduling order, trial."""
        self._scheduled = 0
        self._resumed = 0
        self._trials: list[Trial] = []
        self._courses: list[tuple[Sequence[float], Sequence[float]]] = []
        self._evaluations: list[ReplayedEvaluation] = []
        self._reason: str | None = None

    def run(self) -> ReplayTrace:
        self._fill()
        while self._due and self._due[0][0] <= self._budget_s:
            self._now_s, _, number = heapq.heappop(self._due)
            self._evaluate(number)
            self._fill()
        return ReplayTrace(
            trials=tuple(self._trials),
            evaluations=tuple(self._evaluations),
            ended_at_s=self._budget_s if self._due else self._now_s,
            resumed=self._resumed,
            reason=self._reason or "",
        )

    def _fill(self) -> None:
        """Ask the method about each idle worker, until it waits or ends."""
        while self._idle and self._reason is None:
            move = self._method.choose(self._snapshot())
            if isinstance(move, WaitForResults):
                if self._idle == self._workers:
                    raise RuntimeError("the method waits for others, but no trial runs")
                return
            self._make(move)

    def _make(self, move: Action) -> None:
        match move:
            case StartTrial():
                self._begin(move)
            case Continue():
                self._go_on(move)
            case EndStudy():
                self._reason = move.reason or "the method ended it"
            case WaitForResults():
                pass

    def _begin(self, move: StartTrial) -> None:
        if move.copy_from is not None:
            raise ValueError("recorded curves do not show how a copied checkpoint would continue")
        until = self._check_until(move.until, 0)
        self._trials.append(
            Trial(
                number=len(self._trials),
                params=move.params,
                state=TrialState.RUNNING,
                until=until,
            )
        )
        self._courses.append(self._curves.curve(move.params))
        self._idle -= 1
        self._train(self._trials[-1])

    def _go_on(self, move: Continue) -> None:
        trial = self._trials[move.number]
        until = self._check_until(move.until, trial.rung)
        if trial.state is TrialState.RUNNING and until > trial.until:
            self._trials[move.number] = replace(trial, until=until)
            return
        if trial.state is not TrialState.HELD:
            raise ValueError(f"trial {move.number} is {trial.state} and cannot go on to {until}")
        self._trials[move.number] = replace(trial, state=TrialState.RUNNING, until=until)
        self._idle -= 1
        self._resumed += 1
        self._train(trial, delay_s=self._resume_s)

    def _train(self, trial: Trial, *, delay_s: float = 0.0) -> None:
        seconds = self._courses[trial.number][1]
        took_s = seconds[trial.rung] - (seconds[trial.rung - 1] if trial.rung else 0.0)
        heapq.heappush(self._due, (self._now_s + delay_s + took_s, self._scheduled, trial.number))
        self._scheduled += 1

    def _evaluate(self, number: int) -> None:
        trial = self._trials[number]
        values, seconds = self._courses[number]
        point = Point(trial.rung + 1, (values[trial.rung],), seconds[trial.rung])
        trial = self._trials[number] = replace(trial, points=(*trial.points, point))
        self._evaluations.append(ReplayedEvaluation(self._now_s, number, point.rung, point.value))
        if point.rung == self._curves.rungs:
            self._trials[number] = replace(trial, state=TrialState.DONE)
        else:
            self._obey(self._method.judge(number, self._snapshot()), trial)
        if self._trials[number].state is TrialState.RUNNING:
            self._train(self._trials[number])
        else:
            self._idle += 1

    def _obey(self, judgement: Judgement, trial: Trial) -> None:
        until = min(max(trial.until, judgement.until), self._curves.rungs)
        if judgement.verdict is Verdict.PRUNE:
            trial = replace(trial, state=TrialState.PRUNED)
        elif judgement.verdict is Verdict.HOLD or until <= trial.rung:
            trial = replace(trial, state=TrialState.HELD)
        else:
            trial = replace(trial, until=until)
        self._trials[trial.number] = trial

    def _check_until(self, until: int, rung: int) -> int:
        if until <= rung:
            raise ValueError(f"from rung {rung} a trial cannot go on until rung {until}")
        return min(until, self._curves.rungs)

    def _snapshot(self) -> StudySnapshot:
        return StudySnapshot(
            trials=tuple(self._trials),
            rungs=self._curves.rungs,
            seconds_left=max(self._budget_s - self._now_s, 0.0),
            workers=self._workers,
        )
