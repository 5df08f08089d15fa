"""Fleet: nodes with devices, and the placement of a run on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with devices of one type."""

    name: str
    devices: int
    type: str = "device"
    domain: str = ""
    """What it shares a fast network with: a rack, a zone."""
    dollars_per_hour: float = 0.0
    is_spot: bool = False
    is_leaving: bool = False
    """Told to go, or not to be trusted: nothing new is put there."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which devices a job holds: so many on each node, in the order of its ranks."""

    shares: tuple[tuple[str, int], ...] = ()

    @property
    def devices(self) -> int:
        """How many in all."""
        return sum(count for _, count in self.shares)

    @property
    def nodes(self) -> int:
        """On how many machines."""
        return len(self.shares)

    def __bool__(self) -> bool:
        """Whether it holds anything."""
        return bool(self.shares)


NOTHING = Placement()
