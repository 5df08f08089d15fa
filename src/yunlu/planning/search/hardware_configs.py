"""Hardware configs: offers grouped by identical hardware, so that each is predicted once. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from yunlu.hardware.offer import HERE
from yunlu.planning.search.layout_search import HardwareConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.hardware.catalog import Catalog
    from yunlu.hardware.offer import Offer


class Price(NamedTuple):
    """One offer of a hardware config, on demand or spot."""

    config: int
    offer: Offer
    spot: bool

    @property
    def dollars_per_hour(self) -> float | None:
        """Of one node."""
        return self.offer.price(spot=self.spot)


def group_offers(
    catalog: Catalog, offers: Iterable[Offer], *, spot: bool
) -> tuple[tuple[HardwareConfig, ...], tuple[Price, ...]]:
    """The distinct hardware configs of some offers, and every price of each; of an instance, the lowest.

    What another hardware config of the same devices beats in network and price both is left out: it cannot win.
    """
    places: dict[tuple[str, int, float | None, int | None, bool], int] = {}
    configs: list[HardwareConfig] = []
    prices: dict[tuple[str, str, int, bool], Price] = {}
    for offer in offers:
        network, most = offer.network_bytes_per_s, offer.most_nodes
        kind = (offer.device, offer.devices, network, most, offer.cloud == HERE)
        if kind not in places:
            places[kind] = len(configs)
            configs.append(_hardware_config(catalog, offer))
        for is_spot in (False, True) if spot and offer.spot_dollars_per_hour else (False,):
            price = Price(places[kind], offer, is_spot)
            key = (offer.cloud, offer.instance, price.config, is_spot)
            if key not in prices or _rank(price) < _rank(prices[key]):
                prices[key] = price
    return _undominated(configs, list(prices.values()))


def _undominated(
    configs: list[HardwareConfig], prices: list[Price]
) -> tuple[tuple[HardwareConfig, ...], tuple[Price, ...]]:
    lowest = [[math.inf, math.inf] for _ in configs]
    for price in prices:
        ranks = lowest[price.config]
        ranks[price.spot] = min(ranks[price.spot], _rank(price))
    order = sorted(range(len(configs)), key=lambda index: -configs[index].network_bytes_per_s)
    best: dict[tuple[str, int, int, int, bool], list[float]] = {}
    retained: list[int] = []
    for index in order:
        config = configs[index]
        rivals = best.get(config.kind)
        if rivals is None or any(a < b for a, b in zip(lowest[index], rivals, strict=True)):
            retained.append(index)
            rivals = rivals or [math.inf, math.inf]
            best[config.kind] = [min(a, b) for a, b in zip(lowest[index], rivals, strict=True)]
    new = {index: count for count, index in enumerate(sorted(retained))}
    return (
        tuple(configs[index] for index in new),
        tuple(price._replace(config=new[price.config]) for price in prices if price.config in new),
    )


def _hardware_config(catalog: Catalog, offer: Offer) -> HardwareConfig:
    device, network = catalog.device(offer.device), catalog.network_bytes_per_s(offer)
    return HardwareConfig(
        device=device.name,
        devices=offer.devices,
        domain=catalog.linked_devices(offer),
        memory_bytes=float(device.memory_bytes),
        memory_bytes_per_s=device.memory_bytes_per_s,
        link_bytes_per_s=device.link_bytes_per_s or network,
        network_bytes_per_s=network,
        peak_flops=device.peak_flops,
        reachable=math.nan if device.reachable is None else device.reachable,
        most_nodes=offer.most_nodes or 1 << 20,
        is_here=offer.cloud == HERE,
        device_kind=device.kind,
    )


def _rank(price: Price) -> float:
    dollars = price.dollars_per_hour
    return float("inf") if dollars is None else dollars
