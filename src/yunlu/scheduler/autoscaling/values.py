"""Input and output of autoscaling: offers, held nodes, limits; nodes to have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.scheduler.policy.values import Reason


BOOT_S = 60.0
"""Seconds from the request of a node until a job can start on it, before one was observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Nodes of one kind that can be rented at a price."""

    key: str
    devices: int
    type: str = "device"
    dollars_per_hour: float = 0.0
    is_spot: bool = False
    most: int = 1 << 20
    """How many can be rented in all, held ones included; 0 while there are none."""
    boot_s: float = BOOT_S
    """Seconds from the request until a job can start on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLease:
    """A node that is held or requested."""

    name: str
    offer: str
    since: float
    idle_since: float | None = None
    """None while a job holds a device of it."""
    is_leaving: bool = False
    """Being preempted or drained: no longer counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamLimit:
    """What may be rented for one team."""

    devices: int | None = None
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What must never be exceeded."""

    nodes: int | None = None
    dollars_per_hour: float | None = None
    teams: Mapping[str, TeamLimit] = field(default_factory=dict[str, TeamLimit])
    least: Mapping[str, int] = field(default_factory=dict[str, int])
    """By offer: nodes that are kept even when idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """When growth pays, and how fast to follow."""

    worth: float = 0.5
    """A machine is bought while its dollar brings at least this share of the progress that the
    job's best dollar brings: 1 buys only perfect speed-up at the best price, 0 buys all that helps."""
    calm: float = 0.2
    """A machine that is held is kept down to this much below ``worth``."""
    patience_s: float = 3600.0
    """A job that has nothing takes dearer machines the longer it waits, any price after this."""
    grow_after_s: float = 30.0
    """How long more nodes must be wanted before they are requested; deadlines do not wait."""
    idle_s: float = 300.0
    """How long a node is idle before it is released."""
    least_life_s: float = 600.0
    """A node younger than this is not released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMemory:
    """Memory between decisions; empty at first, and safe to lose."""

    wanting_since: Mapping[str, float] = field(default_factory=dict[str, float])
    """By offer: since when more were wanted than held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Number of nodes to have."""

    wanted: Mapping[str, int]
    """By offer; offers that are not named: none."""
    release: tuple[str, ...] = ()
    """Names of nodes to release now."""
    reasons: Mapping[str, Reason] = field(default_factory=dict[str, "Reason"])
    """By key of offer and by id of job."""
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By job: the devices it was bought or kept machines for. The allocator decides anew."""
    dollars_per_hour: float = 0.0
    notes: ScalingMemory = field(default_factory=ScalingMemory)
