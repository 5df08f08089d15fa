"""What is offered, what is held, what is allowed; and how many machines to have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.scheduler.policy.values import Reason


BOOT_S = 60.0
"""From asking for a machine until a job can start on it, where nobody has seen one come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Machines of one kind that can be had for a price."""

    key: str
    devices: int
    type: str = "device"
    dollars_per_hour: float = 0.0
    is_spot: bool = False
    most: int = 1 << 20
    """How many can be had in all, those that are held included; 0 while there are none."""
    boot_s: float = BOOT_S
    """From asking for one until a job can start on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLease:
    """A machine that is held, or on its way."""

    name: str
    offer: str
    since: float
    idle_since: float | None = None
    """None while a job holds a device of it."""
    is_leaving: bool = False
    """Told to go (spot taken away, drained): no longer counted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamLimit:
    """What one team may have machines bought for."""

    devices: int | None = None
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What must never be exceeded."""

    nodes: int | None = None
    dollars_per_hour: float | None = None
    teams: Mapping[str, TeamLimit] = field(default_factory=dict[str, TeamLimit])
    least: Mapping[str, int] = field(default_factory=dict[str, int])
    """By offer: machines that are kept even when idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """When growing pays, and how calmly to follow."""

    worth: float = 0.5
    """A machine is bought while its dollar brings at least this share of the progress that the
    job's best dollar brings: 1 buys only perfect speed-up at the best price, 0 buys all that helps."""
    calm: float = 0.2
    """A machine that is held is kept down to this much below ``worth``."""
    patience_s: float = 3600.0
    """A job that has nothing takes dearer machines the longer it waits, any price after this."""
    grow_after_s: float = 30.0
    """How long more machines must be wanted before they are bought; deadlines do not wait."""
    idle_s: float = 300.0
    """How long a machine is idle before it is given back."""
    least_life_s: float = 600.0
    """A machine younger than this is not given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMemory:
    """What one decision tells the next; empty at first, and safe to lose."""

    wanting_since: Mapping[str, float] = field(default_factory=dict[str, float])
    """By offer: since when more were wanted than held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How many machines to have."""

    wanted: Mapping[str, int]
    """By offer; offers that are not named: none."""
    release: tuple[str, ...] = ()
    """Names of machines to give back now."""
    reasons: Mapping[str, Reason] = field(default_factory=dict[str, "Reason"])
    """By key of offer and by id of job."""
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By job: the devices it was bought or kept machines for. The allocator decides anew."""
    dollars_per_hour: float = 0.0
    notes: ScalingMemory = field(default_factory=ScalingMemory)
