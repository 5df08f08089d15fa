"""``yunlu catalog``: devices, what they cost, and the user's own prices and machines."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (the command line is read from it)
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter
from rich.text import Text

from yunlu.client import default_client
from yunlu.core.errors import YunluError
from yunlu.render.terminal.page import (
    indented,
    make_console,
    print_json,
    print_lines,
    print_value,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.client.protocol import Client
    from yunlu.hardware.listing import ListedOffer

_FEW = 20
_FEW_OF_DEVICE = 10
_DIM = (
    "dim: a network that is assumed; a spot price at the cloud's floor, which may not be available"
)
catalog = App(
    name="catalog",
    help="List devices and what they cost; add prices, machines, devices.",
    group_commands=Group("Commands"),
)

Names = Annotated[str | None, Parameter(show_default=False)]
Money = Annotated[float | None, Parameter(show_default=False)]


@catalog.default
def list_catalog(
    *,
    gpu: Names = None,
    cloud: Names = None,
    region: Names = None,
    spot: bool = False,
    max_price: Money = None,
    devices: bool = False,
    all: bool = False,
    json: bool = False,
) -> int:
    """List offers, cheapest device-hour first.

    Without options: one line for each device, with its cheapest offers.

    Args:
        gpu: Only these devices; several with commas: h100,h200.
        cloud: Only these clouds; several with commas: aws,gcp.
        region: Only this region, or all that begin so: us-.
        spot: Only spot offers, by their spot price.
        max_price: Dollars per hour of a node, at most.
        devices: List devices and their figures instead of offers.
        all: Every offer and region, not the cheapest of each instance.
        json: Print one JSON line for each offer or device.
    """
    client = default_client()
    if max_price is not None and not max_price > 0:
        raise YunluError(f"--max-price: {max_price:g} is not above 0.")
    if devices:
        return _list_devices(client, gpu, json=json)
    offers = client.offers(gpu=gpu, cloud=cloud, region=region, spot=spot, max_price=max_price)
    if json:
        for offer in offers:
            print_value(offer)
        return 0
    from yunlu.render.terminal.catalog_tables import offers_table, summary_table  # noqa: PLC0415

    console = make_console()
    if not offers:
        print_lines(console, Text("nothing fits; leave out an option, or raise --max-price"))
        return 0
    if not any((gpu, cloud, region, spot, max_price, all)):
        console.print(indented(summary_table(client.offered_devices())))
        print_lines(
            console,
            Text(" yunlu catalog --gpu NAME lists offers; show NAME shows details", style="dim"),
        )
        return 0
    shown = offers if all else _cheapest_places(offers)[:_FEW]
    console.print(indented(offers_table(shown, spot=spot)))
    if any(offer.assumes_network or offer.has_floor_price for offer in shown):
        print_lines(console, Text(f" {_DIM}", style="dim"))
    if len(shown) < len(offers):
        print_lines(
            console,
            Text(f" {len(shown)} of {len(offers)} offers: yunlu catalog ... --all", style="dim"),
        )
    return 0


@catalog.command
def show(device: str, /, *, json: bool = False) -> int:
    """Show one device: its figures with their sources, and its cheapest offers.

    Args:
        device: Its name or another name of it: h100, A100-SXM4-80GB.
        json: Print it as one JSON object.
    """
    page = default_client().device(device)
    if json:
        offers = [offer.model_dump(mode="json") for offer in page.offers]
        print_json({**page.device.model_dump(mode="json"), "offers": offers})
        return 0
    from yunlu.render.terminal.catalog_tables import device_page, offers_table  # noqa: PLC0415

    console = make_console()
    console.print(device_page(page.device))
    if page.offers:
        cheapest = _cheapest_places(page.offers)[:_FEW_OF_DEVICE]
        console.print(indented(offers_table(cheapest, spot=False)))
    else:
        text = " no offer is known: yunlu catalog add FILE adds one"
        print_lines(console, Text(text, style="dim"))
    return 0


@catalog.command
def update(source: Path, /, *, cloud: Names = None, json: bool = False) -> int:
    """Import prices from a SkyPilot catalog (versions 7 and 8).

    An imported cloud replaces its shipped prices; prices that you set yourself stay.

    Args:
        source: A vms.csv, or a directory with CLOUD/vms.csv below it.
        cloud: Name of the cloud, where the path does not contain it.
        json: Print one JSON line for each table.
    """
    tables = default_client().update_catalog(source, cloud=cloud)
    if json:
        for table in tables:
            print_json(table.model_dump(mode="json", exclude={"home"}))
        return 0
    console = make_console()
    for table in tables:
        line = Text.assemble(
            (f" {table.cloud:<16}", "bold"), f"{table.rows:>6} rows → {table.offers:>4} offers"
        )
        reasons = ", ".join(f"{count} {reason}" for reason, count in table.skipped.items())
        print_lines(console, line.append(f"   left out: {reasons}" if reasons else "", style="dim"))
    print_lines(console, Text(f" kept in {tables[0].home}", style="dim"))
    return 0


@catalog.command
def add(file: Path, /) -> int:
    """Add devices, prices and own machines from a YAML file.

    Args:
        file: With devices, prices or machines; docs/catalog.md shows one of each.
    """
    added = default_client().add_to_catalog(file)
    console = make_console()
    for name in added.names:
        console.print(Text.assemble(" added ", (name, "bold")))
    for machine in added.machines:
        if machine.cost:
            price = f"{machine.cost.dollars_per_hour:,.2f}"
            print_lines(
                console, Text(f" {machine.name}: {price} $ for each hour of work", style="dim")
            )
    return 0


@catalog.command
def remove(*names: str) -> int:
    """Remove added entries, or an imported cloud.

    Args:
        names: A device, cloud:instance, own:MACHINE, or an imported cloud.
    """
    for removed in default_client().remove_from_catalog(names):
        make_console().print(f" removed {removed}")
    return 0


@catalog.command
def own(machine: str, /, *, against: Names = None, spot: bool = False, json: bool = False) -> int:
    """Compare an own machine with renting: cost over its life, and when owning is cheaper.

    Args:
        machine: A YAML file with one machine, or the name of one that was added.
        against: Offers to compare with, with commas: aws:p4d.24xlarge,lambda:gpu_8x_a100.
        spot: Compare with spot prices.
        json: Print one JSON object.
    """
    page = default_client().compare_ownership(machine, against=against, spot=spot)
    if json:
        compared = [
            {"offer": row.offer.key, "nodes": row.nodes, **row.break_even.model_dump()}
            for row in page.against
        ]
        print_json({"machine": page.machine.model_dump(), "against": compared})
        return 0
    from yunlu.render.terminal.catalog_tables import ownership_page  # noqa: PLC0415 (slow)

    make_console().print(ownership_page(page))
    return 0


def _list_devices(client: Client, gpu: str | None, *, json: bool) -> int:
    devices = client.devices(gpu=gpu)
    if json:
        for device in devices:
            print_value(device)
        return 0
    from yunlu.render.terminal.catalog_tables import devices_table  # noqa: PLC0415 (slow)

    console = make_console()
    console.print(indented(devices_table(devices)))
    print_lines(
        console, Text(" yunlu catalog show NAME shows the source of each figure", style="dim")
    )
    return 0


def _cheapest_places(offers: Sequence[ListedOffer]) -> list[ListedOffer]:
    """The cheapest region of each instance: offers come in order of price."""
    first: dict[tuple[str, str, str], ListedOffer] = {}
    for offer in offers:
        first.setdefault((offer.cloud, offer.instance, offer.device), offer)
    return list(first.values())
