"""What a method of searching is told, and what it answers. Values only; spans in seconds.

The same methods decide in a live study and in the replay of recorded curves.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (values that hold a dimension read it)
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

ParamValue = float | int | str | bool | None
Params = dict[str, ParamValue]
"""A setting of the job: its dotted fields and their values."""


class TrialState(StrEnum):
    """Where a trial stands."""

    WAITING = "waiting"  # decided, not yet begun
    RUNNING = "running"  # training, or about to: it holds a place
    HELD = "held"  # saved at a rung: can go on from there, holds nothing
    PRUNED = "pruned"  # given up; never goes on
    DONE = "done"  # trained to its end
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether it rests for good."""
        return self in {TrialState.PRUNED, TrialState.DONE, TrialState.FAILED}


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of a trial."""

    rung: int
    """Evaluations so far, this one included: 1, 2, ... up to the study's ``rungs``."""
    values: tuple[float, ...]
    """One for each objective, smaller is better (a metric to maximise stands with its sign turned)."""
    seconds: float
    """Device-seconds that the trial had used by then, over all its lives."""

    @property
    def value(self) -> float:
        """The first objective."""
        return self.values[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting, and how it did so far."""

    number: int
    """From 0, in the order of their beginning; also Optuna's number of it."""
    params: Params
    state: TrialState
    points: tuple[Point, ...] = ()
    until: int = 0
    """The rung up to which it may run now."""
    copied_from: tuple[int, int] | None = None
    """The trial and rung whose checkpoint it began from."""

    @property
    def rung(self) -> int:
        """The last one it reached; 0 before the first."""
        return self.points[-1].rung if self.points else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySnapshot:
    """All that is known of a study at one instant."""

    trials: Sequence[Trial]
    rungs: int
    """Evaluations of a whole training."""
    objectives: int = 1
    trials_left: int | None = None
    """How many more may begin; None: any number."""
    seconds_left: float | None = None
    """Of time, or of what the budget buys, whichever ends first; None: no end."""
    workers: int = 1
    """Trials that can run at once."""


@dataclass(frozen=True, slots=True)
class StartTrial:
    """Start a new trial."""

    params: Params
    until: int
    copy_from: tuple[int, int] | None = None
    """Begin from the checkpoint of this trial at this rung, with the new setting."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Let a held (or running) trial train further."""

    number: int
    until: int


@dataclass(frozen=True, slots=True)
class WaitForResults:
    """Nothing is worth starting before somebody who runs has told more."""


@dataclass(frozen=True, slots=True)
class EndStudy:
    """Nothing more is worth trying."""

    reason: str


Action = StartTrial | Continue | WaitForResults | EndStudy


class Verdict(StrEnum):
    """What becomes of a running trial after an evaluation."""

    GO_ON = "go on"  # to its ``until``, or, where it has reached that, beyond: see ``Judgement``
    HOLD = "hold"  # save, free the devices; may go on later
    PRUNE = "prune"  # free the devices, for good


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and how far the trial may run by it."""

    verdict: Verdict
    until: int = 0
    reason: str = ""


class Method(Protocol):
    """A way of searching. Deterministic: the same stand and seed give the same answer."""

    def choose(self, snapshot: StudySnapshot) -> Action:
        """A place is free: what is done with it?"""
        ...

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """A running trial was just evaluated (its newest point is in the stand): does it go on?"""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One field of the job that varies, as the methods see it."""

    name: str
    choices: tuple[ParamValue, ...] = ()
    """Where it is one of a few; then ``low``, ``high`` and ``log`` say nothing."""
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    is_int: bool = False
    step: float | None = None
    when: Mapping[str, tuple[ParamValue, ...]] = field(
        default_factory=dict[str, tuple[ParamValue, ...]]
    )
    """It exists only where these fields have one of these values."""
    likely: tuple[float, float] | None = None
    """What the user believes: a mean and a deviation, in the dimension's own unit (log10 where ``log``)."""
