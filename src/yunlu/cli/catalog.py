"""``yunlu catalog``: which devices there are, what they cost, and what the user knows better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter
from rich.text import Text

from yunlu.hardware.catalog import CatalogError
from yunlu.hardware.ownership import compare_rent
from yunlu.hardware.skypilot import SPOT_FLOOR
from yunlu.jobs import catalog_store
from yunlu.render.terminal.catalog_tables import (
    device_page,
    devices_table,
    offers_table,
    ownership_page,
    summary_table,
)
from yunlu.render.terminal.page import indented, make_console, to_json

if TYPE_CHECKING:
    from yunlu.hardware.catalog import Catalog
    from yunlu.hardware.device import DeviceModel
    from yunlu.hardware.entries import MachineEntry
    from yunlu.hardware.offer import Offer

_FEW = 20
_DIM = "dim: a network that is assumed; a spot price at the cloud's floor, which may not be had"
catalog = App(
    name="catalog",
    help="List devices and what they cost; add prices, machines, devices.",
    group_commands=Group("Commands"),
)

Words = Annotated[str | None, Parameter(show_default=False)]
Money = Annotated[float | None, Parameter(show_default=False)]


@catalog.default
def list_catalog(
    *,
    gpu: Words = None,
    cloud: Words = None,
    region: Words = None,
    spot: bool = False,
    max_price: Money = None,
    devices: bool = False,
    all: bool = False,
    json: bool = False,
) -> int:
    """List what can be had, cheapest device-hour first.

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
    known = catalog_store.open_catalog()
    if max_price is not None and not max_price > 0:
        raise CatalogError(f"--max-price: {max_price:g} is not above 0.")
    if devices:
        return _list_devices(known, gpu, json=json)
    found = known.offers(gpu=gpu, cloud=cloud, region=region, spot=spot, max_price=max_price)
    if json:
        for offer in found:
            print(to_json(offer_record(known, offer)))
        return 0
    console = make_console()
    if not found:
        console.print("nothing fits; leave out an option, or raise --max-price")
        return 0
    if not any((gpu, cloud, region, spot, max_price, all)):
        console.print(indented(summary_table(known)))
        console.print(" yunlu catalog --gpu NAME lists offers; show NAME tells more", style="dim")
        return 0
    shown = found if all else _cheapest_places(found)
    few = shown if all else shown[:_FEW]
    console.print(indented(offers_table(known, few, spot=spot)))
    if any("assumed" in offer.terms or SPOT_FLOOR in offer.terms for offer in few):
        console.print(f" {_DIM}", style="dim")
    if len(few) < len(found):
        console.print(f" {len(few)} of {len(found)} offers: yunlu catalog ... --all", style="dim")
    return 0


@catalog.command
def show(device: str, /, *, json: bool = False) -> int:
    """Show one device: its figures with their sources, and its cheapest offers.

    Args:
        device: Its name or another name of it: h100, A100-SXM4-80GB.
        json: Print it as one JSON object.
    """
    known = catalog_store.open_catalog()
    found = known.device(device, field="device")
    offers = known.offers(gpu=found.name)
    if json:
        records = [offer_record(known, offer) for offer in offers]
        print(to_json({**device_record(found), "offers": records}))
        return 0
    console = make_console()
    console.print(device_page(found))
    if offers:
        cheapest = _cheapest_places(offers)[:10]
        console.print(indented(offers_table(known, cheapest, spot=False)))
    else:
        console.print(Text(" no offer is known: yunlu catalog add FILE adds one", style="dim"))
    return 0


@catalog.command
def update(source: Path, /, *, cloud: Words = None, json: bool = False) -> int:
    """Import prices from a SkyPilot catalog (versions 7 and 8).

    An imported cloud replaces all that shipped of it; prices that you set yourself stay.

    Args:
        source: A vms.csv, or a directory with CLOUD/vms.csv below it.
        cloud: Whose prices they are, where the file's place does not tell.
        json: Print one JSON line for each table.
    """
    tables = catalog_store.update(source, cloud=cloud)
    console = make_console()
    for table in tables:
        done = table.imported
        skipped = dict(done.skipped.most_common())
        if json:
            record = {"path": str(table.path), "cloud": table.cloud, "rows": done.rows}
            print(to_json({**record, "offers": len(done.offers), "skipped": skipped}))
            continue
        line = Text.assemble(
            (f" {table.cloud:<16}", "bold"), f"{done.rows:>6} rows → {len(done.offers):>4} offers"
        )
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        console.print(line.append(f"   left out: {reasons}" if reasons else "", style="dim"))
    if not json:
        console.print(f" kept in {catalog_store.home()}", style="dim")
    return 0


@catalog.command
def add(file: Path, /) -> int:
    """Add devices, prices and own machines from a YAML file.

    Args:
        file: With devices, prices or machines; docs/catalog.md shows one of each.
    """
    more = catalog_store.add(file)
    console = make_console()
    for name in more.names:
        console.print(Text.assemble(" added ", (name, "bold")))
    for machine in more.machines:
        if machine.cost:
            price = f"{machine.cost.dollars_per_hour:,.2f}"
            console.print(f" {machine.name}: {price} $ for each hour of work", style="dim")
    return 0


@catalog.command
def remove(*names: str) -> int:
    """Forget what was added, or an imported cloud.

    Args:
        names: A device, cloud:instance, own:MACHINE, or an imported cloud.
    """
    if not names:
        added = [*catalog_store.read_added().names, *catalog_store.imported_clouds()]
        listing = ", ".join(added) or "nothing was added yet"
        raise CatalogError(f"Say what to remove: {listing}.")
    for name in names:
        make_console().print(f" removed {catalog_store.remove(name)}")
    return 0


@catalog.command
def own(machine: str, /, *, against: Words = None, spot: bool = False, json: bool = False) -> int:
    """Compare an own machine with renting: all costs of its life, and when owning pays.

    Args:
        machine: A YAML file with one machine, or the name of one that was added.
        against: Offers to compare with, with commas: aws:p4d.24xlarge,lambda:gpu_8x_a100.
        spot: Compare with spot prices.
        json: Print one JSON object.
    """
    known = catalog_store.open_catalog()
    entry = _machine(machine)
    device = known.device(entry.device, field="machine.device")
    if entry.cost is None:
        raise CatalogError(
            f"{entry.name} has a price per hour but no cost: there is nothing to work out.",
            hint="give cost: purchase_dollars, power_kw, dollars_per_kwh, years",
        )
    offers = _rivals(known, device, entry, against, spot=spot)
    rows = [
        (offer, share, compare_rent(entry.cost, (offer.price(spot=spot) or 0.0) * share))
        for offer, share in ((offer, _share(known, entry, offer)) for offer in offers)
    ]
    if json:
        compared = [
            {
                "offer": offer.key,
                "nodes": share,
                **{name: getattr(even, name) for name in even.__slots__},
            }
            for offer, share, even in rows
        ]
        print(to_json({"machine": entry.model_dump(), "against": compared}))
        return 0
    make_console().print(ownership_page(entry, device, rows, spot=spot))
    return 0


def offer_record(known: Catalog, offer: Offer) -> dict[str, object]:
    """An offer for programs."""
    return {
        **offer._asdict(),
        "regions": list(offer.regions),
        "dollars_per_device_hour": offer.price_per_device(),
        "spot_dollars_per_device_hour": offer.price_per_device(spot=True),
        "network_bytes_per_s_per_device": known.network_bytes_per_s(offer),
    }


def device_record(device: DeviceModel) -> dict[str, object]:
    """A device for programs."""
    record: dict[str, object] = {name: getattr(device, name) for name in device.__slots__}
    return record | {"peak_flops": dict(device.peak_flops), "sources": dict(device.sources)}


def _list_devices(known: Catalog, gpu: str | None, *, json: bool) -> int:
    names = gpu.split(",") if gpu else [device.name for device in known.devices]
    found = [known.device(name) for name in names]
    if json:
        for device in found:
            print(to_json(device_record(device)))
        return 0
    console = make_console()
    console.print(indented(devices_table(found)))
    console.print(" yunlu catalog show NAME tells where each figure is from", style="dim")
    return 0


def _cheapest_places(offers: list[Offer]) -> list[Offer]:
    """Of each instance the cheapest place: they come in order of price."""
    first: dict[tuple[str, str, str], Offer] = {}
    for offer in offers:
        first.setdefault((offer.cloud, offer.instance, offer.device), offer)
    return list(first.values())


def _machine(text: str) -> MachineEntry:
    path = Path(text)
    if not path.is_file():
        if path.suffix in {".yaml", ".yml", ".json"}:
            raise CatalogError(f"There is no file {path}.")
        return catalog_store.find_machine(text)
    machines = catalog_store.read_file(path).machines
    if len(machines) != 1:
        raise CatalogError(
            f"{path} has {len(machines)} machines, not one.",
            hint="yunlu catalog add FILE, then yunlu catalog own NAME",
        )
    return machines[0]


def _rivals(
    known: Catalog, device: DeviceModel, entry: MachineEntry, against: str | None, *, spot: bool
) -> list[Offer]:
    if against:
        found = [known.find_offer(key.strip()) for key in against.split(",")]
        if unpriced := next((offer for offer in found if not offer.price(spot=spot)), None):
            kind = "spot price" if spot else "price"
            raise CatalogError(
                f"--against: the {kind} of {unpriced.key} is not known.",
                hint="yunlu catalog add FILE sets prices",
            )
        return found
    same = known.offers(gpu=device.name, spot=spot, priced=True)
    others = [offer for offer in same if offer.cloud != "own"]
    fitting = [offer for offer in others if offer.devices == entry.devices] or others
    if not fitting:
        raise CatalogError(
            f"No cloud is known to offer {device.name}.", hint="say --against cloud:instance"
        )
    cheapest: dict[str, Offer] = {}
    for offer in fitting:
        cheapest.setdefault(offer.cloud, offer)
    return list(cheapest.values())[:5]


def _share(known: Catalog, entry: MachineEntry, offer: Offer) -> float:
    """How many nodes of the offer have the own machine's peak: unlike devices compare by it."""
    mine, theirs = known.device(entry.device), known.device(offer.device)
    both = mine.peak_flops.keys() & theirs.peak_flops.keys()
    shared = [precision for precision in ("bf16", "fp16", "fp32") if precision in both]
    if not shared:
        raise CatalogError(
            f"--against: {mine.name} and {theirs.name} share no precision to compare them by."
        )
    peak = shared[0]
    return entry.devices * mine.peak_flops[peak] / (offer.devices * theirs.peak_flops[peak])
