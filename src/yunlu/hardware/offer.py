"""Offer: a machine type that can be rented or owned, its region and price."""

from __future__ import annotations

from typing import NamedTuple

HERE = "here"
"""The cloud that this machine is."""
OWN_CLOUD = "own"
"""The cloud that own machines are offered by."""
UNJOINED_CLOUDS = frozenset(
    {"hyperbolic", "primeintellect", "runpod", "seeweb", "shadeform", "vast", "verda", "yotta"}
)
"""Machines rented there one by one share no network: SkyPilot joins none (skypilot-org/skypilot
@147db0f, ``MULTI_NODE`` of ``sky/clouds``). Some sell clusters, under other names and prices."""


class Offer(NamedTuple):
    """One kind of node, at one price, in one or several regions.

    A tuple, not a dataclass: thousands are read before a plan can start, and these read ten times
    faster.
    """

    cloud: str
    instance: str
    device: str
    """Name of a ``DeviceModel``."""
    devices: int
    """On one node."""
    cpus: float | None = None
    memory_bytes: int | None = None
    """Of the host."""
    regions: tuple[str, ...] = ()
    """All with this price; the cheapest zone of each."""
    dollars_per_hour: float | None = None
    """The whole node on demand; None where no public price is known."""
    spot_dollars_per_hour: float | None = None
    """The whole node, when it may be taken away at any time; None where that is not offered."""
    network_bytes_per_s: float | None = None
    """The whole node to other nodes, one direction; None asks the device's usual share."""
    source: str = ""
    terms: str = ""
    """What to know before relying on the price."""
    nodes: int | None = None
    """How many can be had together, where that is said."""

    @property
    def region(self) -> str:
        """The first of its regions."""
        return self.regions[0] if self.regions else ""

    @property
    def key(self) -> str:
        """``aws:p4d.24xlarge``."""
        return f"{self.cloud}:{self.instance}"

    @property
    def most_nodes(self) -> int | None:
        """How many can work together; None where as many as are paid for."""
        is_lone = self.cloud in UNJOINED_CLOUDS or self.cloud in {HERE, OWN_CLOUD}
        return 1 if self.nodes is None and is_lone else self.nodes

    def price(self, *, spot: bool = False) -> float | None:
        """Dollars per hour of the whole node; None where unknown or not offered."""
        return self.spot_dollars_per_hour if spot else self.dollars_per_hour

    def price_per_device(self, *, spot: bool = False) -> float | None:
        """Dollars per hour of one device."""
        price = self.price(spot=spot)
        return None if price is None else price / self.devices
