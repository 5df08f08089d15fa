"""Catalog: all known devices and offers, shipped and added by the user."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError, did_you_mean
from yunlu.core.regular_files import check_regular
from yunlu.hardware.device import DeviceModel, read_devices
from yunlu.hardware.offer import read_offers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from yunlu.hardware.offer import Offer


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
