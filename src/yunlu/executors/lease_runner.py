"""Lease runner: the program of a lease on a cluster; supervises or joins the run.

``python -m yunlu.executors.lease_runner RUN_DIR LEASE`` is what a cluster starts. It holds the devices
until its last process is gone, and leaves when it is told to (SIGTERM: preemption, the end of the
time allowed) or when the run's record says that the lease is not wanted any more. A cluster may
start it a second time, after a preemption: a lead then gives the run another life.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from yunlu.core.errors import StoreError
from yunlu.core.processes import (
    ProcessHandle,
    adopt_orphans,
    kill_descendants,
    reap_children,
    start_process,
)
from yunlu.core.secrets import make_process_private
from yunlu.core.secure_link import routed_address
from yunlu.core.settings import worker_environment
from yunlu.executors.lease_executor import (
    Lease,
    append_lease_event,
    read_record,
    record_lock,
    write_record,
)
from yunlu.executors.usage import LeaseUse, UsageMeter, write_use
from yunlu.executors.worker_process import (
    is_asynchronous,
    launch_lock,
    node_command,
    program_for,
    worker_lock_is_free,
)
from yunlu.hardware.accelerators import worker_defaults
from yunlu.runs.events import AttemptStarted, StateChanged, WorkerGroupFormed
from yunlu.runs.fold import read_view
from yunlu.runs.home import open_run
from yunlu.runs.run_store import read_raw_job
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import LOCAL, read_worker_group, send_request

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from yunlu.runs.run_store import RunStore
    from yunlu.runs.worker_group import WorkerGroup

AGAIN = 75
"""Exit code (EX_TEMPFAIL) of a preempted lease that is to be started again."""
_LOOP_S = 0.1
_LOOK_S = 0.5
_MEASURE_S = 5.0
_JOIN_S = 600.0
"""How long a joining lease waits for the lead."""
_REST_S = 60.0
_VAIN = 3
_LINGER_S = 75.0
"""Workers without a supervisor exit after a minute; then they are killed."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="yunlu.executors.lease_runner")
    parser.add_argument("run", type=Path)
    parser.add_argument("lease")
    parser.add_argument(
        "--with-parent", action="store_true", help="end everything once the parent is gone"
    )
    args = parser.parse_args()
    make_process_private()
    return LeaseRunner(open_run(args.run), args.lease, with_parent=args.with_parent).hold()


def _answers(group: WorkerGroup) -> bool:
    try:
        return bool(send_request(group, {"kind": "locate_run"}, timeout_s=5))
    except StoreError:
        return False


def lead_program(run: RunStore, devices: int) -> tuple[str, ...]:
    """Command that supervises a run on so many devices of one node; others can join it."""
    job = read_raw_job(run) or {}
    record = read_record(run)
    return program_for(
        devices,
        spares=int(job.get("spares", 1)),
        is_asynchronous=is_asynchronous(run, (job.get("communication") or {}).get("method")),
        is_elastic=True,
        shares=record.placement.devices if record else None,
    )


class LeaseRunner:
    """One lease, from its start by the cluster to its end."""

    def __init__(self, run: RunStore, name: str, *, with_parent: bool = False) -> None:
        self.run = run
        self.name = name
        self._parent = os.getppid() if with_parent else None
        self._child: subprocess.Popen[bytes] | None = None
        self._is_told = False
        self._is_noticed = False
        self._passed_on = False
        self._leads = False
        self._is_heir = False
        self._looked_at = 0.0
        self._meter = UsageMeter()
        self._measured_at = -_MEASURE_S

    def hold(self) -> int:
        """Run until no process is left; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        adopt_orphans()
        lease = self._wanted_lease()
        if lease is None:
            sys.stderr.write(f"lease {self.name} is not wanted any more\n")
            return 0
        text, environment = self.find_part(lease)
        if not text:
            return AGAIN if self._is_noticed and self._is_needed() else 0
        append_lease_event(self.run, lease, "began", reason=socket.gethostname())
        self._child = start_process(text, environment=environment)
        return self._see_through(lease)

    def _wanted_lease(self) -> Lease | None:
        record = read_record(self.run)
        lease = record.find(self.name) if record and not record.is_ending else None
        return lease if lease is not None and lease.is_wanted and not self._is_told else None

    def find_part(self, lease: Lease) -> tuple[Sequence[str], dict[str, str]]:
        """Program to start; None where there is nothing to do."""
        # A lead that returns may find that others continued without it: then it joins them.
        if lease.is_lead and worker_lock_is_free(self.run):
            if not self._wake_run(lease):
                return (), {}
            environment = worker_defaults() | worker_environment()
            environment.setdefault("YUNLU_BIND", routed_address())
            self._leads = True
            return (*lead_program(self.run, lease.devices), self.run.address), environment
        return self._await_lead(lease), worker_defaults() | worker_environment(threads=1)

    def _wake_run(self, lease: Lease) -> bool:
        """Reopen a run whose attempt was interrupted; returns whether it is to be trained."""
        with launch_lock(self.run, wait=True):
            state = read_view(self.run).state
            if state in {RunState.FINISHED, RunState.FAILED}:
                return False
            if state in {RunState.PLANNING, RunState.RUNNING}:
                reason = f"its lease on {lease.node} was ended"
                self.run.emit(StateChanged(state=RunState.LOST, reason=reason))
            if state is not RunState.PENDING:
                reason = f"started again on {lease.node}"
                self.run.emit(StateChanged(state=RunState.PENDING, reason=reason))
        return True

    def _await_lead(self, lease: Lease) -> Sequence[str]:
        began_at = time.monotonic()
        while self._wanted_lease() is not None:
            group = read_worker_group(self.run)
            # A lease that starts before the lead would plan the run too.
            if group is not None and group.generation > 0 and _answers(group):
                taken = lease.name in group.wanted
                name = f"{lease.name}-{os.getpid()}" if taken else lease.name
                node = node_command(self.run, group)
                return (*node, "--node", name, "--devices", str(lease.devices))
            state = read_view(self.run).state
            if state in {RunState.FINISHED, RunState.FAILED}:
                break
            # An inactive run may only wait for its lead; devices should not wait long for that.
            waited_s = time.monotonic() - began_at
            if waited_s > (_JOIN_S if state.is_active else _REST_S):
                sys.stderr.write(f"the run has had no lead for {waited_s:.0f} s\n")
                break
            time.sleep(_LOOK_S)
        return ()

    def _see_through(self, lease: Lease) -> int:
        assert self._child is not None
        left_at: float | None = None
        while self._reap():
            if self._parent is not None and os.getppid() != self._parent:
                kill_descendants()
            self._read_own_lease()
            self._measure(lease)
            if self._is_told and not self._passed_on:
                self._pass_on()
            if self._child.returncode is not None and _supervisor(self.run) is None:
                left_at = time.monotonic() if left_at is None else left_at
                if time.monotonic() - left_at > _LINGER_S:
                    kill_descendants()
            time.sleep(_LOOP_S)
        code = self._child.returncode or 0
        append_lease_event(self.run, lease, "ended", reason=f"exit code {code}")
        if self._is_noticed and self._is_needed():
            return AGAIN
        return 1 if code else 0

    def _is_needed(self) -> bool:
        """Whether the run would continue, if the cluster allowed it."""
        record = read_record(self.run)
        lease = record.find(self.name) if record and not record.is_ending else None
        over = read_view(self.run).state in {RunState.FINISHED, RunState.FAILED}
        # A run that never has time for one step would be restarted for ever.
        over = over or _attempts_without_step(self.run) >= _VAIN
        return lease is not None and lease.is_wanted and not over

    def _reap(self) -> bool:
        """Reap children; returns whether any process is left."""
        assert self._child is not None
        codes, is_any_left = reap_children()
        self._child.returncode = codes.get(self._child.pid, self._child.returncode)
        return is_any_left

    def _measure(self, lease: Lease) -> None:
        """Write usage for observers on other machines."""
        if time.monotonic() - self._measured_at < _MEASURE_S:
            return
        self._measured_at = time.monotonic()
        children = psutil.Process().children(recursive=True)
        cores, memory_bytes = self._meter.measure(self.name, [child.pid for child in children])
        if cores is not None:
            machine = self._meter.sample()
            use = LeaseUse(at=time.time(), node=lease.node, cores=cores, memory_bytes=memory_bytes,
                           machine=machine)  # fmt: skip
            write_use(self.run, self.name, use)

    def _read_own_lease(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S or self._passed_on:
            return
        self._looked_at = now
        record = read_record(self.run)
        lease = record.find(self.name) if record else None
        if record is None or lease is None or not lease.is_wanted:
            self._is_told = True
        elif record.is_ending:
            # The lead ends the run and stops the other leases.
            self._is_told = self._leads or _supervisor(self.run) is not None
        elif not lease.is_lead and _supervisor(self.run) is not None:
            self._take_lead()
        elif self._is_heir:
            self._shed_inheritance()

    def _take_lead(self) -> None:
        """The lead is gone and one of our workers started another supervisor: this lease becomes the lead."""
        with record_lock(self.run):
            record = read_record(self.run)
            if record is None or record.find(self.name) is None:
                return
            for lease in record.leases:
                record = record.change(lease.name, is_lead=lease.name == self.name)
            write_record(self.run, record)
        self._is_heir = True

    def _shed_inheritance(self) -> None:
        """The new supervisor would start the lead's workers here: their devices are not ours."""
        group = read_worker_group(self.run)
        if group is None:
            return
        rest = group.target - group.wanted.get(LOCAL, 0)
        with suppress(StoreError):
            if rest < 1 or send_request(group, {"kind": "resize", "devices": rest}).get(
                "is_accepted"
            ):
                self._is_heir = False

    def _on_signal(self, *_: object) -> None:
        if self._is_told:
            return
        self._is_told = True
        record = read_record(self.run)
        lease = record.find(self.name) if record else None
        if record and lease and lease.is_wanted and not record.is_ending:
            self._is_noticed = True
            append_lease_event(self.run, lease, "noticed", reason="the cluster asks it to go")

    def _pass_on(self) -> None:
        """Forward a stop: a supervisor saves and stops the run; a node leaves it."""
        assert self._child is not None
        self._passed_on = True
        supervisor = _supervisor(self.run)
        if self._child.returncode is None:
            self._child.send_signal(signal.SIGTERM)
        if supervisor is not None and supervisor.pid != self._child.pid:
            supervisor.send_signal(signal.SIGTERM)


def _supervisor(run: RunStore) -> psutil.Process | None:
    """Process of the run's supervisor, if it is one of ours."""
    group = read_worker_group(run)
    if group is None:
        return None
    process = ProcessHandle(group.pid, group.process_started_at).find()
    try:
        is_ours = process and os.getpid() in {parent.pid for parent in process.parents()}
    except psutil.Error:
        return None
    return process if is_ours else None


def _attempts_without_step(run: RunStore) -> int:
    """Consecutive attempts without a step."""
    attempts = 0
    for event, _ in run.read_events():
        if isinstance(event, WorkerGroupFormed):
            attempts = 0
        attempts += isinstance(event, AttemptStarted)
    return attempts


if __name__ == "__main__":
    sys.exit(main())
