"""How devices, offers and the costs of owning look on a page."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from yunlu.hardware.device import PRECISIONS
from yunlu.hardware.skypilot import ASSUMED_NETWORK, SPOT_FLOOR
from yunlu.render.terminal.page import indented, plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from yunlu.hardware.catalog import Catalog
    from yunlu.hardware.device import DeviceModel
    from yunlu.hardware.entries import MachineEntry
    from yunlu.hardware.offer import Offer
    from yunlu.hardware.ownership import BreakEven, Ownership

_GIB = 2**30
_NONE = Text("–", style="dim")


def summary_table(catalog: Catalog) -> Table:
    """Each device that can be had, with its cheapest offers."""
    table = _table(
        "device!", "memory>", "bf16 TFLOP/s>", "$/device-h>", "where~", "spot>", "where~", "offers>"
    )
    counts = Counter(offer.device for offer in catalog.every_offer)
    for device in sorted(catalog.devices, key=_power, reverse=True):
        if counts[device.name]:
            table.add_row(
                device.name,
                _gib(device.memory_bytes),
                _tflops(device),
                *_cheapest(catalog, device, spot=False),
                *_cheapest(catalog, device, spot=True),
                str(counts[device.name]),
            )
    return table


def offers_table(catalog: Catalog, offers: Sequence[Offer], *, spot: bool) -> Table:
    """Offers in the order given."""
    table = _table(
        "device!",
        "×>",
        "offer~",
        "region",
        "$/h>",
        "$/device-h>",
        "spot $/h>",
        "Gbit/s>",
    )
    for offer in offers:
        network = catalog.network_bytes_per_s(offer) * offer.devices * 8 / 1e9
        # What is assumed reads fainter than what is known.
        style = "dim" if ASSUMED_NETWORK in offer.terms else ""
        spot_style = "dim" if SPOT_FLOOR in offer.terms else ""
        table.add_row(
            offer.device,
            str(offer.devices),
            _short(offer.key, most=52),
            _short(_regions(offer)),
            _dollars(offer.dollars_per_hour, unknown="price unknown"),
            _dollars(offer.price_per_device(spot=spot)),
            _dollars(offer.spot_dollars_per_hour, style=spot_style),
            Text(f"{network:,.0f}", style=style),
        )
    return table


def devices_table(devices: Sequence[DeviceModel]) -> Table:
    """Their figures."""
    table = _table(
        "device!",
        "kind",
        "memory>",
        "GB/s>",
        *(f"{name}>" for name in PRECISIONS),
        "link GB/s>",
        "node>",
        "reached>",
    )
    for device in devices:
        node = str(device.node_devices)
        node += f"/{device.fabric_devices}" if device.leaves_node else ""
        table.add_row(
            device.name,
            device.kind,
            _gib(device.memory_bytes),
            f"{device.memory_bytes_per_s / 1e9:,.0f}",
            *(_peak(device, precision) for precision in PRECISIONS),
            f"{device.link_bytes_per_s / 1e9:,.0f}",
            node,
            _NONE if device.reachable is None else f"{device.reachable:.0%}",
        )
    return table


def device_page(device: DeviceModel) -> RenderableType:
    """One device: each figure with its source."""
    title = Text.assemble((f" {device.name}", "bold"), (f"  {device.kind}", "dim"))
    if device.aliases:
        title.append(f"\n also called {', '.join(device.aliases)}", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    before = ""
    for name, figure, field in _figures(device):
        source = device.source(field)
        table.add_row(name, figure, "″" if source == before else source)
        before = source
    return Group(title, Text(), indented(table), Text())


def ownership_page(
    entry: MachineEntry,
    device: DeviceModel,
    rows: Sequence[tuple[Offer, float, BreakEven]],
    *,
    spot: bool,
) -> RenderableType:
    """What an own machine costs, and beside it the rent of as much."""
    cost = entry.cost
    assert cost is not None
    title = Text.assemble(
        (f" {entry.name}", "bold"),
        (f"  {entry.devices} x {device.name}, {cost.years:g} years, ", "dim"),
        (f"{cost.utilisation:.0%} of the hours at work", "dim"),
    )
    table = _table(
        "rent~",
        "nodes>",
        "region",
        "spot $/h>" if spot else "$/h>",
        "rent in its life>",
        "owning pays from>",
        "of its hours>",
        "cheaper",
    )
    for offer, share, even in rows:
        verdict = Text("own", style="green") if even.owning_wins else Text("rent", style="cyan")
        table.add_row(
            _short(offer.key, most=42),
            f"{share:.2f}",
            _short(_regions(offer)),
            _dollars(even.rent_dollars_per_hour),
            f"{even.rent_dollars:,.0f} $",
            "never" if math.isinf(even.hours) else f"{even.hours:,.0f} h",
            "–" if math.isinf(even.hours) else f"{even.utilisation:.0%}",
            verdict,
        )
    note = " nodes: as many as have this machine's peak; hours are of work, rent is paid for those only"
    return Group(title, Text(), indented(_costs(cost)), Text(), indented(table), Text(note, "dim"))


def _costs(cost: Ownership) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    hours = cost.used_hours
    for name, dollars in (
        ("purchase, less resale", cost.capital_dollars),
        ("power and cooling", cost.power_dollars),
        ("staff, hosting", cost.upkeep_dollars),
        ("together", cost.total_dollars),
    ):
        table.add_row(name, f"{dollars:,.0f} $", f"{dollars / hours:,.2f} $/h of work")
    return table


def _figures(device: DeviceModel) -> list[tuple[str, str, str]]:
    rows = [
        ("memory", _gib(device.memory_bytes), "memory_bytes"),
        ("memory bandwidth", f"{device.memory_bytes_per_s / 1e9:,.0f} GB/s", "memory_bytes_per_s"),
    ]
    rows += [
        (f"{name} peak", f"{_figure(peak / 1e12)} TFLOP/s", f"peak_flops.{name}")
        for name, peak in device.peak_flops.items()
    ]
    if device.reachable is not None:
        rows.append(("reached of bf16", f"{device.reachable:.1%}", "reachable"))
    rows += [
        ("link", f"{_figure(device.link_bytes_per_s / 1e9)} GB/s", "link_bytes_per_s"),
        ("devices in a node", str(device.node_devices), "node_devices"),
    ]
    if device.leaves_node:
        rows.append(("joined by the link", str(device.fabric_devices), "fabric_devices"))
    network = f"{_figure(device.network_bytes_per_s / 1e9)} GB/s"
    return [*rows, ("network, its share", network, "network_bytes_per_s")]


def _table(*columns: str) -> Table:
    """``!`` marks what names the row, ``>`` numbers, ``~`` what may be cut where room is scarce."""
    table = plain_table()
    for column in columns:
        table.add_column(
            column.rstrip("!>~"),
            justify="right" if column.endswith(">") else "left",
            style="bold" if column.endswith("!") else None,
            no_wrap=not column.endswith("~"),
            overflow="ellipsis",
        )
    return table


def _cheapest(catalog: Catalog, device: DeviceModel, *, spot: bool) -> tuple[RenderableType, ...]:
    offers = catalog.offers(gpu=device.name, spot=spot, priced=True)
    if not offers:
        return (_NONE, "")
    offer = offers[0]
    price = _dollars(offer.price_per_device(spot=spot))
    return (price, Text(f"{offer.cloud}×{offer.devices}", style="dim"))


def _regions(offer: Offer) -> str:
    more = len(offer.regions) - 1
    return f"{offer.region} +{more}" if more > 0 else offer.region or "–"


def _short(text: str, *, most: int = 22) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _dollars(price: float | None, *, unknown: str = "–", style: str = "") -> Text:
    return Text(unknown, style="dim") if price is None else Text(f"{price:,.2f}", style=style)


def _power(device: DeviceModel) -> float:
    return max(device.peak_flops.get("bf16", 0), device.peak_flops.get("fp16", 0))


def _tflops(device: DeviceModel) -> RenderableType:
    if "bf16" in device.peak_flops:
        return _peak(device, "bf16")
    if "fp16" in device.peak_flops:
        return f"fp16 {_figure(device.peak_flops['fp16'] / 1e12)}"
    return _NONE


def _peak(device: DeviceModel, precision: str) -> RenderableType:
    peak = device.peak_flops.get(precision)
    return _NONE if peak is None else _figure(peak / 1e12)


def _figure(value: float) -> str:
    """With thousands, without needless zeros."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def _gib(count: float) -> str:
    return f"{count / _GIB:,.0f} GiB"
