"""Lease record of a run: its leases and their events.

Written before anything is started, so that nothing is started which nobody knows of.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.private_files import open_descriptor
from yunlu.core.secrets import mask_value
from yunlu.core.value import Value
from yunlu.hardware.fleet import Placement
from yunlu.runs.run_store import Claim, Document, Log

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator
    from pathlib import Path

    from yunlu.runs.run_store import RunStore


class Lease(Value):
    """Some devices of one node, held for one run."""

    name: str
    """Unique among all leases that the run ever had."""
    node: str
    devices: int
    is_lead: bool = False
    """It supervises the run; the others join it."""
    is_wanted: bool = True
    """Once False, its processes leave at the next step boundary."""
    unwanted_at: float | None = None
    slots: tuple[int, ...] = ()
    """Device indices on the node, where we choose them."""
    handle: str = ""
    """Name in the cluster; empty until known."""
    state: str = ""
    """Last observed ``LeaseState``."""
    reason: str = ""


class LeaseRecord(Value):
    """Leases of a run: those of this attempt and what is left of earlier ones."""

    address: str
    """Address of its executor."""
    leases: tuple[Lease, ...] = ()
    next_lease: int = 0
    directory: str | None = None
    is_ending: bool = False
    """The run was asked to stop: no lease may resume it."""

    def find(self, name: str) -> Lease | None:
        """The lease of this name."""
        return next((lease for lease in self.leases if lease.name == name), None)

    @property
    def wanted(self) -> tuple[Lease, ...]:
        """Leases to keep, the lead first."""
        matching_leases = [lease for lease in self.leases if lease.is_wanted]
        return tuple(sorted(matching_leases, key=lambda lease: not lease.is_lead))

    @property
    def placement(self) -> Placement:
        """Their placement, the lead's node first."""
        shares: dict[str, int] = {}
        for lease in self.wanted:
            shares[lease.node] = shares.get(lease.node, 0) + lease.devices
        return Placement(tuple(shares.items()))

    def grant(
        self, node: str, devices: int, *, is_lead: bool = False, slots: tuple[int, ...] = ()
    ) -> tuple[LeaseRecord, Lease]:
        """The record with one more lease, and that lease."""
        name = f"{node}.{self.next_lease}"
        lease = Lease(name=name, node=node, devices=devices, is_lead=is_lead, slots=slots)
        changes = {"leases": (*self.leases, lease), "next_lease": self.next_lease + 1}
        return self.model_copy(update=changes), lease

    def without(self, names: Collection[str]) -> LeaseRecord:
        """The record without these leases."""
        left = tuple(lease for lease in self.leases if lease.name not in names)
        return self.model_copy(update={"leases": left})

    def change(self, name: str, **changes: object) -> LeaseRecord:
        """The record with one lease changed."""
        leases = tuple(
            lease.model_copy(update=changes) if lease.name == name else lease
            for lease in self.leases
        )
        return self.model_copy(update={"leases": leases})


class LeaseEvent(Value):
    """One event of a lease."""

    at: float
    """Seconds since the epoch."""
    lease: str
    node: str
    what: str
    """By the executor: ``asked``, ``unwanted``, ``waiting``, ``running``, ``leaving``, ``gone``. By its
    own program: ``began``, ``noticed`` (the cluster asks it to go), ``ended``."""
    reason: str = ""


def read_record(run: RunStore) -> LeaseRecord | None:
    """The record; None if the run has no executor."""
    try:
        content = run.read(Document.LEASES)
        return None if content is None else LeaseRecord.model_validate_json(content)
    except (OSError, ValueError):
        return None


def known_record(run: RunStore) -> LeaseRecord:
    """The record; an error if the run has no executor."""
    record = read_record(run)
    if record is None:
        raise StoreError(
            f"{run.address} is with no executor: it has no {Document.LEASES}",
            hint="only a run that was started on one has leases",
        )
    return record


def write_record(run: RunStore, record: LeaseRecord) -> None:
    """Write the record; on disk before this returns."""
    run.write(Document.LEASES, record.model_dump_json(indent=1))


def append_lease_event(run: RunStore, lease: Lease, what: str, reason: str = "") -> None:
    """Append one event."""
    result = LeaseEvent(at=time.time(), lease=lease.name, node=lease.node, what=what, reason=reason)
    run.append(Log.LEASE_EVENTS, [mask_value(result.model_dump())])


def read_lease_events(run: RunStore, *, offset: int = 0) -> Iterator[tuple[LeaseEvent, int]]:
    """Events from a byte offset on, each with the offset after it."""
    for result, after in run.read_log(Log.LEASE_EVENTS, offset=offset):
        yield LeaseEvent.model_validate(result), after


@contextmanager
def record_lock(run: RunStore) -> Generator[None]:
    """Lock of the record."""
    if not run.has(""):
        raise StoreError(f"there is no run in {run.address}")
    with run.claim(Claim.LEASES, wait=True):
        yield


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Lock a file, waiting for it; released by the system if the process dies."""
    descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
