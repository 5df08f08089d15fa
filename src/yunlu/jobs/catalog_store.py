"""Catalog additions of the user, in ``catalog/`` of the home directory.

``own.json`` holds what was added as it was written; the tables beside it are made from it, so that
a plan reads them without checking anything again. ``offers-cloud-NAME.csv`` is an imported cloud.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from yunlu.core.errors import did_you_mean
from yunlu.core.files import make_directory, open_lock, read_regular, write_atomically
from yunlu.core.limits import decode_json
from yunlu.hardware.catalog import (
    CLOUD_TABLE,
    HERE,
    MIB,
    OWN_CLOUD,
    PRECISIONS,
    Catalog,
    CatalogError,
    load_catalog,
    plain,
    write_offers,
)
from yunlu.hardware.entries import Additions, MachineEntry, offers_of, read_additions
from yunlu.hardware.skypilot import Imported, check_columns, read_skypilot
from yunlu.runs.home import private_home

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from yunlu.hardware.catalog import DeviceModel

_RESERVED = {OWN_CLOUD: "your own machines are", HERE: "this machine is"}
"""Clouds that no prices can be imported for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One file of an import and its result."""

    path: Path
    cloud: str
    imported: Imported


def home() -> Path:
    """Directory of the user's catalog."""
    return private_home() / "catalog"


def open_catalog() -> Catalog:
    """The whole catalog: shipped, imported and added."""
    index = home()
    return load_catalog((index,) if index.is_dir() else ())


def read_added() -> Additions:
    """Entries added by hand."""
    path = home() / "own.json"
    if not path.exists():
        return Additions()
    return read_additions(decode_json(read_regular(path)), where=str(path))


def read_file(path: Path) -> Additions:
    """Read a user's YAML file."""
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CatalogError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise CatalogError(
            f"{path} is a directory, not a file with devices, prices or machines.",
            hint="yunlu catalog update DIR imports SkyPilot's tables",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise CatalogError(f"{path} is not YAML: {error}") from error
    return read_additions(data, where=str(path))


def add(path: Path) -> Additions:
    """Add a file's devices, prices and machines to the catalog; all or none."""
    more = read_file(path)
    if not more.names:
        raise CatalogError(f"{path} has no devices, prices or machines: nothing to add.")
    with _locked():
        _write_added(read_added().merge(more))
    return more


def remove(name: str) -> str:
    """Remove one added entry, or an imported cloud. Returns what it was."""
    with _locked():
        added = read_added()
        left = added.without(name)
        if left != added:
            _check_needed(added, left)
            _write_added(left)
            return name
        if name.lower() in imported_clouds():
            (home() / f"{CLOUD_TABLE}{name.lower()}.csv").unlink()
            _write_added(added)
            return f"the imported prices of {name.lower()}"
    known = [*added.names, *imported_clouds()]
    raise CatalogError(
        f"{name!r} was never added; " + (did_you_mean(name, known) if known else "nothing was"),
        hint=None if known else "yunlu catalog add FILE adds devices, prices and machines",
    )


def imported_clouds() -> tuple[str, ...]:
    """Clouds whose tables were imported."""
    paths = sorted(home().glob(f"{CLOUD_TABLE}*.csv"))
    return tuple(path.stem.removeprefix(CLOUD_TABLE) for path in paths)


def update(path: Path, *, cloud: str | None = None) -> list[Table]:
    """Import a SkyPilot catalog: one ``vms.csv``, or a tree of ``CLOUD/vms.csv``; all or none."""
    catalog = load_catalog((home(),) if home().is_dir() else ())
    files = _find_tables(path)
    if cloud is not None and len(files) > 1:
        raise CatalogError(
            f"--cloud names one cloud, and {path} holds the tables of {len(files)}.",
            hint="name one vms.csv, or leave out --cloud",
        )
    tables = [_read_table(file, cloud, catalog) for file in files]
    useful = [table for table in tables if table.imported.offers]
    if not useful:
        raise _nothing_useful(path, tables)
    with _locked() as index:
        for table in useful:
            text = write_offers(table.imported.offers)
            write_atomically(index / f"{CLOUD_TABLE}{table.cloud}.csv", text)
        _write_added(read_added())  # prices set by hand override imported ones
    return tables


def find_machine(name: str) -> MachineEntry:
    """A machine that was added."""
    machines = {entry.name: entry for entry in read_added().machines}
    wanted = name.removeprefix(f"{OWN_CLOUD}:")
    if wanted not in machines:
        raise CatalogError(
            f"There is neither a file nor a machine {name!r}; {did_you_mean(wanted, machines)}"
            if machines
            else f"There is neither a file nor a machine {name!r}; none was added",
            hint="yunlu catalog add FILE adds machines",
        )
    return machines[wanted]


def _find_tables(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CatalogError(f"There is no file or directory {path}.")
    result = sorted(path.rglob("vms.csv"))
    if not result:
        raise CatalogError(
            f"{path} holds no vms.csv.", hint="name the directory of a version: catalogs/v8"
        )
    clouds = [file.parent.name.lower() for file in result]
    if twice := sorted({name for name in clouds if clouds.count(name) > 1}):
        raise CatalogError(
            f"{path} holds several tables of {', '.join(twice)}.",
            hint="name the directory of one version: catalogs/v8",
        )
    return result


def _read_table(path: Path, cloud: str | None, catalog: Catalog) -> Table:
    name = _cloud_of(path) if cloud is None else _check_cloud(cloud)
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path} cannot be read: {error}") from error
    rows = csv.DictReader(io.StringIO(text))
    check_columns(rows.fieldnames or (), where=str(path))
    try:
        imported = read_skypilot(rows, cloud=name, catalog=catalog, source=f"imported: {path.name}")
    except csv.Error as error:
        raise CatalogError(f"{path}, line {rows.line_num}: {error}") from error
    return Table(path=path, cloud=name, imported=imported)


def _cloud_of(path: Path) -> str:
    name = path.absolute().parent.name if path.stem == "vms" else path.stem
    if not _is_name(name) or name.lower() in _RESERVED:
        raise CatalogError(f"{path} does not tell whose prices it holds.", hint="add --cloud NAME")
    return name.lower()


def _check_cloud(name: str) -> str:
    if not _is_name(name):
        raise CatalogError(f"--cloud: {name!r} is no name; letters, digits, - and _ make one.")
    if name.lower() in _RESERVED:
        raise CatalogError(
            f"--cloud: {name!r} is what {_RESERVED[name.lower()]} called; take another name."
        )
    return name.lower()


def _is_name(text: str) -> bool:
    return text.replace("-", "").replace("_", "").isalnum()


def _nothing_useful(path: Path, tables: list[Table]) -> CatalogError:
    """Reason: a table of other devices is reported differently from one of bad numbers."""
    skipped = sum((table.imported.skipped for table in tables), Counter[str]())
    rows = sum(table.imported.rows for table in tables)
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    why = f"{rows:,} rows, left out: {reasons}" if reasons else "it has no rows"
    return CatalogError(
        f"{path} has no offer to take in ({why}); nothing was changed.",
        hint="yunlu catalog --devices lists the devices that are known",
    )


@contextmanager
def _locked() -> Generator[Path]:
    """Lock: one writer at a time, so that no entry is lost."""
    index = home()
    try:
        make_directory(index)
    except OSError as error:
        raise CatalogError(f"{index} cannot be made: {error.strerror}") from error
    with open_lock(index / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield index


def _write_added(added: Additions) -> None:
    index = home()
    devices = [entry.to_device() for entry in added.devices]
    # Prices override the entries below them, never themselves.
    below = load_catalog((index,), leave_out="offers-own.csv").every_offer
    known = Catalog(devices=(*load_catalog().devices, *devices), every_offer=below)
    offers = list(offers_of(added, known))
    if orphan := next((offer for offer in below if not known.has_device(offer.device)), None):
        raise CatalogError(
            f"{orphan.key} needs the device {orphan.device}, which would be gone.",
            hint=f"yunlu catalog remove {orphan.cloud} first",
        )
    write_atomically(index / "sources.csv", _sources_table(devices))
    write_atomically(index / "devices.csv", _devices_table(devices))
    write_atomically(index / "offers-own.csv", write_offers(offers))
    text = json.dumps(
        added.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False
    )
    write_atomically(index / "own.json", text)


def _check_needed(added: Additions, left: Additions) -> None:
    """A device that other entries of the user refer to must stay."""
    gone = {
        plain(word) for e in added.devices if e not in left.devices for word in (e.name, *e.aliases)
    }
    users = [(entry.offer, entry.device) for entry in left.prices]
    users += [(f"{OWN_CLOUD}:{entry.name}", entry.device) for entry in left.machines]
    for name, device in users:
        if device and plain(device) in gone and not load_catalog().has_device(device):
            raise CatalogError(
                f"{device} is what {name} has: it cannot be removed before it.",
                hint=f"yunlu catalog remove {name}",
            )


def _devices_table(devices: list[DeviceModel]) -> str:
    head = ("name", "kind", "memory_mib", "memory_gb_per_s")
    rates = tuple(f"{precision}_tflops" for precision in PRECISIONS)
    tail = ("link_gb_per_s", "node_devices", "fabric_devices", "network_gb_per_s", "reachable")
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*head, *rates, *tail, "aliases"))
    for device in devices:
        peaks = [device.peak_flops.get(precision) for precision in PRECISIONS]
        writer.writerow(
            (
                device.name,
                device.kind,
                device.memory_bytes // MIB,
                device.memory_bytes_per_s / 1e9,
                *("" if peak is None else peak / 1e12 for peak in peaks),
                device.link_bytes_per_s / 1e9,
                device.node_devices,
                device.fabric_devices,
                device.network_bytes_per_s / 1e9,
                "" if device.reachable is None else device.reachable,
                "|".join(device.aliases),
            )
        )
    return file.getvalue()


def _sources_table(devices: list[DeviceModel]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("device", "field", "source"))
    writer.writerows(
        (device.name, field, source)
        for device in devices
        for field, source in device.sources.items()
    )
    return file.getvalue()
