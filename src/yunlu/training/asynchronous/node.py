"""Node of an asynchronous run: loads everything once and keeps its workers running.

``python -m yunlu.training.asynchronous.node RUN_DIR --node NAME --devices N`` is what ``yunlu join``
starts. The run's directory has the addresses of the servers; the control connection is only for
registering, and for being dismissed. While it is down, the workers continue.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from yunlu.core.private_process import make_process_private
from yunlu.core.processes import start_time
from yunlu.core.settings import read_settings
from yunlu.planning.layout import Layout
from yunlu.runs.documents import read_job, require_plan
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area
from yunlu.runs.worker_group import read_worker_group
from yunlu.training.asynchronous.process_group_supervisor import (
    ManagedProcess,
    ProcessGroupSupervisor,
    describe_failure,
)
from yunlu.training.asynchronous.worker import fit_to_machine, train_worker
from yunlu.training.attempt import signals_as_stop
from yunlu.training.determinism import set_deterministic
from yunlu.training.elastic.control_client import ControlClient, ControlLostError
from yunlu.training.elastic.exec_module import unblock_stop_signals
from yunlu.training.elastic.messages import (
    Exited,
    Forked,
    Leave,
    LeaveNotice,
    NodeHello,
    Ping,
    Prepared,
    Reply,
)
from yunlu.training.prepare import prepare

if TYPE_CHECKING:
    from yunlu.core.value import Value
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.callbacks import StopRequest
    from yunlu.training.elastic.messages import Message
    from yunlu.training.training_inputs import TrainingInputs

_TICK_S = 0.25
_QUIET_S = 5.0
"""The supervisor pings every second; a node that receives none was cut off and reconnects."""
_WAIT_S = 600.0
"""Time to look for the supervisor; the node continues when the run is resumed."""


def main() -> int:
    """Command line used by ``yunlu join``."""
    parser = argparse.ArgumentParser(prog="yunlu.training.asynchronous.node")
    parser.add_argument("run", type=Path)
    parser.add_argument("--node", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument(
        "--workers-here", type=int, help="workers on this machine; default: devices"
    )
    options = parser.parse_args()
    make_process_private()
    # fork() does not copy threads: torch must not have started any.
    torch.set_num_threads(1)
    with signals_as_stop() as stop:
        unblock_stop_signals()
        workers_here = options.workers_here or options.devices
        return AsyncNodeAgent(
            open_run(options.run), options.node, options.devices, stop, workers_here=workers_here
        ).run()


class AsyncNodeAgent:
    """Single-threaded, because it forks."""

    def __init__(
        self, run: RunStore, name: str, devices: int, stop: StopRequest, *, workers_here: int
    ) -> None:
        run.is_quiet = True  # events are written by the supervisor
        self._run, self._name, self._devices, self._stop = run, name, devices, stop
        self._client = ControlClient(run, quiet_s=_QUIET_S * read_settings().patience)
        self._supervisor = ProcessGroupSupervisor(
            run,
            in_child=self._close_inherited,
            report_loss=self._report_loss,
            is_ending=lambda: stop.is_set,
        )
        self._workers_here = workers_here
        self._processes: list[ManagedProcess] = []
        self._reported_pids: dict[str, int] = {}
        """Pids of workers reported to the supervisor."""
        self._is_prepared = False
        self._is_dismissed = False
        self._is_refused = False

    def run(self) -> int:
        """Run until dismissed; returns the exit code."""
        try:
            self._serve_workers()
        except Exception as error:  # noqa: BLE001 (reported to the supervisor)
            traceback.print_exc()
            self._send(describe_failure(error))
            return 1
        finally:
            self._supervisor.end()
            self._client.drop()
        return 1 if self._is_refused else 0

    def _serve_workers(self) -> None:
        self._poll()
        if self._is_over():
            return
        job = read_job(self._run)
        set_deterministic(job.train.deterministic)
        parts = prepare(self._run, job)
        gc.collect()
        gc.freeze()  # loaded objects stay: collecting them would unshare their pages
        self._is_prepared = True
        self._send(Prepared())
        while not self._is_open():
            if self._is_over():
                return
            self._poll()
        plan = self._read_plan()
        self._processes = [self._make_worker(n, job, plan, parts) for n in range(self._devices)]
        while not self._is_over():
            self._supervisor.keep_alive(*self._processes)
            self._report_started()
            self._poll()
            self._supervisor.reap()
        self._send(LeaveNotice())

    def _read_plan(self) -> Plan:
        """The run's plan, with one share per ticket of a step."""
        plan, group = require_plan(self._run), read_worker_group(self._run)
        layouts = (
            [Layout.model_validate(layout) for layout in group.layouts.values()] if group else []
        )
        return plan.model_copy(update={"layout": layouts[0]}) if layouts else plan

    def _is_open(self) -> bool:
        """Whether the servers are running."""
        group = read_worker_group(self._run)
        return group is not None and group.generation > 0 and self._run.has(Area.SERVERS)

    def _is_over(self) -> bool:
        if self._stop.is_set or self._is_dismissed:
            return True
        if self._client.is_up:
            return False
        # Workers may learn of the end from the servers before this node does.
        lost_s = time.monotonic() - self._client.lost_at
        return lost_s > _WAIT_S or (lost_s > 1 and self._client.is_over())

    def _make_worker(
        self, number: int, job: Job, plan: Plan, parts: TrainingInputs
    ) -> ManagedProcess:
        def body() -> None:
            worker_plan = fit_to_machine(plan, job, slot=number, workers_here=self._workers_here)
            train_worker(
                self._run, job, worker_plan, parts, name=f"{self._name}.{number}.{os.getpid()}"
            )

        return ManagedProcess(f"worker-{self._name}.{number}", body, number=number)

    def _poll(self) -> None:
        """Send and receive for a moment."""
        if not self._client.is_up:
            if not self._client.connect(self._hello()):
                time.sleep(_TICK_S / 5)
                return
            if self._is_prepared:
                self._send(Prepared())
        connection = self._client.connection
        if connection is None:
            return
        try:
            if select.select([connection], [], [], _TICK_S)[0]:
                for message in self._client.receive():
                    self._handle(message)
            self._client.send(Ping())
            self._client.check_quiet()
        except ControlLostError:
            self._disconnect()

    def _hello(self) -> NodeHello:
        self._reported_pids.clear()  # a new supervisor knows nothing of this node
        return NodeHello(
            node=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started_at=start_time(),
            devices=self._devices,
        )

    def _handle(self, message: Message) -> None:
        match message:
            case Leave():
                self._is_dismissed = True
            case Reply() if not message.is_accepted:
                sys.stderr.write(f"the run rejected this node: {message.text}\n")
                self._is_refused = self._is_dismissed = True
            case _:
                pass

    def _report_started(self) -> None:
        for process in self._processes:
            if (
                process.pid
                and self._reported_pids.get(process.name) != process.pid
                and self._client.is_up
            ):
                self._reported_pids[process.name] = process.pid
                assert process.number is not None
                self._send(
                    Forked(
                        worker=process.number,
                        pid=process.pid,
                        process_started_at=start_time(process.pid),
                    )
                )

    def _report_loss(self, process: ManagedProcess, _pid: int, code: int, cause: str) -> None:
        assert process.number is not None
        self._send(Exited(worker=process.number, code=code, detail=cause))

    def _send(self, message: Value) -> None:
        try:
            self._client.send(message)
        except ControlLostError:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._client.is_up:
            self._client.drop()

    def _close_inherited(self) -> None:
        """In a worker: close the node's connection."""
        with suppress(OSError):
            if self._client.connection is not None:
                self._client.connection.close()


if __name__ == "__main__":
    sys.exit(main())
