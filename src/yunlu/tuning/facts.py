"""A study and its trials at one instant. Values only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from yunlu.core.value import Value
from yunlu.tuning.values import Dimension, ParamValue, Point, Trial, TrialState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

StudyState = Literal["running", "finished", "stopped", "failed"]
"""``stopped``: it can continue; ``finished`` and ``failed``: see ``reason``."""
Direction = Literal["minimize", "maximize"]


class TrialFacts(Value):
    """One trial: what the methods see, and fields for people."""

    trial: Trial
    run: str | None
    """Id of its run; None before it has one, and for external trials."""
    directions: tuple[Direction, ...]
    times: tuple[float, ...] = ()
    """Instants of its evaluations, one for each of ``points``."""
    began_at: float | None = None
    ended_at: float | None = None
    device_seconds: float = 0.0
    dollars: float | None = None
    """None: no price is known."""
    devices: int = 0
    """Held now."""
    reason: str = ""
    """Why it was held, pruned or stopped."""
    error: str | None = None
    """Why it failed."""

    @property
    def number(self) -> int:
        """Its number in the study, from 0."""
        return self.trial.number

    @property
    def state(self) -> TrialState:
        """Its state."""
        return self.trial.state

    @property
    def params(self) -> Mapping[str, Any]:
        """Its setting."""
        return self.trial.params

    @property
    def points(self) -> tuple[Point, ...]:
        """Its evaluations; values as the methods see them, smaller is better."""
        return self.trial.points

    @property
    def curve(self) -> list[tuple[int, tuple[float, ...]]]:
        """Its evaluations by rung, each metric with its own sign."""
        return [(point.rung, self._own(point.values)) for point in self.trial.points]

    @property
    def values(self) -> tuple[float, ...] | None:
        """Of its best evaluation (of several objectives: its last), each metric with its own sign."""
        point = best_point(self.trial)
        return None if point is None else self._own(point.values)

    @property
    def value(self) -> float | None:
        """The first objective of ``values``."""
        return None if self.values is None else self.values[0]

    def _own(self, values: tuple[float, ...]) -> tuple[float, ...]:
        # Adding zero: a turned zero is no "-0.0".
        return tuple(
            (-value if direction == "maximize" else value) + 0.0
            for value, direction in zip(values, self.directions, strict=True)
        )


class StudyView(Value):
    """A study at one instant."""

    name: str
    path: Path
    """Its directory."""
    storage: str
    """Optuna's URL of its trials."""
    source: str | None = None
    """The job's file, as the user named it."""
    overrides: tuple[str, ...] = ()
    """Overrides of the job, as typed."""
    extra: dict[str, ParamValue] = Field(default_factory=dict[str, ParamValue])
    """Fields that go with any trial's setting when the job itself is trained: of a study on a narrow copy."""
    metrics: tuple[str, ...]
    """One for each objective: ``loss``, ``accuracy``, ``cost``, ..."""
    directions: tuple[Direction, ...]
    state: StudyState
    reason: str = ""
    """Why it ended."""
    method: str = ""
    """Name of the search method."""
    stop_rule: str = ""
    """Name of the early-stopping rule; empty where the method includes one."""
    rungs: int = 0
    """Evaluations of a whole training; 0: not known before the first trial has its plan."""
    dimensions: tuple[Dimension, ...] = ()
    trials: tuple[TrialFacts, ...] = ()
    """By number."""
    best: TrialFacts | None = None
    """By the first objective."""
    front: tuple[TrialFacts, ...] = ()
    """Pareto front of several objectives; else the best alone."""
    devices: int = 0
    """Devices of the study; 0: not started."""
    began_at: float | None = None
    ended_at: float | None = None
    idle_s: float = 0.0
    """Between them, while no process ran it."""
    spent_s: float = 0.0
    """Device-seconds of all trials."""
    spent_dollars: float | None = None
    """None: no price is known."""
    trials_limit: int | None = None
    dollars_limit: float | None = None
    deadline_at: float | None = None
    forecast: dict[str, Any] | None = None
    """Forecast before it started."""

    @property
    def metric(self) -> str:
        """The first objective."""
        return self.metrics[0]

    @property
    def direction(self) -> Direction:
        """Of the first objective."""
        return self.directions[0]

    @property
    def is_external(self) -> bool:
        """Whether its trials are run by an external program, through ask and tell."""
        return bool(self.trials) and all(facts.run is None for facts in self.trials)

    def count(self, state: TrialState) -> int:
        """How many trials are in this state."""
        return sum(facts.state is state for facts in self.trials)


def best_point(trial: Trial) -> Point | None:
    """The evaluation that represents a trial: its best; of several objectives the last."""
    finite = [point for point in trial.points if all(map(math.isfinite, point.values))]
    if not finite:
        return None
    if len(finite[0].values) > 1:
        return finite[-1]
    return min(finite, key=lambda point: point.value)


def find_best(trials: Sequence[TrialFacts]) -> TrialFacts | None:
    """The trial with the best evaluation by the first objective; the earlier of two alike."""
    ranked = [
        (point.value, facts.number, facts)
        for facts in trials
        if facts.state is not TrialState.FAILED and (point := best_point(facts.trial)) is not None
    ]
    return min(ranked, key=lambda entry: entry[:2])[2] if ranked else None


def find_front(trials: Sequence[TrialFacts]) -> tuple[TrialFacts, ...]:
    """The Pareto front: trials that no other beats in one objective without losing in another."""
    known = [
        (point.values, facts)
        for facts in trials
        if facts.state is not TrialState.FAILED and (point := best_point(facts.trial)) is not None
    ]
    return tuple(
        facts for values, facts in known if not any(_beats(other, values) for other, _ in known)
    )


def wall_s(view: StudyView, now: float) -> float | None:
    """Seconds from the study's beginning to its end, or until now; pauses do not count."""
    if view.began_at is None:
        return None
    return max(0.0, (view.ended_at or now) - view.began_at - view.idle_s)


def rank_trials(trials: Sequence[TrialFacts], *, best: TrialFacts | None) -> list[TrialFacts]:
    """The best first, then by value; those without one after them, failures last."""

    def sort_key(facts: TrialFacts) -> tuple[bool, bool, bool, float, int]:
        point = best_point(facts.trial)
        return (
            best is None or facts.number != best.number,
            facts.state is TrialState.FAILED,
            point is None,
            0.0 if point is None else point.value,
            facts.number,
        )

    return sorted(trials, key=sort_key)


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
