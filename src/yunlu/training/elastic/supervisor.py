"""Supervisor of a run with several workers: one process, one thread, no torch.

``python -m yunlu.training.elastic.supervisor RUN_DIR --devices N`` is how an executor starts it. It
starts a *node* (see ``yunlu.training.elastic``), which forks the workers. If it is killed, a worker
starts another one with ``--adopt``, which continues from ``worker_group.json``; training does not stop.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from yunlu.core.processes import (
    SignalPipe,
    process_began_at,
    start_process,
    start_time,
    stop_process,
)
from yunlu.core.secrets import make_process_private
from yunlu.core.settings import worker_environment
from yunlu.hardware.accelerators import worker_defaults
from yunlu.planning.layouts import Layout
from yunlu.runs.events import AttemptStarted, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Claim, Document, HeldClaim
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import GroupWorker, read_worker_group
from yunlu.training.attempt import read_attempts
from yunlu.training.elastic.control_channel import run_is_over
from yunlu.training.elastic.coordinator import Coordinator, RunOutcome
from yunlu.training.elastic.event_reporter import EventReporter
from yunlu.training.elastic.exec_module import ASYNC_NODE, ASYNC_SUPERVISOR, exec_module
from yunlu.training.elastic.group_coordinator import open_control_server
from yunlu.training.elastic.membership import LOCAL, NodeRecord, WorkerRecord
from yunlu.training.elastic.messages import Halt, Leave, as_failure

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Generator

    from yunlu.runs.run_store import RunStore
    from yunlu.runs.worker_group import WorkerGroup

NODE_MODULE = "yunlu.training.topology.elastic"
"""Main module of a node, started by name: the supervisor itself does not import torch."""
_LOOP_S = 0.1
_LEAVE_S = 8.0
_LOCK_S = 1.0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="yunlu.training.elastic.supervisor")
    parser.add_argument("run", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--node-module", default=NODE_MODULE)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--adopt", action="store_true")
    options = parser.parse_args()
    make_process_private()
    try:
        state = supervise(
            options.run,
            devices=options.devices,
            spares=options.spares,
            node_module=options.node_module,
            plan_only=options.plan_only,
            adopt=options.adopt,
        )
    except BlockingIOError:
        sys.stderr.write("the run already has a supervisor\n")
        return 1
    return 1 if state is RunState.FAILED else 0


def supervise(
    run: Path,
    *,
    devices: int,
    spares: int = 1,
    node_module: str = NODE_MODULE,
    plan_only: bool = False,
    adopt: bool = False,
) -> RunState:
    """Supervise a run until it ends; ``BlockingIOError`` if it already has a supervisor."""
    directory = open_run(run)
    with _only_supervisor(directory) as claim:
        if adopt and run_is_over(directory):
            return RunState.STOPPED  # started by a worker that did not know that the run had ended
        before = read_worker_group(directory) if adopt else None
        supervisor = Supervisor(
            directory,
            before,
            devices=devices,
            spares=spares,
            node_module=node_module,
            plan_only=plan_only,
        )
        state = supervisor.run()
        if supervisor.switches_to_async:
            supervisor.switch_to_async(claim)
        return state


class Supervisor:
    """Process around the coordinator: lock, journal, event loop, shutdown."""

    def __init__(
        self,
        directory: RunStore,
        before: WorkerGroup | None,
        *,
        devices: int,
        spares: int,
        node_module: str,
        plan_only: bool,
    ) -> None:
        self.directory = directory
        self._server = open_control_server(before.token if before else None)
        self._node_module = before.node_module if before else node_module
        self._node: subprocess.Popen[bytes] | None = None
        self._started_at = start_time()
        self._is_signalled = False
        self.coordinator = Coordinator(
            self._server,
            EventReporter(directory),
            devices=before.wanted.get(LOCAL, before.target) if before else devices,
            spares=before.spares if before else spares,
            plan_only=plan_only,
            start_node=self._start_node,
            save=self._save,
        )
        self._listen_to_signals()
        if before is not None:
            self._adopt_journal(before)

    @property
    def switches_to_async(self) -> bool:
        """Whether the run continues with asynchronous workers."""
        return self.coordinator.outcome is not None and self.coordinator.outcome.switches_to_async

    def switch_to_async(self, claim: HeldClaim) -> NoReturn:
        """Exec their main module; the lock is inherited, so the run is never without a holder."""
        coordinator = self.coordinator
        shares = coordinator.history[coordinator.generation].world
        devices = max(coordinator.membership.nodes[LOCAL].wanted, 1)
        arguments = ("--devices", str(devices), "--shares", str(shares), "--claim", claim.pass_on())
        exec_module(ASYNC_SUPERVISOR, self.directory.address, *arguments)

    def run(self) -> RunState:
        """Supervise until the run ends."""
        outcome = RunOutcome(state=RunState.FAILED)
        try:
            self._begin()
            outcome = self._loop()
        except Exception as error:  # noqa: BLE001 (reported as an event)
            with suppress(OSError):  # the disk may be full
                traceback.print_exc()
            with suppress(OSError):
                self.coordinator.reporter.report_failure(as_failure(error), None)
        finally:
            self._shut_down(is_failed=outcome.state is RunState.FAILED)
        if outcome.switches_to_async:
            return outcome.state
        ended = StateChanged(state=outcome.state, reason=outcome.reason or None)
        with suppress(OSError):
            self.coordinator.reporter.emit(ended)
        return outcome.state

    def _begin(self) -> None:
        is_new = self.coordinator.stage != "adopting"
        self._save()
        self._record_worker()
        if is_new:
            self._begin_attempt()
            self._start_node()

    def _loop(self) -> RunOutcome:
        while self.coordinator.outcome is None:
            self._server.poll(
                _LOOP_S,
                on_message=self.coordinator.handle_message,
                on_lost=self.coordinator.connection_lost,
            )
            if self._is_signalled:
                self.coordinator.stop()
            self.coordinator.tick()
            if self._node is not None:
                self._node.poll()
        return self.coordinator.outcome

    def _adopt_journal(self, before: WorkerGroup) -> None:
        coordinator = self.coordinator
        coordinator.generation = before.generation
        coordinator.layouts = {
            n: Layout.model_validate(saved) for n, saved in before.layouts.items()
        }
        coordinator.history = {
            n: Layout.model_validate(saved) for n, saved in before.history.items()
        }
        coordinator.membership.next_worker = before.next_worker
        for name, wanted in before.wanted.items():
            coordinator.membership.nodes.setdefault(name, NodeRecord(name=name, wanted=wanted))
        for saved in before.workers:
            coordinator.membership.workers[saved.number] = WorkerRecord(
                number=saved.number,
                node=saved.node,
                host=saved.host,
                pid=saved.pid,
                process_started_at=saved.process_started_at,
                rank=saved.rank,
                status="busy" if saved.rank is not None else "idle",
                since=time.monotonic(),
            )
        coordinator.begin_adoption()

    def _save(self) -> None:
        coordinator = self.coordinator
        coordinator.publish_group(
            node_module=self._node_module,
            generation=coordinator.generation,
            spares=coordinator.spares,
            next_worker=coordinator.membership.next_worker,
            layouts={n: saved.model_dump() for n, saved in coordinator.layouts.items()},
            history={n: saved.model_dump() for n, saved in coordinator.history.items()},
            workers=tuple(
                GroupWorker(
                    number=worker.number,
                    node=worker.node,
                    host=worker.host,
                    pid=worker.pid,
                    process_started_at=worker.process_started_at,
                    rank=worker.rank,
                )
                for worker in coordinator.membership.with_status(
                    "starting", "idle", "busy", "paused"
                )
                if worker.pid
            ),
        )

    def _record_worker(self) -> None:
        """Record the process that is responsible for the run."""
        record = {
            "pid": os.getpid(),
            "process_started_at": self._started_at,
            "host": socket.gethostname(),
            "detached": True,
        }
        self.directory.write(Document.WORKER, json.dumps(record))

    def _begin_attempt(self) -> None:
        self.directory.emit(
            AttemptStarted(
                number=len(read_attempts(self.directory)) + 1,
                pid=os.getpid(),
                process_started_at=self._started_at,
                began_at=process_began_at(),
                devices=self.coordinator.membership.target,
            )
        )
        self.directory.emit(StateChanged(state=RunState.PLANNING))

    def _start_node(self) -> None:
        devices = str(self.coordinator.membership.nodes[LOCAL].wanted)
        arguments = [sys.executable, "-m", self._node_module, self.directory.address]
        self._node = start_process(
            [*arguments, "--node", LOCAL, "--devices", devices],
            environment=worker_defaults() | worker_environment(threads=1),
        )

    def _listen_to_signals(self) -> None:
        def set_flag(*_: object) -> None:
            self._is_signalled = True

        signals = SignalPipe()
        signals.listen(signal.SIGCHLD)
        self._server.add_wake(signals)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, set_flag)

    def _shut_down(self, *, is_failed: bool) -> None:
        """End all workers and nodes."""
        coordinator = self.coordinator
        workers, nodes = coordinator.membership.workers, coordinator.membership.nodes
        for worker in workers.values():
            if is_failed:
                self._server.send(worker.connection, Halt(generation=coordinator.generation))
            self._server.send(worker.connection, Leave())
        successor = ASYNC_NODE if self.switches_to_async else ""
        for node in nodes.values():
            self._server.send(node.connection, Leave(successor=successor))
        if self._node is not None and not nodes[LOCAL].is_ready:
            self._node.kill()  # still loading: no children yet, does not read messages
        deadline = time.monotonic() + _LEAVE_S
        local = [worker for worker in workers.values() if worker.node == LOCAL and worker.pid]
        while time.monotonic() < deadline:
            self._server.poll(0.02, on_message=_ignore, on_lost=_ignore)
            node_is_gone = self._node is None or self._node.poll() is not None
            linked = any(
                node.connection and not node.connection.is_closed for node in nodes.values()
            )
            if (
                node_is_gone
                and not linked
                and not any(worker.process.is_alive() for worker in local)
            ):
                break
        for worker in local:
            worker.process.send_signal(signal.SIGKILL)
        if self._node is not None:
            stop_process(self._node, number=signal.SIGKILL)
        self._server.close_all()


@contextmanager
def _only_supervisor(directory: RunStore) -> Generator[HeldClaim]:
    """Hold the run's lock: a run has one supervisor."""
    with ExitStack() as stack:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                claim = stack.enter_context(directory.claim(Claim.WORKER, wait=False))
                break
            except BlockingIOError:  # someone may just be testing whether it is free
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield claim


def _ignore(*_: object) -> None:
    """Discard."""


if __name__ == "__main__":
    sys.exit(main())
