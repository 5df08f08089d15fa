"""Offers from the tables of a SkyPilot catalog (``vms.csv``, versions 7 and 8).

Prices are taken as they stand; what is no price (0, placeholders) is left out, and what the tables
do not know (network, which of two forms a device has) is added.
"""

from __future__ import annotations

import ast
import csv
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from yunlu.core.errors import did_you_mean
from yunlu.hardware.catalog import CatalogError, Offer, merge_regions, name_device, split_slice

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from yunlu.hardware.catalog import Catalog, DeviceModel

Row = dict[str, str]
REQUIRED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region")
_GIB = 2**30
_GBIT = 1e9 / 8
_ETHERNET_GBIT = 10.0
_LEAST_DOLLARS, _MOST_DOLLARS = 0.02, 50.0
"""For a device and hour: outside it a price is a placeholder (TPU v6e at 700), not an offer."""
_PLACEHOLDER_CLOUDS = {"mithril"}
_NO_FABRIC = {"vast", "runpod", "primeintellect", "shadeform", "hyperbolic", "cudo", "paperspace"}
"""They rent single machines; nothing is promised between two of them."""
_WRONG_COUNTS = {("azure", "Standard_ND96isr_H100_v5"): 8}
"""The table says 12; Azure's page, and eight cards in every H100 node, say 8."""
_HOST = "host priced as in us-central1: the table has no price of it"
SPOT_FLOOR = (
    "spot price at a tenth of on demand, which is the cloud's minimum: it may not be available"
)
ASSUMED_NETWORK = "network assumed"
_NETWORK = f"{ASSUMED_NETWORK}: 10 Gbit/s Ethernet"
_FABRIC = f"{ASSUMED_NETWORK}: as nodes of this kind are usually built"
_CARD_BYTES_PER_S = 1.25e9
"""What the devices' table assumes of cards (PCIe): they come without a fabric."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What came of a table."""

    offers: list[Offer]
    rows: int
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Rows left out, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One row, read."""

    instance: str
    accelerator: str
    count: float
    memory_mib: float | None
    cpus: float | None
    memory_gib: float | None
    region: str
    price: float | None
    spot: float | None


def check_columns(columns: Iterable[str], *, where: str) -> None:
    """Refuse a table that is not SkyPilot's."""
    result = list(columns)
    if not result:
        raise CatalogError(
            f"{where} is empty.", hint=f"a SkyPilot vms.csv has {', '.join(REQUIRED)} and more"
        )
    for name in REQUIRED:
        if name not in result:
            raise CatalogError(
                f"{where}: the column {name} is missing; {did_you_mean(name, result)}",
                hint=f"a SkyPilot vms.csv has {', '.join(REQUIRED)} and more",
            )


def read_skypilot(
    rows: Iterable[Mapping[str, str]], *, cloud: str, catalog: Catalog, source: str
) -> Imported:
    """Offers of one cloud's table."""
    skipped: Counter[str] = Counter()
    hosts: dict[tuple[str, str], _Cell] = {}
    cells: list[_Cell] = []
    count = 0
    for row in rows:
        count += 1
        cell = _read_cell(row)
        if isinstance(cell, str):
            skipped[cell] += 1
        elif cell.accelerator:
            cells.append(cell)
        else:
            hosts[cell.instance, cell.region] = cell
            skipped["no accelerator"] += 1
    offers: list[Offer] = []
    for cell in cells:
        offer = _make_offer(cell, cloud=cloud, catalog=catalog, hosts=hosts, source=source)
        if isinstance(offer, str):
            skipped[offer] += 1
        else:
            offers.append(offer)
    return Imported(merge_regions(_cheapest_zones(offers)), count, skipped)


def instance_network(cloud: str, instance: str) -> tuple[float, str] | None:
    """Bytes per second of a whole node to others, where publicly known, and who says so."""
    return _networks().get((cloud, instance))


def _read_cell(row: Mapping[str, str]) -> _Cell | str:
    try:
        accelerator = (row.get("AcceleratorName") or "").strip()
        count = _float(row.get("AcceleratorCount")) or 0.0
        price, spot = _float(row.get("Price")), _float(row.get("SpotPrice"))
        cpus, memory_gib = _float(row.get("vCPUs")), _float(row.get("MemoryGiB"))
    except ValueError:
        return "a number that cannot be read"
    if accelerator and (count < 1 or count != int(count)):
        return "part of a device"
    return _Cell(
        instance=(row.get("InstanceType") or "").strip(),
        accelerator=accelerator,
        count=count,
        memory_mib=_device_memory(row),
        cpus=cpus,
        memory_gib=memory_gib,
        region=(row.get("Region") or "").strip(" ,").replace("|", "/"),
        price=price or None,
        spot=spot or None,
    )


def _device_memory(row: Mapping[str, str]) -> float | None:
    result = row.get("gpu_mem_mib")
    if result:
        return _float(result)
    try:
        return float(
            ast.literal_eval(row.get("GpuInfo") or "")["Gpus"][0]["MemoryInfo"]["SizeInMiB"]
        )
    except (ValueError, SyntaxError, KeyError, IndexError, TypeError):
        return None


def _float(text: str | None) -> float | None:
    if not text:
        return None
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _make_offer(
    cell: _Cell,
    *,
    cloud: str,
    catalog: Catalog,
    hosts: dict[tuple[str, str], _Cell],
    source: str,
) -> Offer | str:
    if cell.accelerator.startswith("tpu-"):
        return _make_slice(cell, cloud=cloud, catalog=catalog, source=source)
    count = _WRONG_COUNTS.get((cloud, cell.instance), int(cell.count))
    device = name_device(
        catalog,
        cloud=cloud,
        instance=cell.instance,
        accelerator=cell.accelerator,
        count=count,
        memory_mib=cell.memory_mib,
    )
    if device is None:
        return "a device the catalog does not know"
    terms: list[str] = []
    if not cell.instance:
        joined = _join_host(cell, hosts)
        if joined is None:
            return "an accelerator without a machine to put it in"
        cell, is_listed = joined
        terms += [] if is_listed else [_HOST]
    price, spot = _prices(cell, cloud=cloud, count=count)
    if price is None and spot is None:
        return "a placeholder instead of a price"
    terms += _floor_terms(price, spot)
    if known := instance_network(cloud, cell.instance):
        network, result = known
        source = f"{source}; network: {result}"
    else:
        network, assumed = _assume_network(cloud, catalog.device(device), count)
        terms.append(assumed)
    return Offer(
        cloud=cloud,
        instance=cell.instance,
        device=device,
        devices=count,
        cpus=cell.cpus,
        memory_bytes=None if cell.memory_gib is None else int(cell.memory_gib * _GIB),
        regions=(cell.region,) if cell.region else (),
        dollars_per_hour=price,
        spot_dollars_per_hour=spot,
        network_bytes_per_s=network,
        source=source,
        terms="; ".join(terms),
    )


def _make_slice(cell: _Cell, *, cloud: str, catalog: Catalog, source: str) -> Offer | str:
    """A TPU slice of one host: larger ones cost the same a chip, so the planner takes several."""
    result = split_slice(cell.accelerator)
    if result is None or not catalog.has_device(result[0]):
        return "a device the catalog does not know"
    device, chips = catalog.device(result[0]), result[1]
    if chips > device.node_devices:
        return "a TPU slice of several hosts (had as several of one host)"
    price, spot = _prices(cell, cloud=cloud, count=chips)
    if price is None and spot is None:
        return "a placeholder instead of a price"
    return Offer(
        cloud=cloud,
        instance=cell.accelerator,
        device=device.name,
        devices=chips,
        regions=(cell.region,) if cell.region else (),
        dollars_per_hour=price,
        spot_dollars_per_hour=spot,
        network_bytes_per_s=device.network_bytes_per_s * chips,
        source=source,
        terms="; ".join([*_floor_terms(price, spot), "the host is in the price"]),
    )


def _join_host(cell: _Cell, hosts: dict[tuple[str, str], _Cell]) -> tuple[_Cell, bool] | None:
    """Google prices an accelerator apart from the machine it is in: the sum is what is paid."""
    listed = _gcp_hosts().get((cell.accelerator, int(cell.count)))
    if listed is None:
        return None
    host = hosts.get((listed.instance, cell.region))
    is_listed = host is not None
    host = host or listed
    return (
        _Cell(
            instance=_joined_name(listed.instance, cell),
            accelerator=cell.accelerator,
            count=cell.count,
            memory_mib=cell.memory_mib,
            cpus=host.cpus,
            memory_gib=host.memory_gib,
            region=cell.region,
            price=None if cell.price is None else round(cell.price + (host.price or 0), 5),
            spot=None if cell.spot is None else round(cell.spot + (host.spot or 0), 5),
        ),
        is_listed or not listed.price,
    )


def _joined_name(host: str, cell: _Cell) -> str:
    """Only N1 machines take accelerators of several kinds."""
    return f"{host}+{cell.count:g}x{cell.accelerator}" if host.startswith("n1-") else host


def _prices(cell: _Cell, *, cloud: str, count: int) -> tuple[float | None, float | None]:
    if cloud in _PLACEHOLDER_CLOUDS:
        return None, None
    price, spot = (
        result if result and _LEAST_DOLLARS <= result / count <= _MOST_DOLLARS else None
        for result in (cell.price, cell.spot)
    )
    return price, _lower(spot, price)


def _floor_terms(price: float | None, spot: float | None) -> list[str]:
    return [SPOT_FLOOR] if price and spot and spot <= 0.12 * price else []


def _lower(spot: float | None, price: float | None) -> float | None:
    """A spot price that is not below the other is nobody's choice (RunPod repeats the other)."""
    return None if spot is not None and price is not None and spot >= price else spot


def _assume_network(cloud: str, device: DeviceModel, count: int) -> tuple[float, str]:
    """Whole nodes of modules are built with a card for each; anything less shares an Ethernet port."""
    has_fabric = count >= device.node_devices > 1 and cloud not in _NO_FABRIC
    if has_fabric and device.network_bytes_per_s > _CARD_BYTES_PER_S:
        return device.network_bytes_per_s * count, _FABRIC
    return _ETHERNET_GBIT * _GBIT, _NETWORK


def _cheapest_zones(offers: list[Offer]) -> list[Offer]:
    """One offer for each instance, device and region: prices of its zones differ, above all spot."""
    best: dict[tuple[str, str, int, str], Offer] = {}
    for offer in offers:
        key = (offer.instance, offer.device, offer.devices, offer.region)
        other = best.get(key)
        best[key] = offer if other is None else _cheaper(offer, other)
    return sorted(best.values(), key=lambda offer: (offer.instance, offer.device, offer.region))


def _cheaper(one: Offer, other: Offer) -> Offer:
    spots = [
        offer.spot_dollars_per_hour
        for offer in (one, other)
        if offer.spot_dollars_per_hour is not None
    ]
    first = min(one, other, key=lambda offer: offer.dollars_per_hour or math.inf)
    return first._replace(spot_dollars_per_hour=min(spots, default=None))


@lru_cache(maxsize=1)
def _networks() -> dict[tuple[str, str], tuple[float, str]]:
    return {
        (row["cloud"], row["instance"]): (float(row["gbit_per_s"]) * _GBIT, row["source"])
        for row in _data_rows("networks.csv")
    }


@lru_cache(maxsize=1)
def _gcp_hosts() -> dict[tuple[str, int], _Cell]:
    return {
        (row["device"], int(row["devices"])): _Cell(
            instance=row["instance"],
            accelerator="",
            count=0,
            memory_mib=None,
            cpus=float(row["cpus"]),
            memory_gib=float(row["memory_gib"]),
            region="us-central1",
            price=float(row["dollars_per_hour"]),
            spot=float(row["spot_dollars_per_hour"]),
        )
        for row in _data_rows("gcp_hosts.csv")
    }


def _data_rows(name: str) -> list[Row]:
    with (files("yunlu.hardware") / "data" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
