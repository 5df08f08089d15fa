"""Base of cluster executors: leases kept in step with a placement, and their record.

Lease record of a run: its leases and their events.
Written before anything is started, so that nothing is started which nobody knows of.
"""

from __future__ import annotations

import fcntl
import os
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.files import open_descriptor
from yunlu.core.secrets import mask_value
from yunlu.core.value import Value
from yunlu.executors.executor import (
    Capabilities,
    ExecutorError,
    LeaseState,
    LeaseStatus,
    ResizeResult,
    RunStatus,
)
from yunlu.executors.worker_process import is_asynchronous
from yunlu.hardware.fleet import Placement
from yunlu.runs.run_store import Claim, Document, Log, read_raw_job, text_logs
from yunlu.runs.worker_group import count_workers, read_worker_group

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

    from yunlu.hardware.fleet import Node
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


_LEAVE_S = 120.0
"""Seconds that a leaving lease has for its last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLeases:
    """A lease as the cluster reports it."""

    handle: str
    state: LeaseState
    reason: str = ""
    node: str = ""
    has_lost_node: bool = False
    """Whether it is gone because its node is."""


class LeasedExecutor(ABC):
    """An executor whose cluster can start a program, list what it started, and kill it.

    The program is ``python -m yunlu.executors.lease_runner RUN_DIR LEASE``: it supervises the run or
    joins it, and leaves when the record says that its lease is not wanted any more.
    """

    name: str
    address: str

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What may be expected of it."""

    @abstractmethod
    def nodes(self) -> tuple[Node, ...]:
        """Machines that are there now."""

    @abstractmethod
    def submit(self, run: RunStore, lease: Lease, *, directory: Path, lead: str | None) -> str:
        """Submit one lease; returns its handle. ``lead`` is the handle of the lead, if known."""

    @abstractmethod
    def observe_leases(self, run: RunStore, record: LeaseRecord) -> Mapping[str, ObservedLeases]:
        """Every lease of the run that the cluster knows, by name; also those not in the record."""

    @abstractmethod
    def cancel(self, handles: Sequence[str]) -> None:
        """Kill these at once, waiting or running."""

    @abstractmethod
    def notify(self, handles: Sequence[str]) -> None:
        """Ask these to leave (SIGTERM), where that is faster than their own check of the record."""

    def start(self, run: RunStore, placement: Placement, *, directory: Path | None = None) -> None:
        """As ``Executor.start``."""
        if not placement:
            raise ExecutorError(f"{run.id} was given no devices to start on")
        with record_lock(run):
            before = read_record(run)
            if before is not None:
                self._end_all(run, before)
            record = LeaseRecord(
                address=self.address,
                next_lease=before.next_lease if before else 0,
                directory=str(directory) if directory else None,
            )
            granted: list[Lease] = []
            for index, (node, devices) in enumerate(placement.shares):
                record, lease = record.grant(node, devices, is_lead=index == 0)
                granted.append(lease)
            write_record(run, record)
            try:
                self._ask(run, record, granted)
            except BaseException:
                self._end_all(run, known_record(run))
                raise

    def resize(self, run: RunStore, placement: Placement) -> ResizeResult:
        """As ``Executor.resize``."""
        with record_lock(run):
            record, statuses, seen = self._observe_again(run)
            is_alive = any(status.state is not LeaseState.GONE for status in statuses)
            if record.is_ending or not is_alive or _is_headless(run, statuses):
                return ResizeResult(how="later", text=f"{run.id} is stopped, or just being")
            lead = next((lease for lease in record.wanted if lease.is_lead), None)
            wanted = dict(placement.shares)
            if lead is not None and wanted.get(lead.node, 0) < lead.devices:
                parts = f"it is led from {lead.node}, by a lease of {lead.devices}"
                return ResizeResult(
                    how="restart", text=f"{parts}, which cannot be taken from it live"
                )
            retained, ended = _match(record, wanted)
            held: dict[str, int] = {}
            for lease in retained:
                held[lease.node] = held.get(lease.node, 0) + lease.devices
            for lease in ended:
                record = record.change(lease.name, is_wanted=False, unwanted_at=time.time())
            granted: list[Lease] = []
            for node, devices in placement.shares:
                if more := devices - held.get(node, 0):
                    record, lease = record.grant(node, more)
                    granted.append(lease)
            write_record(run, record)
            for lease in ended:
                append_lease_event(run, lease, "unwanted")
            self._send_away(ended, seen)
            self._ask(run, record, granted)
        text = f"{placement.devices} devices as soon as they are there"
        return ResizeResult(how="live", text=text)

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        """As ``Executor.stop``."""
        with record_lock(run):
            record = known_record(run).model_copy(update={"is_ending": True})
            write_record(run, record)
            if now:
                self._end_all(run, record)
                return
            seen = self.observe_leases(run, record)
            waiting = [
                result.handle for result in seen.values() if result.state is LeaseState.WAITING
            ]
            if waiting:
                self.cancel(waiting)
            # The lead saves, ends the run and stops the others.
            self._send_away([lease for lease in record.wanted if lease.is_lead], seen)

    def status(self, run: RunStore) -> RunStatus:
        """As ``Executor.status``."""
        with record_lock(run):
            record, statuses, _ = self._observe_again(run)
        return _run_status(run, record, statuses)

    def observe(self, run: RunStore) -> RunStatus:
        """As ``Executor.observe``."""
        record = known_record(run)
        return _run_status(run, record, self._statuses(record, self.observe_leases(run, record)))

    def logs(self, run: RunStore) -> tuple[str, ...]:
        """As ``Executor.logs``."""
        known_record(run)
        return text_logs(run)

    def events(self, run: RunStore, *, offset: int = 0) -> Iterator[tuple[LeaseEvent, int]]:
        """As ``Executor.events``."""
        known_record(run)
        yield from read_lease_events(run, offset=offset)

    def _ask(self, run: RunStore, record: LeaseRecord, leases: Sequence[Lease]) -> None:
        """Submit leases that are in the record already; record their handles."""
        directory = Path(record.directory or run.address)
        for index, lease in enumerate(leases):
            lead = next(
                (one_lease.handle for one_lease in record.leases if one_lease.is_lead), None
            )
            try:
                handle = self.submit(run, lease, directory=directory, lead=lead or None)
            except BaseException:
                write_record(run, record.without({one_lease.name for one_lease in leases[index:]}))
                raise
            record = record.change(lease.name, handle=handle)
            write_record(run, record)
            append_lease_event(run, lease, "asked", reason=handle)

    def _observe_again(
        self, run: RunStore
    ) -> tuple[LeaseRecord, list[LeaseStatus], Mapping[str, ObservedLeases]]:
        """Update the record from the cluster; kill leases that are in neither."""
        record = known_record(run)
        seen = self.observe_leases(run, record)
        strangers = [
            result.handle
            for name, result in seen.items()
            if record.find(name) is None and result.state is not LeaseState.GONE
        ]
        # Unknown leases are of an earlier attempt, or their submitter was killed.
        statuses = self._statuses(record, seen)
        ended = strangers + _find_laggards(record, seen)
        if _is_headless(run, statuses):
            left = (seen.get(status.lease.name) for status in statuses)
            ended += [s.handle for s in left if s is not None and s.state is not LeaseState.GONE]
        if ended:
            self.cancel([*dict.fromkeys(ended)])
        return self._note(run, record, statuses, seen), statuses, seen

    def _send_away(self, leases: Sequence[Lease], seen: Mapping[str, ObservedLeases]) -> None:
        """Kill those that wait, notify those that run."""
        result = [seen[lease.name] for lease in leases if lease.name in seen]
        if waiting := [item.handle for item in result if item.state is LeaseState.WAITING]:
            self.cancel(waiting)
        if running := [item.handle for item in result if item.state is LeaseState.RUNNING]:
            self.notify(running)

    def _end_all(self, run: RunStore, record: LeaseRecord) -> None:
        seen = self.observe_leases(run, record)
        left = [result.handle for result in seen.values() if result.state is not LeaseState.GONE]
        if left:
            self.cancel(left)

    def _statuses(
        self, record: LeaseRecord, seen: Mapping[str, ObservedLeases]
    ) -> list[LeaseStatus]:
        return [self._status_of(lease, seen.get(lease.name)) for lease in record.leases]

    @staticmethod
    def _status_of(lease: Lease, seen: ObservedLeases | None) -> LeaseStatus:
        if seen is None:
            gone = lease.reason or "the cluster does not know it any more"
            reason = gone if lease.handle else "it was never started"
            return LeaseStatus(lease=lease, state=LeaseState.GONE, reason=reason, node=lease.node)
        state = seen.state
        if state is LeaseState.RUNNING and not lease.is_wanted:
            state = LeaseState.LEAVING
        return LeaseStatus(
            lease=lease,
            state=state,
            reason=seen.reason,
            node=seen.node,
            has_lost_node=seen.has_lost_node,
        )

    @staticmethod
    def _note(
        run: RunStore,
        record: LeaseRecord,
        statuses: Sequence[LeaseStatus],
        seen: Mapping[str, ObservedLeases],
    ) -> LeaseRecord:
        """Record changes since the last observation; drop leases that left as expected."""
        after = record
        for status in statuses:
            lease = status.lease
            if lease.state != status.state:
                append_lease_event(run, lease, status.state, status.reason)
            handle = seen[lease.name].handle if lease.name in seen else lease.handle
            after = after.change(
                lease.name, state=status.state, reason=status.reason, handle=handle
            )
        done = {
            status.lease.name
            for status in statuses
            if status.state is LeaseState.GONE and not status.lease.is_wanted
        }
        after = after.without(done)
        if after != record:
            write_record(run, after)
        return after


def _run_status(run: RunStore, record: LeaseRecord, statuses: Sequence[LeaseStatus]) -> RunStatus:
    group = read_worker_group(run)
    workers = count_workers(group) if group else 0
    is_alive = any(status.state is not LeaseState.GONE for status in statuses)
    return RunStatus(
        leases=tuple(statuses), wanted=record.placement, workers=workers if is_alive else 0
    )


def _is_headless(run: RunStore, statuses: Sequence[LeaseStatus]) -> bool:
    """Whether the remaining leases can only wait: servers of asynchronous workers have no successor."""
    alive = [status for status in statuses if status.state is not LeaseState.GONE]
    if not alive or any(item.lease.is_lead for item in alive):
        return False
    job = read_raw_job(run) or {}
    return is_asynchronous(run, (job.get("communication") or {}).get("method"))


def _find_laggards(record: LeaseRecord, seen: Mapping[str, ObservedLeases]) -> list[str]:
    """Leases that should have left long ago; a clock that was set back delays this.

    Who was sent away and waits need not be waited for: its node was lost, and the cluster queued it again.
    """
    now = time.time()
    matches: list[str] = []
    for lease in record.leases:
        item = seen.get(lease.name)
        is_late = now - (lease.unwanted_at or now) > _LEAVE_S
        is_over = record.is_ending or not lease.is_wanted
        is_idle = item is not None and item.state is LeaseState.WAITING and is_over
        if item is not None and item.state is not LeaseState.GONE and (is_late or is_idle):
            matches.append(item.handle)
    return matches


def _match(record: LeaseRecord, wanted: Mapping[str, int]) -> tuple[list[Lease], list[Lease]]:
    """Which leases stay and which leave, so that no node has more than wanted."""
    room = dict(wanted)
    retained: list[Lease] = []
    ended: list[Lease] = []
    order = sorted(record.wanted, key=lambda lease: (not lease.is_lead, -lease.devices))
    for lease in order:
        fits = lease.devices <= room.get(lease.node, 0) and lease.state != LeaseState.GONE
        if fits:
            room[lease.node] -= lease.devices
        (retained if fits else ended).append(lease)
    return retained, ended
