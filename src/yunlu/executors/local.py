"""Local executor: runs as processes of this machine. The default; needs no server."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.processes import describe_exit
from yunlu.executors import cpu_limits, memory_limits
from yunlu.executors.executor import (
    Capabilities,
    ExecutorError,
    LeaseState,
    LeaseStatus,
    ResizeResult,
    RunStatus,
)
from yunlu.executors.lease_executor import (
    Lease,
    LeaseEvent,
    LeaseRecord,
    append_lease_event,
    known_record,
    locked,
    read_lease_events,
    read_record,
    record_lock,
    write_record,
)
from yunlu.executors.lease_runner import lead_program
from yunlu.executors.registry import read_address
from yunlu.executors.worker_process import (
    WorkerProcess,
    kill_workers,
    recorded_worker,
    running_workers,
    start_worker,
    visible_devices,
    worker_lock_is_free,
)
from yunlu.hardware.accelerators import find_kind
from yunlu.hardware.fleet import Node
from yunlu.runs.home import find_runs
from yunlu.runs.run_store import Area, Document, read_raw_job, require_local, text_logs
from yunlu.runs.worker_group import count_workers, read_worker_group, send_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from yunlu.hardware.fleet import Placement
    from yunlu.runs.run_store import RunStore

_DEVICES_LOCK = ".devices.lock"


class LocalExecutor:
    """``local``, or ``local://?devices=4``: its GPUs, or equal shares of its CPU."""

    name = "local"

    def __init__(self, address: str = "local") -> None:
        _, options = read_address(address, ("devices", "type", "node"))
        self.address = address
        self._cores = len(os.sched_getaffinity(0))
        self._visible = visible_devices()
        self._gpus = len(self._visible)
        self._devices = _count(options.get("devices"), address) or self._gpus or self._cores
        if self._gpus and self._devices > self._gpus:
            raise ExecutorError(
                f"{address}: this machine has {self._gpus} accelerators, not {self._devices}",
                hint="say no more than there are; only processors can be shared",
            )
        self._type = options.get("type") or self._resource()
        self._node = options.get("node") or socket.gethostname()

    def _resource(self) -> str:
        kind = find_kind(self._visible.kind)
        return ("gpu" if kind is None else kind.resource) if self._gpus else "cpu"

    def capabilities(self) -> Capabilities:
        """As ``Executor.capabilities``."""
        # A process sees only the GPUs that it was started with.
        is_free = self._gpus == 0
        return Capabilities(
            resizes_live=is_free, moves_lead=is_free, limits=self._describe_limits()
        )

    def nodes(self) -> tuple[Node, ...]:
        """This machine."""
        return (Node(name=self._node, devices=self._devices, type=self._type),)

    def start(self, run: RunStore, placement: Placement, *, directory: Path | None = None) -> None:
        """As ``Executor.start``."""
        devices = self._check(run, placement)
        with record_lock(run), locked(require_local(run).home / _DEVICES_LOCK):
            before = read_record(run)
            slots = self._choose_gpus(run, devices) if self._gpus else ()
            record = LeaseRecord(
                address=self.address,
                next_lease=before.next_lease if before else 0,
                directory=str(directory) if directory else None,
            )
            record, lease = record.grant(self._node, devices, is_lead=True, slots=slots)
            write_record(run, record)
            seen = self._visible.hide_all_but(slots)
            program = lead_program(run, devices)
            worker = start_worker(run, program, directory=directory, environment=seen)
            if not self._gpus:
                cpu_limits.sweep(memory_limits.has_exceeded)
                memory_limits.sweep()
                memory_limits.limit(run.id, worker.pid, most_bytes=self._memory(run, devices))
                cpu_limits.limit(run.id, worker.pid, cpus=self._cpus(devices))
            append_lease_event(run, lease, "asked", reason=str(worker.pid))
            write_record(run, record.change(lease.name, handle=str(worker.pid)))

    def resize(self, run: RunStore, placement: Placement) -> ResizeResult:
        """As ``Executor.resize``."""
        devices = self._check(run, placement)
        with record_lock(run):
            record = known_record(run)
            lease = record.wanted[0]
            worker = recorded_worker(run)
            if record.is_ending or worker is None:
                return ResizeResult(how="later", text=f"{run.id} is just being stopped")
            if self._gpus and devices != lease.devices:
                return ResizeResult(
                    how="restart", text="a process keeps the GPUs it was started with"
                )
            if devices > lease.devices:
                self._limit_anew(run, worker, devices)
            text = self._ask_for(run, devices)
            if text is None:
                self._limit_anew(run, worker, lease.devices)
                return ResizeResult(how="later", text=f"{run.id} is just starting or changing")
            self._limit_anew(run, worker, devices)
            write_record(run, record.change(lease.name, devices=devices))
        return ResizeResult(how="live", text=text)

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        """As ``Executor.stop``."""
        with record_lock(run):
            record = known_record(run)
            write_record(run, record.model_copy(update={"is_ending": True}))
        worker = recorded_worker(run)
        if now:
            _end(run, worker)
        elif worker is not None:
            worker.stop()

    def status(self, run: RunStore) -> RunStatus:
        """As ``Executor.status``."""
        with record_lock(run):
            record, observed, workers = self._observe(run)
            lease, is_alive = observed.lease, observed.state is LeaseState.RUNNING
            if lease.state != observed.state:
                append_lease_event(run, lease, observed.state, observed.reason)
                changed = record.change(lease.name, state=observed.state, reason=observed.reason)
                write_record(run, changed)
        has_outgrown = memory_limits.report_exceeded(run.id) is not None
        if is_alive and has_outgrown:
            # One worker was killed, and its replacement would grow as large: all are stopped.
            _end(run, recorded_worker(run))
        elif not is_alive and not has_outgrown:  # else whoever records its end reads why
            cpu_limits.forget(run.id)
            memory_limits.forget(run.id)
        return RunStatus(leases=(observed,), wanted=record.placement, workers=workers)

    def observe(self, run: RunStore) -> RunStatus:
        """As ``Executor.observe``."""
        record, observed, workers = self._observe(run)
        return RunStatus(leases=(observed,), wanted=record.placement, workers=workers)

    def _observe(self, run: RunStore) -> tuple[LeaseRecord, LeaseStatus, int]:
        """Record, the one lease, and the number of workers as they are now."""
        record = known_record(run)
        lease = record.wanted[0]
        worker = recorded_worker(run)
        group = read_worker_group(run)
        is_alive = self._lives(run, worker)
        if is_alive and group and worker and group.pid == worker.pid and group.target:
            # What the supervisor last agreed to, even if whoever asked had no time to note it.
            lease = lease.model_copy(update={"devices": group.target})
            record = record.change(lease.name, devices=group.target)
        state = LeaseState.RUNNING if is_alive else LeaseState.GONE
        reason = "" if is_alive else _last_words(worker, lease)
        observed = LeaseStatus(lease=lease, state=state, reason=reason, node=self._node)
        return record, observed, count_workers(group) if group and is_alive else 0

    def logs(self, run: RunStore) -> tuple[str, ...]:
        """As ``Executor.logs``."""
        known_record(run)
        return text_logs(run)

    def events(self, run: RunStore, *, offset: int = 0) -> Iterator[tuple[LeaseEvent, int]]:
        """As ``Executor.events``."""
        known_record(run)
        yield from read_lease_events(run, offset=offset)

    def _check(self, run: RunStore, placement: Placement) -> int:
        strange = [node for node, _ in placement.shares if node != self._node]
        if strange or not placement:
            requested = ", ".join(strange) or "nothing"
            raise ExecutorError(
                f"{run.id} was given {requested}, and {self.address} has only {self._node}"
            )
        return placement.devices

    def _choose_gpus(self, run: RunStore, devices: int) -> tuple[int, ...]:
        """The first GPUs that no other run holds; the scheduler decides how many."""
        taken: set[int] = set()
        for other in find_runs(require_local(run).home, having=Document.LEASES):
            record = read_record(other)
            if record is not None and other.id != run.id:
                slots = {slot for lease in record.wanted for slot in lease.slots}
                if slots and self._lives(other, recorded_worker(other)):
                    taken |= slots
        free = [slot for slot in range(self._devices) if slot not in taken]
        if len(free) < devices:
            raise ExecutorError(f"{run.id} was given {devices} GPUs, and {len(free)} are free")
        return tuple(free[:devices])

    def _ask_for(self, run: RunStore, devices: int) -> str | None:
        """Answer of the supervisor; None where it cannot be asked now."""
        if run.has(Area.SERVERS):  # asynchronous workers: their supervisor reads this
            run.write(Document.TARGET_WORKERS, str(devices))
            return f"{devices} workers from now on"
        group = read_worker_group(run)
        if group is None:
            return None
        try:
            answer = send_request(group, {"kind": "resize", "devices": devices})
        except StoreError:
            return None
        return str(answer.get("text")) if answer.get("is_accepted") else None

    def _lives(self, run: RunStore, worker: WorkerProcess | None) -> bool:
        if worker is not None and worker.detached and worker.is_alive():
            return True
        return not worker_lock_is_free(run) or any(running_workers(run))

    def _cpus(self, devices: int) -> float:
        return self._cores * devices / self._devices

    def _memory(self, run: RunStore, devices: int) -> int:
        return memory_limits.choose_bytes(
            total=memory_limits.total_bytes(),
            devices=devices,
            of=self._devices,
            declared_gb=_declared_gb(run),
        )

    def _limit_anew(self, run: RunStore, worker: WorkerProcess, devices: int) -> None:
        cpu_limits.change(run.id, worker.pid, cpus=self._cpus(devices))
        memory_limits.change(run.id, most_bytes=self._memory(run, devices))

    def _describe_limits(self) -> str:
        if self._gpus:
            return ""
        share = self._cores / self._devices
        kind = cpu_limits.find_kind()
        if kind == "affinity":
            cores = f"cores (affinity): {share:g} of {self._cores} for each device, rounded"
        else:
            cores = f"time on {share:.2g} of {self._cores} cores for each device ({kind})"
        return f"{cores}; {memory_limits.describe(devices=self._devices)}"


def _end(run: RunStore, worker: WorkerProcess | None) -> None:
    if worker is not None:
        worker.kill()
    kill_workers(run)  # after a takeover they are not in the group of their supervisor


def _declared_gb(run: RunStore) -> float | None:
    """Memory per device that the job declares."""
    with suppress(OSError, ValueError, AttributeError):
        result = (read_raw_job(run) or {}).get("train", {}).get("memory_gb")
        return float(result) if isinstance(result, int | float) else None
    return None


def _last_words(worker: WorkerProcess | None, lease: Lease) -> str:
    if worker is None or not worker.detached:
        return "it was never started"
    code = worker.exit_code()
    how = "ended" if code is None else describe_exit(code)
    return f"process {worker.pid} on {lease.node} {how}"


def _count(text: str | None, address: str) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ExecutorError(f"{address}: devices is {text!r}, not a number of devices")
    return int(text)
