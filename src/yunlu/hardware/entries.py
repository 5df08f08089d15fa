"""Catalog entries that a user adds in YAML: devices, prices, own machines and what owning costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from yunlu.core.errors import did_you_mean
from yunlu.core.value import Value
from yunlu.hardware.catalog import (
    KINDS,
    MIB,
    OWN_CLOUD,
    PRECISIONS,
    CatalogError,
    DeviceModel,
    Kind,
    Offer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import ErrorDetails

    from yunlu.hardware.catalog import Catalog

HOURS_PER_YEAR = 365.25 * 24


class Ownership(Value):
    """What was paid for a machine and what is paid while it stands there."""

    purchase_dollars: float = Field(ge=0, allow_inf_nan=False)
    """The whole machine, with network and set-up."""
    years: float = Field(default=4, gt=0, le=30)
    """Over which it is written off."""
    resale_dollars: float = Field(default=0, ge=0, allow_inf_nan=False)
    """What it brings in after those years."""
    interest: float = Field(default=0, ge=0, le=1)
    """Yearly cost of the money bound in it: 0.06 is 6 %."""
    power_kw: float = Field(gt=0, allow_inf_nan=False)
    """Drawn while it works."""
    idle_share: float = Field(default=0.25, ge=0, le=1)
    """Of that power while it waits."""
    dollars_per_kwh: float = Field(ge=0, allow_inf_nan=False)
    cooling: float = Field(default=1.3, ge=1, le=5)
    """Power of the room for each unit of the machine's (PUE)."""
    utilisation: float = Field(default=0.5, gt=0, le=1)
    """Share of all hours in which it works for somebody."""
    yearly_dollars: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Staff, hosting, insurance, repairs."""

    @property
    def used_hours(self) -> float:
        """Hours of work in its life."""
        return self.years * HOURS_PER_YEAR * self.utilisation

    @property
    def capital_dollars(self) -> float:
        """What it loses in value in its life, and the interest on what is bound on average."""
        bound = (self.purchase_dollars + self.resale_dollars) / 2
        return self.purchase_dollars - self.resale_dollars + bound * self.interest * self.years

    @property
    def upkeep_dollars(self) -> float:
        """Staff and hosting of its life."""
        return self.yearly_dollars * self.years

    @property
    def working_dollars_per_hour(self) -> float:
        """Power of an hour of work, cooling included."""
        return self.power_kw * self.cooling * self.dollars_per_kwh

    @property
    def idle_dollars_per_hour(self) -> float:
        """Power of an hour of waiting."""
        return self.working_dollars_per_hour * self.idle_share

    @property
    def power_dollars(self) -> float:
        """Power of its life, at its utilisation."""
        idle_hours = self.years * HOURS_PER_YEAR - self.used_hours
        return (
            self.used_hours * self.working_dollars_per_hour
            + idle_hours * self.idle_dollars_per_hour
        )

    @property
    def total_dollars(self) -> float:
        """All it costs in its life, at its utilisation."""
        return self.capital_dollars + self.upkeep_dollars + self.power_dollars

    @property
    def dollars_per_hour(self) -> float:
        """Of an hour of work: all costs, shared out over the hours in which it works."""
        return self.total_dollars / self.used_hours


class BreakEven(Value):
    """An own machine beside the rent of as much."""

    rent_dollars_per_hour: float
    own_dollars_per_hour: float
    rent_dollars: float
    """For the hours in which the own machine works in its life."""
    own_dollars: float
    hours: float
    """Of work from which on owning is cheaper; infinite where its power alone costs more."""
    utilisation: float
    """The same as a share of all hours of its life; above 1 it is never reached."""

    @property
    def owning_wins(self) -> bool:
        """At the utilisation that was stated."""
        return self.own_dollars < self.rent_dollars


def compare_rent(own: Ownership, rent_dollars_per_hour: float) -> BreakEven:
    """Own a machine, or rent as much by the hour: rent is paid for hours of work only."""
    life_hours = own.years * HOURS_PER_YEAR
    standing = own.capital_dollars + own.upkeep_dollars + life_hours * own.idle_dollars_per_hour
    saved_per_hour = rent_dollars_per_hour - (
        own.working_dollars_per_hour - own.idle_dollars_per_hour
    )
    hours = standing / saved_per_hour if saved_per_hour > 0 else math.inf
    return BreakEven(
        rent_dollars_per_hour=rent_dollars_per_hour,
        own_dollars_per_hour=own.dollars_per_hour,
        rent_dollars=rent_dollars_per_hour * own.used_hours,
        own_dollars=own.total_dollars,
        hours=hours,
        utilisation=hours / life_hours,
    )


_GIB = 2**30
_GBIT = 1e9 / 8


class DeviceEntry(Value):
    """A kind of device that the catalog does not have, or has otherwise."""

    name: str = Field(min_length=1, pattern=r"^[^|:@]+$")
    kind: Kind
    memory_gib: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    peak_tflops: dict[str, float] = Field(min_length=1)
    """Dense, by precision."""
    link_gb_per_s: float = Field(gt=0)
    node_devices: int = Field(default=1, ge=1)
    fabric_devices: int | None = Field(default=None, ge=1)
    network_gb_per_s: float = Field(default=1.25, gt=0)
    reachable: float | None = Field(default=None, gt=0, le=1)
    aliases: tuple[str, ...] = ()
    source: str = Field(min_length=1)
    """Where the figures are from."""

    @model_validator(mode="after")
    def _precisions(self) -> DeviceEntry:
        for precision, rate in self.peak_tflops.items():
            if precision not in PRECISIONS:
                raise ValueError(
                    f"peak_tflops: {precision!r} is no precision; {', '.join(PRECISIONS)} are"
                )
            if not 0 < rate < 1e6:
                raise ValueError(f"peak_tflops.{precision}: {rate} is not a rate in TFLOP/s")
        return self

    def to_device(self) -> DeviceModel:
        """The same as the catalog holds it."""
        fields = ("memory_bytes", "memory_bytes_per_s", "peak_flops", "link_bytes_per_s")
        more = ("node_devices", "fabric_devices", "network_bytes_per_s", "reachable")
        return DeviceModel(
            name=self.name,
            kind=self.kind,
            memory_bytes=round(self.memory_gib * 1024) * MIB,
            memory_bytes_per_s=self.memory_gb_per_s * 1e9,
            peak_flops={name: rate * 1e12 for name, rate in self.peak_tflops.items()},
            link_bytes_per_s=self.link_gb_per_s * 1e9,
            node_devices=self.node_devices,
            fabric_devices=self.fabric_devices or self.node_devices,
            network_bytes_per_s=self.network_gb_per_s * 1e9,
            reachable=self.reachable,
            aliases=self.aliases,
            sources=dict.fromkeys((*fields, *more), self.source),
        )


class PriceEntry(Value):
    """A price: of an offer that is known, or with ``device`` of a new one."""

    offer: str = Field(pattern=r"^[^:@|\s]+:[^@|]+$")
    """``cloud:instance``."""
    dollars_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    spot_dollars_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    device: str | None = None
    devices: int | None = Field(default=None, ge=1)
    cpus: float | None = Field(default=None, gt=0)
    memory_gib: float | None = Field(default=None, gt=0)
    regions: tuple[str, ...] = ()
    network_gbit_per_s: float | None = Field(default=None, gt=0)
    nodes: int | None = Field(default=None, ge=1)
    """How many can be had together, on one network."""
    source: str = "set by you"

    @model_validator(mode="after")
    def _says_something(self) -> PriceEntry:
        if self.dollars_per_hour is None and self.spot_dollars_per_hour is None:
            raise ValueError("dollars_per_hour or spot_dollars_per_hour is needed")
        return self


class MachineEntry(Value):
    """A machine of one's own."""

    name: str = Field(min_length=1, pattern=r"^[^|:@]+$")
    device: str
    devices: int = Field(ge=1)
    cpus: float | None = Field(default=None, gt=0)
    memory_gib: float | None = Field(default=None, gt=0)
    network_gbit_per_s: float | None = Field(default=None, gt=0)
    nodes: int = Field(default=1, ge=1)
    """How many there are of it, on one network."""
    dollars_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Instead of ``cost`` where somebody has worked it out."""
    cost: Ownership | None = None

    @model_validator(mode="after")
    def _has_one_price(self) -> MachineEntry:
        if (self.cost is None) == (self.dollars_per_hour is None):
            raise ValueError("give either cost (purchase, power, years) or dollars_per_hour")
        return self

    def to_offer(self, catalog: Catalog) -> Offer:
        """The machine as something that can be planned for, at the cost of an hour of work."""
        price = self.cost.dollars_per_hour if self.cost else self.dollars_per_hour
        return Offer(
            cloud=OWN_CLOUD,
            instance=self.name,
            device=catalog.device(self.device, field=f"machines.{self.name}.device").name,
            devices=self.devices,
            cpus=self.cpus,
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * _GIB),
            dollars_per_hour=price,
            network_bytes_per_s=_bytes_per_s(self.network_gbit_per_s),
            source="your machine",
            terms="all costs of its life, for each hour of work" if self.cost else "",
            nodes=self.nodes,
        )


class Additions(Value):
    """A whole file."""

    devices: tuple[DeviceEntry, ...] = ()
    prices: tuple[PriceEntry, ...] = ()
    machines: tuple[MachineEntry, ...] = ()

    def merge(self, more: Additions) -> Additions:
        """Both; where names are equal, the later one."""
        return Additions(
            devices=tuple({e.name.lower(): e for e in (*self.devices, *more.devices)}.values()),
            prices=tuple({e.offer.lower(): e for e in (*self.prices, *more.prices)}.values()),
            machines=tuple({e.name.lower(): e for e in (*self.machines, *more.machines)}.values()),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What each can be removed by."""
        return (
            *(entry.name for entry in self.devices),
            *(entry.offer for entry in self.prices),
            *(f"{OWN_CLOUD}:{entry.name}" for entry in self.machines),
        )

    def without(self, name: str) -> Additions:
        """All but the one of that name."""
        own = name.lower().removeprefix(f"{OWN_CLOUD}:")
        return Additions(
            devices=tuple(e for e in self.devices if e.name.lower() != name.lower()),
            prices=tuple(e for e in self.prices if e.offer.lower() != name.lower()),
            machines=tuple(e for e in self.machines if e.name.lower() != own),
        )


def read_additions(data: Any, *, where: str) -> Additions:
    """A file's data, checked; everything wrong with it is said at once."""
    if not isinstance(data, dict):
        raise CatalogError(
            f"{where}: expected a mapping with devices, prices or machines.",
            hint="docs/catalog.md shows one of each",
        )
    try:
        return Additions.model_validate(data)
    except ValidationError as error:
        lines = [_sentence(fault) for fault in error.errors(include_url=False)]
        count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
        raise CatalogError("\n".join([f"{where}: {count}", *(f"  {x}" for x in lines)])) from None


def offers_of(additions: Additions, catalog: Catalog) -> Iterator[Offer]:
    """What the file's prices and machines come to beside the offers that are known."""
    for entry in additions.prices:
        cloud, _, instance = entry.offer.partition(":")
        known = [
            offer
            for offer in catalog.every_offer
            if offer.cloud == cloud.lower() and offer.instance.lower() == instance.lower()
        ]
        if known and entry.device is None:
            yield from _repriced(known, entry)
        else:
            yield _new_offer(entry, cloud.lower(), instance, catalog)
    for machine in additions.machines:
        yield machine.to_offer(catalog)


def _repriced(known: list[Offer], entry: PriceEntry) -> Iterator[Offer]:
    requested = set(entry.regions)
    for offer in known:
        regions = tuple(name for name in offer.regions if not requested or name in requested)
        if requested and not regions and offer.regions:
            yield offer
            continue
        if left := tuple(name for name in offer.regions if name not in regions):
            yield offer._replace(regions=left)
        network = _bytes_per_s(entry.network_gbit_per_s)
        yield offer._replace(
            regions=regions,
            dollars_per_hour=entry.dollars_per_hour,
            spot_dollars_per_hour=entry.spot_dollars_per_hour,
            network_bytes_per_s=network or offer.network_bytes_per_s,
            source=entry.source,
            terms="",
            nodes=entry.nodes or offer.nodes,
        )


def _new_offer(entry: PriceEntry, cloud: str, instance: str, catalog: Catalog) -> Offer:
    if entry.device is None or entry.devices is None:
        missing = "device" if entry.device is None else "devices"
        near = {offer.key for offer in catalog.every_offer if offer.cloud == cloud}
        known = did_you_mean(*((entry.offer, near) if near else (cloud, catalog.clouds)))
        raise CatalogError(
            f"prices: {entry.offer} is not in the catalog, and without {missing} it cannot be "
            f"added; {known}"
        )
    return Offer(
        cloud=cloud,
        instance=instance,
        device=catalog.device(entry.device, field=f"prices.{entry.offer}.device").name,
        devices=entry.devices,
        cpus=entry.cpus,
        memory_bytes=None if entry.memory_gib is None else int(entry.memory_gib * _GIB),
        regions=entry.regions,
        dollars_per_hour=entry.dollars_per_hour,
        spot_dollars_per_hour=entry.spot_dollars_per_hour,
        network_bytes_per_s=_bytes_per_s(entry.network_gbit_per_s),
        source=entry.source,
        nodes=entry.nodes,
    )


def _bytes_per_s(gbit_per_s: float | None) -> float | None:
    return None if gbit_per_s is None else gbit_per_s * _GBIT


def _sentence(fault: ErrorDetails) -> str:
    index = ""
    for part in fault["loc"]:
        index += f"[{part}]" if isinstance(part, int) else f".{part}" if index else str(part)
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if fault["type"] == "missing":
        message = "is needed"
    elif fault["type"] == "extra_forbidden":
        message = f"is not known here; {did_you_mean(str(fault['loc'][-1]), _keys(fault['loc']))}"
    elif fault["type"] == "literal_error":
        message = f"{fault['input']!r} is not one of {', '.join(KINDS)}"
    elif isinstance(fault["input"], int | float | str):
        message = f"{message}, got {fault['input']!r}"
    return f"{index}: {message}" if index else message


def _keys(location: tuple[int | str, ...]) -> list[str]:
    """What could stand where an unknown key does."""
    kinds: dict[str, type[Value]] = {
        "devices": DeviceEntry,
        "prices": PriceEntry,
        "machines": MachineEntry,
        "cost": Ownership,
    }
    homes = [part for part in location[:-1] if isinstance(part, str)]
    return list((kinds[homes[-1]] if homes and homes[-1] in kinds else Additions).model_fields)
