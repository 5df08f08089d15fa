"""The catalog and this machine."""
# ruff: noqa: PLC0415 (a verb imports only what it needs)

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.hardware.entries import Additions, MachineEntry
    from yunlu.hardware.listing import (
        DevicePage,
        ImportedTable,
        ListedDevice,
        ListedOffer,
        OfferedDevice,
        OwnershipPage,
    )
    from yunlu.jobs.doctor import MachineFindings
    from yunlu.jobs.machine_probe import ForgottenRuns, ProbeProgress, ProbeResult


class LocalMachine:
    """As ``MachineVerbs``."""

    def offers(
        self,
        *,
        gpu: str | None = None,
        cloud: str | None = None,
        region: str | None = None,
        spot: bool = False,
        max_price: float | None = None,
    ) -> tuple[ListedOffer, ...]:
        """As ``MachineVerbs.offers``."""
        from yunlu.hardware.listing import list_offers
        from yunlu.jobs.catalog_store import open_catalog

        return list_offers(
            open_catalog(), gpu=gpu, cloud=cloud, region=region, spot=spot, max_price=max_price
        )

    def offered_devices(self) -> tuple[OfferedDevice, ...]:
        """As ``MachineVerbs.offered_devices``."""
        from yunlu.hardware.listing import list_offered_devices
        from yunlu.jobs.catalog_store import open_catalog

        return list_offered_devices(open_catalog())

    def devices(self, *, gpu: str | None = None) -> tuple[ListedDevice, ...]:
        """As ``MachineVerbs.devices``."""
        from yunlu.hardware.listing import list_devices
        from yunlu.jobs.catalog_store import open_catalog

        return list_devices(open_catalog(), gpu)

    def device(self, name: str) -> DevicePage:
        """As ``MachineVerbs.device``."""
        from yunlu.hardware.listing import make_device_page
        from yunlu.jobs.catalog_store import open_catalog

        return make_device_page(open_catalog(), name)

    def update_catalog(
        self, source: Path, *, cloud: str | None = None
    ) -> tuple[ImportedTable, ...]:
        """As ``MachineVerbs.update_catalog``."""
        from yunlu.hardware.listing import ImportedTable
        from yunlu.jobs import catalog_store

        return tuple(
            ImportedTable(
                path=str(table.path),
                cloud=table.cloud,
                rows=table.imported.rows,
                offers=len(table.imported.offers),
                skipped=dict(table.imported.skipped.most_common()),
                home=str(catalog_store.home()),
            )
            for table in catalog_store.update(source, cloud=cloud)
        )

    def add_to_catalog(self, file: Path) -> Additions:
        """As ``MachineVerbs.add_to_catalog``."""
        from yunlu.jobs import catalog_store

        return catalog_store.add(file)

    def remove_from_catalog(self, names: Sequence[str]) -> tuple[str, ...]:
        """As ``MachineVerbs.remove_from_catalog``."""
        from yunlu.hardware.catalog import CatalogError
        from yunlu.jobs import catalog_store

        if not names:
            added = [*catalog_store.read_added().names, *catalog_store.imported_clouds()]
            listing = ", ".join(added) or "nothing was added yet"
            raise CatalogError(f"Say what to remove: {listing}.")
        return tuple(catalog_store.remove(name) for name in names)

    def compare_ownership(
        self, machine: str, *, against: str | None = None, spot: bool = False
    ) -> OwnershipPage:
        """As ``MachineVerbs.compare_ownership``."""
        from yunlu.hardware.listing import compare_ownership
        from yunlu.jobs.catalog_store import open_catalog

        catalog = open_catalog()
        return compare_ownership(catalog, _find_machine(machine), against=against, spot=spot)

    def doctor(self) -> MachineFindings:
        """As ``MachineVerbs.doctor``."""
        from yunlu.jobs.doctor import examine_machine

        return examine_machine()

    def probe(
        self,
        *,
        show: bool = False,
        afresh: bool = False,
        on_progress: Callable[[ProbeProgress], None] | None = None,
    ) -> ProbeResult:
        """As ``MachineVerbs.probe``."""
        from yunlu.jobs.machine_probe import probe_machine

        return probe_machine(show=show, afresh=afresh, on_progress=on_progress)

    def forget(self, *, all_: bool = False) -> ForgottenRuns:
        """As ``MachineVerbs.forget``."""
        from yunlu.jobs.machine_probe import forget_runs

        return forget_runs(all_=all_)


def _find_machine(text: str) -> MachineEntry:
    """The machine of a YAML file, or one that was added."""
    from yunlu.hardware.catalog import CatalogError
    from yunlu.jobs import catalog_store

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
