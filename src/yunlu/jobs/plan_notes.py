"""Notes on a job's options: terms, prices, limitations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.hardware.skypilot import ASSUMED_NETWORK, SPOT_FLOOR
from yunlu.planning.conflicts import find_conflicts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.planning.search.hardware_configs import Price
    from yunlu.planning.search.options import PlanOptions
    from yunlu.spec.job import Job


def note_lone(job: Job) -> list[str]:
    """Why the job must run on one device, on any hardware."""
    return [
        f"one device only, for {clash.key}: {clash.why}"
        for clash in find_conflicts(job)
        if {"dp", "fsdp", "tp", "pp"} <= set(clash.axes)
    ]


def note_terms(options: PlanOptions, prices: Iterable[Price]) -> list[str]:
    """Caveats of the hardware shown."""
    terms = {
        (price.offer.cloud, price.offer.instance, price.offer.region): price.offer.terms
        for price in prices
    }
    assumed, floor = list[str](), list[str]()
    for option in options:
        item = option.hardware
        given = terms.get((item.cloud, item.instance, item.region), "")
        if item.nodes > 1 and ASSUMED_NETWORK in given:
            assumed.append(f"{item.cloud}:{item.instance}")
        if item.spot and SPOT_FLOOR in given:
            floor.append(f"{item.cloud}:{item.instance}")
    notes: list[str] = []
    if assumed:
        names = ", ".join(dict.fromkeys(assumed))
        notes.append(f"the network between nodes of {names} is assumed, not published")
    if floor:
        names = ", ".join(dict.fromkeys(floor))
        notes.append(f"the spot price of {names} is the cloud's minimum: it may not be available")
    return notes


def note_prices(options: PlanOptions) -> list[str]:
    """Offers without a known price, and how to set it."""
    unknown = [option.hardware for option in options if option.hardware.dollars_per_hour is None]
    if not unknown:
        return []
    names = ", ".join(sorted({f"{item.cloud}:{item.instance}" for item in unknown}))
    return [f"no price is known of {names}; set one with: yunlu catalog add FILE"]
