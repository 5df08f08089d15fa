"""Offer: a machine type that can be rented or owned, its region and price, and tables of them."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

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


COLUMNS = (
    "cloud",
    "instance",
    "device",
    "devices",
    "cpus",
    "memory_gib",
    "regions",
    "dollars_per_hour",
    "spot_dollars_per_hour",
    "network_gbit_per_s",
    "source",
    "terms",
    "nodes",
)
_SHORT = 12
"""Columns of a table whose offers can be had in any number."""
_GIB = 2**30
_GBIT = 1e9 / 8


def read_offers(text: str) -> list[Offer]:
    """Offers of a table written by ``write_offers``. Sources and terms stand at its end, numbered."""
    rows = list(csv.reader(io.StringIO(text)))
    parts = {row[0][1:]: row[1] for row in rows if row and row[0].startswith("#")}
    parts[""] = ""
    return [
        Offer(
            row[0],
            row[1],
            row[2],
            int(row[3]),
            float(row[4]) if row[4] else None,
            int(float(row[5]) * _GIB) if row[5] else None,
            tuple(row[6].split("|")) if row[6] else (),
            float(row[7]) if row[7] else None,
            float(row[8]) if row[8] else None,
            float(row[9]) * _GBIT if row[9] else None,
            parts[row[10]],
            parts[row[11]],
            int(row[12]) if len(row) > _SHORT and row[12] else None,
        )
        for row in rows[1:]
        if row and not row[0].startswith("#")
    ]


def write_offers(offers: Iterable[Offer]) -> str:
    """The table, with equal prices of several regions in one row."""
    parts: dict[str, str] = {}
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    merged = merge_regions(offers)
    last = None if any(offer.nodes is not None for offer in merged) else _SHORT
    writer.writerow(COLUMNS[:last])
    for offer in merged:
        writer.writerow(
            (
                offer.cloud,
                offer.instance,
                offer.device,
                offer.devices,
                _number(offer.cpus),
                _number(offer.memory_bytes, _GIB),
                "|".join(offer.regions),
                _number(offer.dollars_per_hour),
                _number(offer.spot_dollars_per_hour),
                _number(offer.network_bytes_per_s, _GBIT),
                _reference(parts, offer.source),
                _reference(parts, offer.terms),
                _number(offer.nodes),
            )[:last]
        )
    for text, number in parts.items():
        writer.writerow((f"#{number}", text))
    return file.getvalue()


def merge_regions(offers: Iterable[Offer]) -> list[Offer]:
    """One offer for each price, with all regions that have it."""
    regions: dict[Offer, list[str]] = {}
    for offer in offers:
        regions.setdefault(offer._replace(regions=()), []).extend(offer.regions)
    return [offer._replace(regions=tuple(sorted(set(names)))) for offer, names in regions.items()]


def _number(value: float | None, unit: float = 1) -> str:
    return "" if value is None else f"{round(value / unit, 5):.12g}"


def _reference(numbers: dict[str, str], text: str) -> str:
    return numbers.setdefault(text, str(len(numbers) + 1)) if text else ""
