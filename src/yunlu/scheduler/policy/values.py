"""Input and output of allocation policies. Values only; instants and spans in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from yunlu.hardware.fleet import NOTHING, Node, Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray


class Speed(Protocol):
    """Speed model of a job: throughput and statistical efficiency."""

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Useful samples a second with so many devices on so many nodes; 0 where it cannot run.

        A useful sample is worth one at the job's own batch size. The best batch within the job's
        limits is understood.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A team that shares the pool, and its quota."""

    name: str
    quota: int | None = None
    """Devices it can always claim; by default a share of the pool by weight."""
    borrow: int | None = None
    """How many more it may hold while no other team claims them; by default any number."""
    weight: float = 1.0
    used_device_s: float = 0.0
    """Recent usage, with exponential decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A job as the allocator sees it."""

    id: str
    submitted_at: float
    speed: Speed
    remaining: float | None = None
    """Useful samples still to be trained; None if its length is unknown."""
    done: float = 0.0
    """Useful samples trained so far."""
    min_devices: int = 1
    max_devices: int = 1 << 30
    asked_devices: int = 1
    """Devices its owner would take if sizes were fixed: what policies with fixed sizes use."""
    multiple: int = 1
    """Its number of devices is a multiple of this (a layout with tensor or pipeline parallelism)."""
    types: frozenset[str] | None = None
    """Types of devices it can run on; None is any."""
    held: Placement = NOTHING
    restart_s: float = 30.0
    """Measured cost of a move or resize."""
    restarts: int = 0
    served_device_s: float = 0.0
    """Device-seconds it has had."""
    held_since: float | None = None
    """When it got what it holds now."""
    is_pinned: bool = False
    """Being moved, or pinned by its owner: keeps exactly what it holds."""
    program: str = ""
    """What it trains: jobs of the same program are alike. Empty if unknown."""
    team: str = ""
    priority: int = 0
    """Higher goes first."""
    deadline_at: float | None = None
    budget_dollars: float | None = None
    """What it may still spend."""
    is_preemptible: bool = True
    """Whether it may be stopped, saved and queued again once it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """State of the pool: the input of a decision."""

    now: float
    nodes: tuple[Node, ...]
    jobs: tuple[Demand, ...]
    """Unfinished jobs, in the order in which they were submitted."""
    teams: tuple[Team, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a job gets what it gets."""

    code: str
    """One word for machines: ``grown``, ``waits_for_devices``, ``over_quota``, ..."""
    text: str
    """One sentence for people."""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Placement of each job from now on; a job that is not named holds nothing."""

    placements: Mapping[str, Placement]
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    predicted_end_at: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """An allocation policy. May keep memory between calls; must not depend on it to be right."""

    name: str

    def decide(self, state: PoolState) -> Decision:
        """Placement of each job. Pure but for its memory: no clock, no files, no processes."""
        ...
