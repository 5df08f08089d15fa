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
from yunlu.core.files import open_regular
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
    """Once it is not, its processes leave at the next step boundary."""
    unwanted_at: float | None = None
    slots: tuple[int, ...] = ()
    """Which devices of the node, where that is for us to say."""
    handle: str = ""
    """What the cluster calls it; empty until that is known."""
    state: str = ""
    """As it was last seen (a ``LeaseState``)."""
    reason: str = ""


class LeaseRecord(Value):
    """The leases of a run, in this life and what is left of those before."""

    address: str
    """Which executor it is with."""
    leases: tuple[Lease, ...] = ()
    next_lease: int = 0
    directory: str | None = None
    is_ending: bool = False
    """The run was asked to stop: no lease may wake it again."""

    def find(self, name: str) -> Lease | None:
        """The lease of this name."""
        return next((lease for lease in self.leases if lease.name == name), None)

    @property
    def wanted(self) -> tuple[Lease, ...]:
        """Leases that are to last, the lead first."""
        matching_leases = [lease for lease in self.leases if lease.is_wanted]
        return tuple(sorted(matching_leases, key=lambda lease: not lease.is_lead))

    @property
    def placement(self) -> Placement:
        """Where they are, the lead's node first."""
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
        """The record after these leases are forgotten."""
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
    """One thing that happened to a lease."""

    at: float
    """Seconds since the epoch."""
    lease: str
    node: str
    what: str
    """By the executor: ``asked``, ``unwanted``, ``waiting``, ``running``, ``leaving``, ``gone``. By its
    own program: ``began``, ``noticed`` (the cluster asks it to go), ``ended``."""
    reason: str = ""


def read_record(run: RunStore) -> LeaseRecord | None:
    """What is known; none where the run is with no executor."""
    try:
        content = run.read(Document.LEASES)
        return None if content is None else LeaseRecord.model_validate_json(content)
    except (OSError, ValueError):
        return None


def known_record(run: RunStore) -> LeaseRecord:
    """What is known; refused where the run is with no executor."""
    record = read_record(run)
    if record is None:
        raise StoreError(
            f"{run.address} is with no executor: it has no {Document.LEASES}",
            hint="only a run that was started on one has leases",
        )
    return record


def write_record(run: RunStore, record: LeaseRecord) -> None:
    """Publish what is known, on disk before this returns."""
    run.write(Document.LEASES, record.model_dump_json(indent=1))


def append_lease_event(run: RunStore, lease: Lease, what: str, reason: str = "") -> None:
    """Add one happening."""
    result = LeaseEvent(at=time.time(), lease=lease.name, node=lease.node, what=what, reason=reason)
    run.append(Log.LEASE_EVENTS, [result.model_dump()])


def read_lease_events(run: RunStore, *, offset: int = 0) -> Iterator[tuple[LeaseEvent, int]]:
    """What happened, from a byte offset on, each with the offset after it."""
    for result, after in run.read_log(Log.LEASE_EVENTS, offset=offset):
        yield LeaseEvent.model_validate(result), after


@contextmanager
def record_lock(run: RunStore) -> Generator[None]:
    """Hold the right to change the record."""
    if not run.has(""):
        raise StoreError(f"there is no run in {run.address}")
    with run.claim(Claim.LEASES, wait=True):
        yield


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a file's lock, waiting for it; the system frees it if we die."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
