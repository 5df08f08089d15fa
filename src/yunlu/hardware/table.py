"""Offers as a compact CSV table."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from yunlu.hardware.offer import Offer

if TYPE_CHECKING:
    from collections.abc import Iterable

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
