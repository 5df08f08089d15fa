"""Tables of devices, offers and the cost of owning a machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from yunlu.hardware.catalog import PRECISIONS
from yunlu.render.terminal.fitting_table import FittingTable
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import indented, plain_table
from yunlu.render.terminal.verbatim import Verbatim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from yunlu.hardware.entries import Ownership
    from yunlu.hardware.listing import (
        ListedDevice,
        ListedOffer,
        OfferedDevice,
        OwnershipPage,
    )

_GIB = 2**30
_NONE = Text("–", style="dim")


def summary_table(devices: Sequence[OfferedDevice]) -> Table:
    """Each device that is offered, with its cheapest offers."""
    table = _table(
        "device!", "memory>", "bf16 TFLOP/s>", "$/device-h>", "where~", "spot>", "where~", "offers>",
        drop=("offers", "where", "bf16 TFLOP/s", "memory"),
    )  # fmt: skip
    for offered in devices:
        device = offered.device
        table.add_row(
            device.name,
            _gib(device.memory_bytes),
            _tflops(device),
            *_cheapest(offered.cheapest, spot=False),
            *_cheapest(offered.cheapest_spot, spot=True),
            str(offered.offers),
        )
    return table


def offers_table(offers: Sequence[ListedOffer], *, spot: bool) -> Table:
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
        drop=("Gbit/s", "region", "spot $/h"),
    )
    for offer in offers:
        network = offer.network_bytes_per_s_per_device * offer.devices * 8 / 1e9
        # Assumed figures are fainter than published ones.
        style = "dim" if offer.assumes_network else ""
        spot_style = "dim" if offer.has_floor_price else ""
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


def devices_table(devices: Sequence[ListedDevice]) -> Table:
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
        drop=("fp4", "reached", "tf32", "fp32", "node", "fp16", "link GB/s"),
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


def device_page(device: ListedDevice) -> RenderableType:
    """One device: each figure with its source."""
    title = Text.assemble((f" {device.name}", "bold"), (f"  {device.kind}", "dim"))
    if device.aliases:
        title.append(f"\n also called {', '.join(device.aliases)}", style="dim")
    table = FittingTable(
        lead=2, box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    before = ""
    for name, figure, field in _figures(device):
        source = device.source(field)
        table.add_row(name, figure, Verbatim("″" if source == before else source))
        before = source
    return Group(title, Text(), indented(table), Text())


def ownership_page(page: OwnershipPage) -> RenderableType:
    """Cost of an own machine, and beside it the rent of equal compute."""
    entry, cost = page.machine, page.machine.cost
    assert cost is not None
    title = Text.assemble(
        (f" {entry.name}", "bold"),
        (f"  {entry.devices} x {page.device.name}, {cost.years:g} years, ", "dim"),
        (f"{cost.utilisation:.0%} of the hours at work", "dim"),
    )
    table = _table(
        "rent~",
        "nodes>",
        "region",
        "spot $/h>" if page.spot else "$/h>",
        "rent in its life>",
        "owning pays from>",
        "of its hours>",
        "cheaper",
        drop=("region", "nodes", "of its hours", "rent in its life"),
    )
    for row in page.against:
        offer, even = row.offer, row.break_even
        verdict = Text("own", style="green") if even.owning_wins else Text("rent", style="cyan")
        table.add_row(
            _short(offer.key, most=42),
            f"{row.nodes:.2f}",
            _short(_regions(offer)),
            _dollars(even.rent_dollars_per_hour),
            f"{even.rent_dollars:,.0f} $",
            "never" if math.isinf(even.hours) else f"{even.hours:,.0f} h",
            "–" if math.isinf(even.hours) else f"{even.utilisation:.0%}",
            verdict,
        )
    note = " nodes: as many as have this machine's peak; hours are of work, rent is paid for those only"
    hint = Hanging(Text(note, "dim"), hang=1)
    return Group(Hanging(title), Text(), indented(_costs(cost)), Text(), indented(table), hint)


def _costs(cost: Ownership) -> Table:
    table = FittingTable(
        lead=2, box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    hours = cost.used_hours
    for name, dollars in (
        ("purchase, less resale", cost.capital_dollars),
        ("power and cooling", cost.power_dollars),
        ("staff, hosting", cost.upkeep_dollars),
        ("together", cost.total_dollars),
    ):
        table.add_row(name, f"{dollars:,.0f} $", f"{dollars / hours:,.2f} $/h of work")
    return table


def _figures(device: ListedDevice) -> list[tuple[str, str, str]]:
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


def _table(*columns: str, drop: tuple[str, ...] = ()) -> Table:
    """``!`` marks what names the row, ``>`` numbers, ``~`` what may be cut where room is scarce.

    ``drop``: columns that a narrow screen leaves out.
    """
    table = plain_table(drop=drop, dropped_note="--json has all")
    for column in columns:
        table.add_column(
            column.rstrip("!>~"),
            justify="right" if column.endswith(">") else "left",
            style="bold" if column.endswith("!") else None,
            no_wrap=not column.endswith("~"),
            overflow="ellipsis",
        )
    return table


def _cheapest(offer: ListedOffer | None, *, spot: bool) -> tuple[RenderableType, ...]:
    if offer is None:
        return (_NONE, "")
    price = _dollars(offer.price_per_device(spot=spot))
    return (price, Text(f"{offer.cloud}×{offer.devices}", style="dim"))


def _regions(offer: ListedOffer) -> str:
    more = len(offer.regions) - 1
    return f"{offer.region} +{more}" if more > 0 else offer.region or "–"


def _short(text: str, *, most: int = 22) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _dollars(price: float | None, *, unknown: str = "–", style: str = "") -> Text:
    return Text(unknown, style="dim") if price is None else Text(f"{price:,.2f}", style=style)


def _tflops(device: ListedDevice) -> RenderableType:
    if "bf16" in device.peak_flops:
        return _peak(device, "bf16")
    if "fp16" in device.peak_flops:
        return f"fp16 {_figure(device.peak_flops['fp16'] / 1e12)}"
    return _NONE


def _peak(device: ListedDevice, precision: str) -> RenderableType:
    peak = device.peak_flops.get(precision)
    return _NONE if peak is None else _figure(peak / 1e12)


def _figure(value: float) -> str:
    """With thousands, without needless zeros."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def _gib(count: float) -> str:
    return f"{count / _GIB:,.0f} GiB"
