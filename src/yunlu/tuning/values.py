"""Input and output of search methods. Values only; spans in seconds.

The same methods decide in a live study and in the replay of recorded curves.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (values that hold a dimension read it)
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

ParamValue = float | int | str | bool | None
Params = dict[str, ParamValue]
"""A setting of the job: its dotted fields and their values."""


class TrialState(StrEnum):
    """State of a trial."""

    WAITING = "waiting"  # decided, not yet started
    RUNNING = "running"  # training, or about to: it holds a slot
    HELD = "held"  # saved at a rung: can continue from there, holds no devices
    PRUNED = "pruned"  # ended early; never continues
    DONE = "done"  # trained to its end
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self in {TrialState.PRUNED, TrialState.DONE, TrialState.FAILED}


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of a trial."""

    rung: int
    """Evaluations so far, this one included: 1, 2, ... up to the study's ``rungs``."""
    values: tuple[float, ...]
    """One for each objective, smaller is better (a metric to maximize is negated)."""
    seconds: float
    """Device-seconds that the trial had used by then, over all its attempts."""

    @property
    def value(self) -> float:
        """The first objective."""
        return self.values[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting and its evaluations so far."""

    number: int
    """From 0, in the order of their start; also its number in Optuna."""
    params: Params
    state: TrialState
    points: tuple[Point, ...] = ()
    until: int = 0
    """The rung up to which it may run now."""
    copied_from: tuple[int, int] | None = None
    """Trial and rung whose checkpoint it started from."""

    @property
    def rung(self) -> int:
        """The last one it reached; 0 before the first."""
        return self.points[-1].rung if self.points else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySnapshot:
    """A study at one instant, as the methods see it."""

    trials: Sequence[Trial]
    rungs: int
    """Evaluations of a whole training."""
    objectives: int = 1
    trials_left: int | None = None
    """How many more may start; None: no limit."""
    seconds_left: float | None = None
    """Until the deadline or the end of the budget, whichever comes first; None: no limit."""
    workers: int = 1
    """Trials that can run at once."""


@dataclass(frozen=True, slots=True)
class StartTrial:
    """Start a new trial."""

    params: Params
    until: int
    copy_from: tuple[int, int] | None = None
    """Start from the checkpoint of this trial at this rung, with the new setting."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Continue a held (or running) trial to a later rung."""

    number: int
    until: int


@dataclass(frozen=True, slots=True)
class WaitForResults:
    """Start nothing before a running trial reports more."""


@dataclass(frozen=True, slots=True)
class EndStudy:
    """Nothing more is worth trying."""

    reason: str


Action = StartTrial | Continue | WaitForResults | EndStudy


class Verdict(StrEnum):
    """Decision on a running trial after an evaluation."""

    GO_ON = "go on"  # to its ``until``, or, where it has reached that, beyond: see ``Judgement``
    HOLD = "hold"  # save, free the devices; may continue later
    PRUNE = "prune"  # free the devices, for good


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and the rung up to which the trial may run."""

    verdict: Verdict
    until: int = 0
    reason: str = ""


@runtime_checkable
class Method(Protocol):
    """A search method. Deterministic: the same snapshot and seed give the same answer."""

    def choose(self, snapshot: StudySnapshot) -> Action:
        """Next action for a free slot."""
        ...

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """Decide on a running trial that was just evaluated (its newest point is in the snapshot)."""
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
    """Prior of the user: mean and deviation, in the dimension's own unit (log10 where ``log``)."""
