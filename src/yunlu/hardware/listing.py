"""The catalog as values for people and programs: devices, offers, own machines beside rent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from yunlu.core.value import Value
from yunlu.hardware.catalog import OWN_CLOUD, CatalogError, Kind
from yunlu.hardware.entries import BreakEven, MachineEntry, compare_rent
from yunlu.hardware.skypilot import ASSUMED_NETWORK, SPOT_FLOOR

if TYPE_CHECKING:
    from yunlu.hardware.catalog import Catalog, DeviceModel, Offer

_MOST_RIVALS = 5


class ListedDevice(Value):
    """A kind of device; see ``DeviceModel`` for the fields."""

    name: str
    kind: Kind
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: dict[str, float]
    link_bytes_per_s: float
    node_devices: int
    fabric_devices: int
    network_bytes_per_s: float
    reachable: float | None = None
    aliases: tuple[str, ...] = ()
    sources: dict[str, str]

    @classmethod
    def of(cls, device: DeviceModel) -> Self:
        """The device as a value."""
        fields: dict[str, Any] = {name: getattr(device, name) for name in cls.model_fields}
        fields |= {"peak_flops": dict(device.peak_flops), "sources": dict(device.sources)}
        return cls.model_construct(**fields)

    def source(self, name: str) -> str:
        """Source of one figure."""
        return self.sources.get(name) or self.sources.get(name.split(".", 1)[0], "")

    @property
    def leaves_node(self) -> bool:
        """Whether the fast link joins devices of several nodes."""
        return self.fabric_devices > self.node_devices


class ListedOffer(Value):
    """An offer with its prices and network per device; see ``Offer`` for the other fields."""

    cloud: str
    instance: str
    device: str
    devices: int
    cpus: float | None = None
    memory_bytes: int | None = None
    regions: tuple[str, ...] = ()
    dollars_per_hour: float | None = None
    spot_dollars_per_hour: float | None = None
    network_bytes_per_s: float | None = None
    source: str = ""
    terms: str = ""
    nodes: int | None = None
    dollars_per_device_hour: float | None = None
    spot_dollars_per_device_hour: float | None = None
    network_bytes_per_s_per_device: float

    @classmethod
    def of(cls, offer: Offer, catalog: Catalog) -> Self:
        """The offer as a value."""
        return cls.model_construct(
            **offer._asdict(),
            dollars_per_device_hour=offer.price_per_device(),
            spot_dollars_per_device_hour=offer.price_per_device(spot=True),
            network_bytes_per_s_per_device=catalog.network_bytes_per_s(offer),
        )

    @property
    def key(self) -> str:
        """``aws:p4d.24xlarge``."""
        return f"{self.cloud}:{self.instance}"

    @property
    def region(self) -> str:
        """The first region."""
        return self.regions[0] if self.regions else ""

    @property
    def assumes_network(self) -> bool:
        """Whether the network is assumed, not published."""
        return ASSUMED_NETWORK in self.terms

    @property
    def has_floor_price(self) -> bool:
        """Whether the spot price is the cloud's floor, at which nothing may be available."""
        return SPOT_FLOOR in self.terms

    def price_per_device(self, *, spot: bool = False) -> float | None:
        """Dollars per hour of one device."""
        return self.spot_dollars_per_device_hour if spot else self.dollars_per_device_hour


class OfferedDevice(Value):
    """A device that somebody offers, and its cheapest offers."""

    device: ListedDevice
    offers: int
    """Number of offers."""
    cheapest: ListedOffer | None = None
    cheapest_spot: ListedOffer | None = None


class DevicePage(Value):
    """One device and all its offers, cheapest first."""

    device: ListedDevice
    offers: tuple[ListedOffer, ...]


class ImportedTable(Value):
    """One imported price table."""

    path: str
    cloud: str
    rows: int
    offers: int
    skipped: dict[str, int]
    """Rows left out, by reason."""
    home: str
    """Where the user's part of the catalog is kept."""


class RentComparison(Value):
    """An own machine beside the rent of equal compute."""

    offer: ListedOffer
    nodes: float
    """Nodes of the offer with the peak of the own machine."""
    break_even: BreakEven


class OwnershipPage(Value):
    """An own machine beside the offers it competes with."""

    machine: MachineEntry
    device: ListedDevice
    spot: bool
    against: tuple[RentComparison, ...]


def list_offers(
    catalog: Catalog,
    *,
    gpu: str | None = None,
    cloud: str | None = None,
    region: str | None = None,
    spot: bool = False,
    max_price: float | None = None,
) -> tuple[ListedOffer, ...]:
    """Matching offers, cheapest device-hour first."""
    offers = catalog.offers(gpu=gpu, cloud=cloud, region=region, spot=spot, max_price=max_price)
    return tuple(ListedOffer.of(offer, catalog) for offer in offers)


def list_devices(catalog: Catalog, gpu: str | None = None) -> tuple[ListedDevice, ...]:
    """The named devices, or all."""
    names = gpu.split(",") if gpu else [device.name for device in catalog.devices]
    return tuple(ListedDevice.of(catalog.device(name)) for name in names)


def list_offered_devices(catalog: Catalog) -> tuple[OfferedDevice, ...]:
    """Every device with an offer, fastest first."""
    counts = Counter(offer.device for offer in catalog.every_offer)
    devices = sorted(catalog.devices, key=_peak, reverse=True)
    return tuple(
        OfferedDevice(
            device=ListedDevice.of(device),
            offers=counts[device.name],
            cheapest=_cheapest(catalog, device.name, spot=False),
            cheapest_spot=_cheapest(catalog, device.name, spot=True),
        )
        for device in devices
        if counts[device.name]
    )


def make_device_page(catalog: Catalog, name: str) -> DevicePage:
    """The device of that name or alias, and its offers."""
    device = catalog.device(name, field="device")
    return DevicePage(device=ListedDevice.of(device), offers=list_offers(catalog, gpu=device.name))


def compare_ownership(
    catalog: Catalog, entry: MachineEntry, *, against: str | None = None, spot: bool = False
) -> OwnershipPage:
    """Cost of an own machine over its life beside the rent of equal compute."""
    device = catalog.device(entry.device, field="machine.device")
    if entry.cost is None:
        raise CatalogError(
            f"{entry.name} has a price per hour but no cost: there is nothing to work out.",
            hint="give cost: purchase_dollars, power_kw, dollars_per_kwh, years",
        )
    rows: list[RentComparison] = []
    for offer in _rivals(catalog, device, entry, against, spot=spot):
        nodes = _equal_nodes(catalog, entry, offer)
        rent = (offer.price(spot=spot) or 0.0) * nodes
        rows.append(
            RentComparison(
                offer=ListedOffer.of(offer, catalog),
                nodes=nodes,
                break_even=compare_rent(entry.cost, rent),
            )
        )
    return OwnershipPage(
        machine=entry, device=ListedDevice.of(device), spot=spot, against=tuple(rows)
    )


def _cheapest(catalog: Catalog, device: str, *, spot: bool) -> ListedOffer | None:
    offers = catalog.offers(gpu=device, spot=spot, priced=True)
    return ListedOffer.of(offers[0], catalog) if offers else None


def _peak(device: DeviceModel) -> float:
    return max(device.peak_flops.get("bf16", 0), device.peak_flops.get("fp16", 0))


def _rivals(
    catalog: Catalog, device: DeviceModel, entry: MachineEntry, against: str | None, *, spot: bool
) -> list[Offer]:
    if against:
        named = [catalog.find_offer(key.strip()) for key in against.split(",")]
        if unpriced := next((offer for offer in named if not offer.price(spot=spot)), None):
            kind = "spot price" if spot else "price"
            raise CatalogError(
                f"--against: the {kind} of {unpriced.key} is not known.",
                hint="yunlu catalog add FILE sets prices",
            )
        return named
    same = catalog.offers(gpu=device.name, spot=spot, priced=True)
    rented = [offer for offer in same if offer.cloud != OWN_CLOUD]
    fitting = [offer for offer in rented if offer.devices == entry.devices] or rented
    if not fitting:
        raise CatalogError(
            f"No cloud is known to offer {device.name}.", hint="say --against cloud:instance"
        )
    cheapest: dict[str, Offer] = {}
    for offer in fitting:
        cheapest.setdefault(offer.cloud, offer)
    return list(cheapest.values())[:_MOST_RIVALS]


def _equal_nodes(catalog: Catalog, entry: MachineEntry, offer: Offer) -> float:
    """Nodes of the offer with the peak of the own machine: unlike devices compare by it."""
    own, rented = catalog.device(entry.device), catalog.device(offer.device)
    both = own.peak_flops.keys() & rented.peak_flops.keys()
    shared = [precision for precision in ("bf16", "fp16", "fp32") if precision in both]
    if not shared:
        raise CatalogError(
            f"--against: {own.name} and {rented.name} share no precision to compare them by."
        )
    peak = shared[0]
    return entry.devices * own.peak_flops[peak] / (offer.devices * rented.peak_flops[peak])
