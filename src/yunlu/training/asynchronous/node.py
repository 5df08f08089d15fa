"""Node of an asynchronous run: loads everything once and keeps its workers running.

``python -m yunlu.training.asynchronous.node RUN_DIR --node NAME --devices N`` is what ``yunlu join``
starts. The run's directory has the addresses of the servers; the control connection is only for
registering, and for being dismissed. While it is down, the workers continue.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

from yunlu.core.processes import start_time
from yunlu.core.settings import read_settings
from yunlu.planning.layouts import Layout
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, read_job, require_plan
from yunlu.runs.worker_group import read_worker_group
from yunlu.training.asynchronous.process_group_supervisor import (
    ManagedProcess,
    ProcessGroupSupervisor,
    describe_failure,
)
from yunlu.training.asynchronous.worker import fit_to_machine, train_worker
from yunlu.training.attempt import signals_as_stop
from yunlu.training.determinism import set_deterministic
from yunlu.training.elastic.control_channel import ControlClient
from yunlu.training.elastic.exec_module import unblock_stop_signals
from yunlu.training.elastic.messages import (
    Exited,
    Forked,
    LeaveNotice,
    Prepared,
)
from yunlu.training.elastic.node import WAIT_S, NodeAgent, node_arguments, start_node_process
from yunlu.training.prepare import prepare

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.attempt import StopRequest
    from yunlu.training.tasks.task import TrainingInputs

_RETRY_S = 0.05
_QUIET_S = 5.0
"""The supervisor pings every second; a node that receives none was cut off and reconnects."""


def main() -> int:
    """Command line used by ``yunlu join``."""
    parser = node_arguments("yunlu.training.asynchronous.node")
    parser.add_argument(
        "--workers-here", type=int, help="workers on this machine; default: devices"
    )
    options = start_node_process(parser)
    with signals_as_stop() as stop:
        unblock_stop_signals()
        workers_here = options.workers_here or options.devices
        return AsyncNodeAgent(
            open_run(options.run), options.node, options.devices, stop, workers_here=workers_here
        ).run()


class AsyncNodeAgent(NodeAgent):
    """Keeps as many workers running as it has devices."""

    def __init__(
        self, run: RunStore, name: str, devices: int, stop: StopRequest, *, workers_here: int
    ) -> None:
        run.is_quiet = True  # events are written by the supervisor
        client = ControlClient(run, quiet_s=_QUIET_S * read_settings().patience)
        super().__init__(run, name, devices, client)
        self._stop = stop
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
        job = read_job(self.store)
        set_deterministic(job.train.deterministic)
        parts = prepare(self.store, job)
        gc.collect()
        gc.freeze()  # loaded objects stay: collecting them would unshare their pages
        self._is_prepared = True
        self._send(Prepared())
        while not self._is_open():
            if self._is_over():
                return
            self._poll()
        plan = self._read_plan()
        self._processes = [self._make_worker(n, job, plan, parts) for n in range(self.devices)]
        while not self._is_over():
            self._supervisor.keep_alive(*self._processes)
            self._report_started()
            self._poll()
            self._supervisor.reap()
        self._send(LeaveNotice())

    def _read_plan(self) -> Plan:
        """The run's plan, with one share per ticket of a step."""
        plan, group = require_plan(self.store), read_worker_group(self.store)
        layouts = (
            [Layout.model_validate(layout) for layout in group.layouts.values()] if group else []
        )
        return plan.model_copy(update={"layout": layouts[0]}) if layouts else plan

    def _is_open(self) -> bool:
        """Whether the servers are running."""
        group = read_worker_group(self.store)
        return group is not None and group.generation > 0 and self.store.has(Area.SERVERS)

    def _is_over(self) -> bool:
        # Workers may learn of the end from the servers before this node does.
        return self._stop.is_set or self._is_dismissed or self._is_abandoned(WAIT_S)

    def _make_worker(
        self, number: int, job: Job, plan: Plan, parts: TrainingInputs
    ) -> ManagedProcess:
        def body() -> None:
            worker_plan = fit_to_machine(plan, job, slot=number, workers_here=self._workers_here)
            train_worker(
                self.store, job, worker_plan, parts, name=f"{self.name}.{number}.{os.getpid()}"
            )

        return ManagedProcess(f"worker-{self.name}.{number}", body, number=number)

    def _poll(self) -> None:
        """Send and receive for a moment."""
        if not self._client.is_up:
            self._reported_pids.clear()  # a new supervisor knows nothing of this node
            if not self._connect():
                time.sleep(_RETRY_S)
                return
            if self._is_prepared:
                self._send(Prepared())
        self._stay_in_touch()

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


if __name__ == "__main__":
    sys.exit(main())
