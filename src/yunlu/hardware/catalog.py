"""Catalog: device models, offers to rent, and all that is known of both, shipped and added by the user."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from yunlu.core.errors import YunluError, did_you_mean
from yunlu.core.files import check_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from importlib.resources.abc import Traversable
    from pathlib import Path

HERE = "here"
"""The cloud that this machine is."""
OWN_CLOUD = "own"
"""The cloud that own machines are offered by."""
UNJOINED_CLOUDS = frozenset(
    {"hyperbolic", "primeintellect", "runpod", "seeweb", "shadeform", "vast", "verda", "yotta"}
)
"""Machines rented there one by one share no network: SkyPilot joins none (skypilot-org/skypilot
@147db0f, ``MULTI_NODE`` of ``sky/clouds``). Some sell clusters, under other names and prices."""


class Offer(NamedTuple):
    """One kind of node, at one price, in one or several regions.

    A tuple, not a dataclass: thousands are read before a plan can start, and these read ten times
    faster.
    """

    cloud: str
    instance: str
    device: str
    """Name of a ``DeviceModel``."""
    devices: int
    """On one node."""
    cpus: float | None = None
    memory_bytes: int | None = None
    """Of the host."""
    regions: tuple[str, ...] = ()
    """All with this price; the cheapest zone of each."""
    dollars_per_hour: float | None = None
    """The whole node on demand; None where no public price is known."""
    spot_dollars_per_hour: float | None = None
    """The whole node, when it may be taken away at any time; None where that is not offered."""
    network_bytes_per_s: float | None = None
    """The whole node to other nodes, one direction; None asks the device's usual share."""
    source: str = ""
    terms: str = ""
    """What to know before relying on the price."""
    nodes: int | None = None
    """How many can be had together, where that is said."""

    @property
    def region(self) -> str:
        """The first of its regions."""
        return self.regions[0] if self.regions else ""

    @property
    def key(self) -> str:
        """``aws:p4d.24xlarge``."""
        return f"{self.cloud}:{self.instance}"

    @property
    def most_nodes(self) -> int | None:
        """How many can work together; None where as many as are paid for."""
        is_lone = self.cloud in UNJOINED_CLOUDS or self.cloud in {HERE, OWN_CLOUD}
        return 1 if self.nodes is None and is_lone else self.nodes

    def price(self, *, spot: bool = False) -> float | None:
        """Dollars per hour of the whole node; None where unknown or not offered."""
        return self.spot_dollars_per_hour if spot else self.dollars_per_hour

    def price_per_device(self, *, spot: bool = False) -> float | None:
        """Dollars per hour of one device."""
        price = self.price(spot=spot)
        return None if price is None else price / self.devices


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


Kind = Literal["cuda", "rocm", "npu", "xpu", "tpu", "neuron", "gaudi", "cpu", "mps", "other"]
"""Named as torch names its devices where it knows them; ``npu`` is Ascend's, ``xpu`` Intel's GPUs."""
KINDS: tuple[Kind, ...] = get_args(Kind)
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """One kind of device. Rates are peaks, per device; never with sparsity."""

    name: str
    kind: Kind
    memory_bytes: int
    """What the driver reports, not what the name says."""
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]
    """Dense matrix products, FLOP/s by precision; what the device cannot do is absent."""
    link_bytes_per_s: float
    """To the other devices of its node together, one direction."""
    node_devices: int
    """How many usually share a node."""
    fabric_devices: int
    """How many that link joins; more than a node where it leaves the node (NVL72, TPU pods)."""
    network_bytes_per_s: float
    """To other nodes (of other fabrics), one direction, its share of the node's usual network."""
    reachable: float | None = None
    """Share of the bf16 peak measured in large matrix products."""
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where each figure comes from, by field name; ``peak_flops.bf16`` before ``peak_flops``."""

    def source(self, name: str) -> str:
        """Where one figure comes from."""
        return self.sources.get(name) or self.sources.get(name.split(".", 1)[0], "")

    @property
    def names(self) -> tuple[str, ...]:
        """All it answers to."""
        return (self.name, *self.aliases)

    @property
    def leaves_node(self) -> bool:
        """Whether its fast link joins devices of several nodes."""
        return self.fabric_devices > self.node_devices


def read_devices(
    figures: Iterable[Mapping[str, str]], sources: Iterable[Mapping[str, str]]
) -> list[DeviceModel]:
    """Devices from the rows of ``devices.csv`` and ``sources.csv``."""
    result: dict[str, dict[str, str]] = {}
    for row in sources:
        result.setdefault(row["device"], {})[row["field"]] = row["source"]
    return [_read_device(row, result.get(row["name"], {})) for row in figures]


def _read_device(row: Mapping[str, str], sources: dict[str, str]) -> DeviceModel:
    return DeviceModel(
        name=row["name"],
        kind=cast("Kind", row["kind"]),
        memory_bytes=int(row["memory_mib"]) * MIB,
        memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
        peak_flops={
            precision: float(row[f"{precision}_tflops"]) * 1e12
            for precision in PRECISIONS
            if row[f"{precision}_tflops"]
        },
        link_bytes_per_s=float(row["link_gb_per_s"]) * 1e9,
        node_devices=int(row["node_devices"]),
        fabric_devices=int(row["fabric_devices"]),
        network_bytes_per_s=float(row["network_gb_per_s"]) * 1e9,
        reachable=float(row["reachable"]) if row["reachable"] else None,
        aliases=tuple(row["aliases"].split("|")) if row["aliases"] else (),
        sources=sources,
    )


_BY_MEMORY = {
    "V100": {16: "V100-16GB", 32: "V100-32GB"},
    "A100": {40: "A100-40GB", 80: "A100-80GB"},
    # Three generations of one name: Turing, Ada, Blackwell.
    "RTX6000": {24: "Quadro-RTX6000", 48: "RTX6000-Ada", 96: "RTXPRO6000"},
    "H100": {80: "H100", 94: "H100-NVL"},
}
_CARDS = {
    "A100-40GB": "A100-40GB-PCIe",
    "A100-80GB": "A100-80GB-PCIe",
    "H100": "H100-PCIe",
}
# Clouds whose plain "A100" and "H100" are cards, and markets that do not say (cards are the
# cautious answer: the same arithmetic or less, a slower link).
_CARD_CLOUDS = {"runpod", "ovhcloud", "scaleway", "seeweb", "primeintellect", "shadeform"}
_CARD_INSTANCES = (
    ("azure", re.compile(r"Standard_NC\d+ads_A100_v4")),
    ("lambda", re.compile(r"gpu_[124]x_a100$")),
)
_NVL_INSTANCES = (("azure", re.compile(r"Standard_NC\d+adi?s_H100_v5")),)
_SUMS_MEMORY = {"vast", "primeintellect"}
"""They tell the memory of all devices together."""
_TPU = re.compile(r"tpu-(v\w+?)(?:litepod)?-(\d+)$")
_CORES_EACH = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5": 1, "v6e": 1}
"""In how many parts a chip is counted in the name of a slice."""


def name_device(
    catalog: Catalog,
    *,
    cloud: str,
    instance: str,
    accelerator: str,
    count: float,
    memory_mib: float | None = None,
) -> str | None:
    """The name in the catalog; None for what it does not know (parts of a GPU, graphics, FPGAs)."""
    if "MIG" in accelerator:
        return None
    memory_gb = _memory_gb(cloud, count, memory_mib)
    choices = _BY_MEMORY.get(accelerator.upper())
    if choices and memory_gb is not None:
        size = min(choices, key=lambda known: abs(known - memory_gb))
        name: str | None = choices[size]
    else:
        name = catalog.device(accelerator).name if catalog.has_device(accelerator) else None
    return _form(name, cloud=cloud, instance=instance, accelerator=accelerator)


def split_slice(accelerator: str) -> tuple[str, int] | None:
    """``tpu-v5p-16`` → ``("TPU-v5p", 8)``: the device, and chips; None for what is no TPU."""
    match = _TPU.match(accelerator)
    if not match:
        return None
    version, parts = match[1], int(match[2])
    name = "TPU-v5e" if "litepod" in accelerator else f"TPU-{version}"
    return name, max(1, parts // _CORES_EACH.get(version, 1))


def _memory_gb(cloud: str, count: float, memory_mib: float | None) -> float | None:
    if not memory_mib:
        return None
    # RunPod and Shadeform write gigabytes where MiB belong.
    memory_gb = memory_mib if memory_mib < 1024 else memory_mib / 1024
    return memory_gb / count if cloud in _SUMS_MEMORY else memory_gb


def _form(name: str | None, *, cloud: str, instance: str, accelerator: str) -> str | None:
    """The card or the module: prices tell them apart by the instance's name only."""
    if name not in _CARDS:
        return name
    result = f"{instance} {accelerator}".lower()
    if name == "H100" and (
        re.search(r"nvl(?!ink)", result) or _matches(_NVL_INSTANCES, cloud, instance)
    ):
        return "H100-NVL"
    if "pcie" in result or _matches(_CARD_INSTANCES, cloud, instance):
        return _CARDS[name]
    if cloud in _CARD_CLOUDS and "sxm" not in result and "nvlink" not in result:
        return _CARDS[name]
    return name


def _matches(table: tuple[tuple[str, re.Pattern[str]], ...], cloud: str, instance: str) -> bool:
    return any(cloud == known and pattern.match(instance) for known, pattern in table)


_MAKERS = ("nvidia", "amd", "instinct", "geforce", "tesla", "intel", "huawei", "aws", "google")


class CatalogError(YunluError, ValueError):
    """A device, cloud or file of the catalog is not what was asked for."""

    code = "catalog"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Devices and what they can be had for."""

    devices: tuple[DeviceModel, ...]
    every_offer: tuple[Offer, ...]
    _by_name: dict[str, DeviceModel] = field(init=False, repr=False, compare=False)
    _by_words: dict[frozenset[str], DeviceModel] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Later devices win: the user's own come last.
        names = {plain(name): device for device in self.devices for name in device.names}
        names |= {plain(device.name): device for device in self.devices}
        object.__setattr__(self, "_by_name", names)
        by_words = {_words(name): device for device in self.devices for name in device.names}
        object.__setattr__(self, "_by_words", by_words)

    def device(self, name: str, *, field: str = "gpu") -> DeviceModel:
        """The device of that name or alias; case, signs and the order of words do not matter."""
        result = self._find(name)
        if result is None:
            known = [device.name for device in self.devices]
            raise CatalogError(
                f"{field}: there is no device {name!r}; {did_you_mean(name.upper(), known)}",
                hint="yunlu catalog --devices lists them; yunlu catalog add FILE adds one",
            )
        return result

    def has_device(self, name: str) -> bool:
        """Whether that name or alias is known."""
        return self._find(name) is not None

    def offers(
        self,
        *,
        gpu: str | Iterable[str] | None = None,
        cloud: str | Iterable[str] | None = None,
        region: str | None = None,
        spot: bool = False,
        max_price: float | None = None,
        priced: bool = False,
    ) -> list[Offer]:
        """Offers that fit, cheapest device-hour first; those without a price last.

        Args:
            gpu: Names of devices.
            cloud: Names of clouds.
            region: A region, or how it begins (``us-``).
            spot: Only what can be had as spot; prices are then spot prices.
            max_price: Dollars per hour of the whole node, at most.
            priced: Leave out offers whose price is unknown.
        """
        devices = {self.device(name).name for name in _each(gpu)}
        clouds = {self._cloud(name) for name in _each(cloud)}
        matching_offers = [
            offer
            for offer in self.every_offer
            if (not devices or offer.device in devices)
            and (not clouds or offer.cloud in clouds)
            and _fits(offer, spot=spot, max_price=max_price, priced=priced)
        ]
        if region is not None:
            matching_offers = self._in_region(matching_offers, region)
        return sorted(matching_offers, key=lambda offer: _rank(offer, spot=spot))

    def find_offer(self, key: str) -> Offer:
        """The cheapest offer called ``cloud:instance``, or ``cloud:instance@region``."""
        name, _, region = key.partition("@")
        cloud, _, instance = name.partition(":")
        if not instance:
            raise CatalogError(
                f"{key!r} does not name an offer.", hint="write cloud:instance, as aws:p4d.24xlarge"
            )
        cloud = self._cloud(cloud)
        offers = [offer for offer in self.every_offer if offer.cloud == cloud]
        matching_offers = [offer for offer in offers if offer.instance.lower() == instance.lower()]
        if not matching_offers:
            known = {offer.instance for offer in offers}
            raise CatalogError(f"{cloud} has no {instance!r}; {did_you_mean(instance, known)}")
        if region:
            matching_offers = self._in_region(matching_offers, region)
        return min(matching_offers, key=lambda offer: _rank(offer, spot=False))

    @property
    def clouds(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(sorted({offer.cloud for offer in self.every_offer}))

    def network_bytes_per_s(self, offer: Offer) -> float:
        """What one device of the offer sends to other nodes, in one direction."""
        if offer.network_bytes_per_s is not None:
            return offer.network_bytes_per_s / offer.devices
        return self.device(offer.device).network_bytes_per_s

    def linked_devices(self, offer: Offer) -> int:
        """How many devices the fast link joins when several such nodes are had."""
        device = self.device(offer.device)
        return max(offer.devices, device.fabric_devices) if device.leaves_node else offer.devices

    def _find(self, name: str) -> DeviceModel | None:
        # What stands in brackets is the machine it was in: Ascend-910B(Atlas 800T A2).
        bare, _, _ = name.partition("(")
        result = self._by_name.get(plain(name)) or self._by_name.get(plain(bare))
        return result or self._by_words.get(_words(bare))

    def _cloud(self, name: str) -> str:
        wanted = name.lower()
        if wanted not in self.clouds:
            raise CatalogError(
                f"cloud: there is no {name!r}; {did_you_mean(wanted, self.clouds)}",
                hint="yunlu catalog update DIR brings in others",
            )
        return wanted

    def _in_region(self, offers: list[Offer], region: str) -> list[Offer]:
        wanted = region.lower()
        result = [retained for offer in offers for retained in _within(offer, wanted)]
        if offers and not result:
            known = {_quoted(name) for offer in offers for name in offer.regions}
            raise CatalogError(f"region: nothing fits in {region!r}; {did_you_mean(wanted, known)}")
        return result


def load_catalog(extra_dirs: Iterable[Path] = (), *, leave_out: str = "") -> Catalog:
    """What ships with Yunlu, and what stands in the given directories (``jobs.catalog_store``)."""
    devices, offers = _shipped()
    for directory in extra_dirs:
        for path in directory.glob("*.csv"):
            check_regular(path)  # a home may hold what somebody else put there
        if (directory / "devices.csv").exists():
            own = _read_devices(directory)
            names = {device.name for device in own}
            devices = (*(device for device in devices if device.name not in names), *own)
        names = {device.name for device in devices}
        for path in sorted(directory.glob("offers-*.csv")):
            if path.name != leave_out:
                more = read_offers(path.read_text("utf-8"))
                # A device may have been removed since its offers were written.
                more = [offer for offer in more if offer.device in names]
                offers = _overlay(offers, more, path.name)
    return Catalog(devices=devices, every_offer=offers)


CLOUD_TABLE = "offers-cloud-"
"""A whole cloud, as imported, in one file of this beginning: it replaces what shipped of it."""


def _overlay(offers: tuple[Offer, ...], more: list[Offer], name: str) -> tuple[Offer, ...]:
    if name.startswith(CLOUD_TABLE):
        clouds = {offer.cloud for offer in more}
        return (*(offer for offer in offers if offer.cloud not in clouds), *more)
    keys = {(offer.cloud, offer.instance) for offer in more}
    return (*(offer for offer in offers if (offer.cloud, offer.instance) not in keys), *more)


def plain(name: str) -> str:
    """A name as it is compared: makers' names and signs between words do not matter."""
    letters = "".join(letter for letter in name.lower() if letter.isalnum())
    for maker in _MAKERS:
        letters = letters.removeprefix(maker)
    return letters


def _words(name: str) -> frozenset[str]:
    """Those that tell devices apart, in any order: the socket and the kind of memory do not."""
    parts = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset(
        word for word in parts if word not in _MAKERS and not re.fullmatch(r"sxm\d?|hbm\w*", word)
    )


@lru_cache(maxsize=1)
def _shipped() -> tuple[tuple[DeviceModel, ...], tuple[Offer, ...]]:
    data = files("yunlu.hardware") / "data"
    return tuple(_read_devices(data)), tuple(read_offers((data / "offers.csv").read_text("utf-8")))


def _read_devices(folder: Traversable) -> list[DeviceModel]:
    return read_devices(_rows(folder / "devices.csv"), _rows(folder / "sources.csv"))


def _rows(file: Traversable) -> Iterator[dict[str, str]]:
    return csv.DictReader(io.StringIO(file.read_text("utf-8")))


def _each(names: str | Iterable[str] | None) -> list[str]:
    if names is None:
        return []
    return names.split(",") if isinstance(names, str) else list(names)


def _fits(offer: Offer, *, spot: bool, max_price: float | None, priced: bool) -> bool:
    price = offer.price(spot=spot)
    if price is None:
        return not (spot or priced or max_price is not None)
    return max_price is None or price <= max_price


def _rank(offer: Offer, *, spot: bool) -> tuple[float, str, int, str]:
    price = offer.price_per_device(spot=spot)
    ranked = float("inf") if price is None else round(price, 6)
    return (ranked, offer.cloud, offer.devices, offer.instance)


def _within(offer: Offer, region: str) -> list[Offer]:
    retained = tuple(name for name in offer.regions if name.lower().startswith(region))
    return [offer._replace(regions=retained)] if retained else []


def _quoted(name: str) -> str:
    """A name that stays one in a list."""
    return repr(name) if "," in name else name
