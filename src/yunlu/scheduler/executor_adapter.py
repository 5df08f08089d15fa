"""Executor adapter: observe, start, resize and stop runs for the scheduler."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import psutil

from yunlu.core.errors import StoreError
from yunlu.core.processes import start_time
from yunlu.executors.executor import LeaseState
from yunlu.executors.lease_executor import read_record as read_leases
from yunlu.executors.registry import is_elsewhere
from yunlu.executors.worker_process import (
    WorkerProcess,
    record_worker,
    recorded_worker,
    worker_lock_is_free,
)
from yunlu.jobs import lifecycle
from yunlu.jobs.run import detect_lost, error_of, new_record
from yunlu.runs.run_store import Area, not_a_run
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import read_worker_group
from yunlu.scheduler.run_status import RunObservation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.executors.executor import Executor, RunStatus
    from yunlu.hardware.fleet import Node, Placement
    from yunlu.jobs.run_record import RunRecord
    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.allocation_record import Shares


class RunControl(Protocol):
    """Operations on runs that the scheduler needs."""

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are available now."""
        ...

    def observe(self, run: RunStore) -> RunObservation:
        """Observe a run."""
        ...

    def start(self, run: RunStore, placement: Placement) -> None:
        """Start a pending run, or resume one that is not active."""
        ...

    def resize(self, run: RunStore, placement: Placement) -> bool:
        """Ask a run to continue on other devices; False if that needs a restart."""
        ...

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        """Ask a run to save and stop, or kill it at once; does not wait."""
        ...

    def find_strays(self, runs: Sequence[RunStore]) -> None:
        """Record worker processes of these runs that their starter could not record."""
        ...


_DISTRUST_S = 60.0


class NotNowError(StoreError):
    """The run does not accept requests at this moment; retry later."""


class ExecutorAdapter:
    """Controls runs through one executor."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._node = ""
        self._records: dict[str, RunRecord] = {}
        self._codes: dict[str, tuple[int, str | None]] = {}
        self._lost: dict[tuple[str, str], tuple[str, float]] = {}
        """By run and lease: the node that was lost, and when on the monotonic clock."""

    def nodes(self) -> tuple[Node, ...]:
        """Nodes of the executor, without those lost a moment ago, even if they are still listed."""
        result = self.executor.nodes()
        self._node = result[0].name if result else ""
        now = time.monotonic()
        lost = {name for name, at in self._lost.values() if now - at < _DISTRUST_S}
        return tuple(replace(n, is_leaving=True) if n.name in lost else n for n in result)

    def observe(self, run: RunStore) -> RunObservation:
        """Observe a run: its own log, and its leases as the executor reports them."""
        before = self._records.get(run.id) or new_record(run)
        if before is None:
            raise not_a_run(run)
        record = detect_lost(run, before)
        self._records[run.id] = record
        liveness = self._find_liveness(run)
        is_alive = liveness.is_alive
        recorded = recorded_worker(run)
        has_begun = is_alive or (recorded is not None and recorded.detached)
        usable, is_ready = _group_of(run) if is_alive else (None, False)
        return RunObservation(
            state=record.state,
            is_alive=is_alive,
            has_begun=has_begun,
            devices=liveness.devices,
            shares=liveness.shares,
            lost_nodes=liveness.lost_nodes,
            is_settled=liveness.is_settled,
            waits_for=liveness.waits_for,
            usable=usable,
            is_resizable=is_ready and record.state is RunState.RUNNING,
            node=self._node,
            step=record.step or 0,
            steps=record.steps,
            error=record.error,
            error_code=self._error_code(run, record),
        )

    def start(self, run: RunStore, placement: Placement) -> None:
        """Elastic runs start under a supervisor even on one device, so that they can grow."""
        if lifecycle.read_record(run).state is RunState.PENDING:
            lifecycle.start(run, on=self.executor, placement=placement)
        else:
            lifecycle.resume(run, on=self.executor, placement=placement)

    def resize(self, run: RunStore, placement: Placement) -> bool:
        """Resize through the executor; no step is lost."""
        resized = lifecycle.change_placement(run, placement)
        if resized.how == "later":
            raise NotNowError(resized.text)
        return resized.how == "live"

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        """Stop through the lifecycle of the run."""
        record = lifecycle.request_stop(run, now=now)
        if record.state.can_resume and is_elsewhere(run):
            # Not active, but its cluster would start it again: a preempted lease is requeued there.
            self.executor.stop(run, now=now)

    def find_strays(self, runs: Sequence[RunStore]) -> None:
        """Find a local process whose starter died before it could record it.

        What a cluster was asked for it knows itself, by name.
        """
        wanted = {run.address: run for run in runs if not is_elsewhere(run)}
        if not wanted:
            return
        for process in psutil.process_iter():
            try:
                result = wanted.keys() & {*process.cmdline()}
                if not result or os.getsid(process.pid) != process.pid:
                    continue
                started_at = start_time(process.pid)
            except (psutil.Error, OSError):
                continue
            for path in result:
                record_worker(
                    wanted[path],
                    WorkerProcess(
                        pid=process.pid,
                        process_started_at=started_at,
                        host=socket.gethostname(),
                        detached=True,
                    ),
                )

    def _find_liveness(self, run: RunStore) -> _Liveness:
        if read_leases(run) is None:  # never with an executor, or started by hand
            worker = recorded_worker(run)
            by_hand = worker is not None and worker.detached and worker.is_alive()
            if not by_hand and worker_lock_is_free(run):
                return _Liveness(is_alive=False)
            group = read_worker_group(run)
            return _Liveness(is_alive=True, devices=group.target if group is not None else 1)
        status = self.executor.status(run)
        lost = self._note_losses(run, status)
        if not status.is_alive:
            return _Liveness(is_alive=False, lost_nodes=lost)
        # A departing worker uses a device until its step ends; a joining one uses it already.
        if is_elsewhere(run):
            shares = _taken(status)
            return _Liveness(
                is_alive=True,
                devices=sum(count for _, count in shares),
                shares=shares,
                is_settled=_is_settled(status),
                waits_for=(status.reason or "it was just asked for") if status.is_waiting else "",
            )
        held = status.held.devices
        return _Liveness(
            is_alive=True,
            devices=max(held, status.wanted.devices, status.workers),
            is_settled=status.workers == held == status.wanted.devices,
        )

    def _note_losses(self, run: RunStore, status: RunStatus) -> tuple[str, ...]:
        """Nodes that the run lost a moment ago."""
        lost = {
            one_lease.lease.name: one_lease.node or one_lease.lease.node
            for one_lease in status.leases
            if one_lease.has_lost_node
        }
        now, recent = time.monotonic(), list[str]()
        for lease, node in lost.items():
            _, at = self._lost.setdefault((run.id, lease), (node, now))
            recent += [node] * (now - at < _DISTRUST_S)
        return tuple(recent)

    def _error_code(self, run: RunStore, record: RunRecord) -> str | None:
        if record.state is not RunState.FAILED:
            return None
        known = self._codes.get(run.id)
        if known is None or known[0] != record.offset:
            error = error_of(event for event, _ in run.read_events())
            known = (record.offset, error.code if error is not None else None)
            self._codes[run.id] = known
        return known[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Liveness:
    """Whether any process works on a run, and the devices it uses: 0 where unknown."""

    is_alive: bool
    devices: int = 0
    shares: Shares = ()
    lost_nodes: tuple[str, ...] = ()
    is_settled: bool = False
    waits_for: str = ""


def _taken(status: RunStatus) -> Shares:
    """Devices on each node that a run has or will have; the coordinator's node first."""
    taken: dict[str, int] = {}
    for lease in sorted(status.leases, key=lambda item: not item.lease.is_lead):
        if lease.lease.is_wanted and lease.state is not LeaseState.GONE:
            taken[lease.lease.node] = taken.get(lease.lease.node, 0) + lease.lease.devices
    for name, count in status.held.shares:
        taken[name] = max(count, taken.get(name, 0))
    return tuple(taken.items())


def _is_settled(status: RunStatus) -> bool:
    steady = {LeaseState.RUNNING, LeaseState.GONE}
    return all(lease.state in steady for lease in status.leases)


def _group_of(run: RunStore) -> tuple[int | None, bool]:
    """The most workers it can use, and whether it accepts a resize."""
    if run.has(Area.SERVERS):
        return None, True
    group = read_worker_group(run)
    if group is None or not group.layouts:
        return None, False
    return max(group.layouts), group.generation > 0
