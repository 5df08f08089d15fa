"""Node agent: loads data and model once per machine and forks workers."""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.utils._device  # pyright: ignore[reportUnusedImport] - needed by every group: loaded before the fork

from yunlu.core.errors import TrainingError
from yunlu.core.json_decode import decode_json
from yunlu.core.private_process import make_process_private
from yunlu.core.processes import ForkedProcesses, SignalPipe, start_time
from yunlu.core.settings import read_settings
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, require_local
from yunlu.runs.worker_group import LOCAL, read_worker_group
from yunlu.training.elastic.control_client import GIVE_UP_S, ControlClient, ControlLostError
from yunlu.training.elastic.exec_module import ASYNC_NODE, exec_module
from yunlu.training.elastic.messages import (
    Exited,
    Fork,
    Forked,
    Kill,
    LayoutsPlanned,
    Leave,
    LeaveNotice,
    Message,
    NodeHello,
    Ping,
    Prepared,
    Reply,
    as_failure,
    read_message,
)
from yunlu.training.elastic.worker_agent import WorkerAgent, run_worker_agent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yunlu.core.value import Value
    from yunlu.planning.layout import Layout
    from yunlu.runs.run_store import RunStore

_TICK_S = 0.25
_QUIET_S = 3.0
"""The supervisor sends a ping every second: a remote node that receives none was cut off and
reconnects. By then the supervisor has given it up, so closing the connection loses nothing."""
_WAIT_S = 600.0
"""Time to look for the supervisor; a node holds no device."""
_LEAVE_S = 6.0


Parts = TypeVar("Parts")


def run_node(
    *,
    prepare: Callable[[RunStore], Parts],
    plan: Callable[[RunStore, Parts, int], Mapping[int, Layout]],
    body: Callable[[WorkerAgent, Parts], None],
) -> int:
    """Command line of a node; ``yunlu.training.elastic`` describes the three functions."""
    parser = argparse.ArgumentParser(prog="yunlu node")
    parser.add_argument("run", type=Path)
    parser.add_argument("--node", required=True)
    parser.add_argument("--devices", type=int, required=True)
    options = parser.parse_args()
    make_process_private()
    # fork() does not copy threads: torch must not have started any.
    torch.set_num_threads(1)
    node = NodeAgent(
        open_run(options.run), options.node, options.devices, prepare=prepare, plan=plan, body=body
    )
    return node.run()


class NodeAgent:
    """Single-threaded, because it forks."""

    def __init__(
        self,
        run: RunStore,
        name: str,
        devices: int,
        *,
        prepare: Callable[[RunStore], Any],
        plan: Callable[[RunStore, Any, int], Mapping[int, Layout]],
        body: Callable[[WorkerAgent, Any], None],
    ) -> None:
        self.store = run
        self.name = name
        self.devices = devices
        self._prepare, self._plan, self._body = prepare, plan, body
        quiet_s = _QUIET_S * read_settings().patience
        self._client = ControlClient(run) if name == LOCAL else ControlClient(run, quiet_s=quiet_s)
        self._parts: Any = None
        self._children = ForkedProcesses[int]()
        """Worker numbers; -1 for the planner."""
        self._plan_pipe: int | None = None
        self._plan_json = b""
        self._is_leaving = False
        self._is_dismissed = False
        self._is_refused = False
        self._successor = ""
        """Main module that this process execs at the end."""
        self._signals = SignalPipe()

    def run(self) -> int:
        """Run until dismissed; returns the exit code."""
        self._signals.listen(signal.SIGTERM, signal.SIGCHLD)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not self._register():
            return 1
        try:
            self._parts = self._prepare(self.store)
        except BaseException as error:  # noqa: BLE001 (reported to the supervisor)
            traceback.print_exc()
            with suppress(ControlLostError):
                self._client.send(as_failure(error))
            return 1
        gc.collect()
        gc.freeze()  # loaded objects stay: collecting them would unshare their pages
        self._send(Prepared())
        while not self._is_dismissed:
            self._poll()
        code = self._shut_down()
        if self._successor and self.name != LOCAL and not self._is_leaving:
            arguments = (self.store.address, "--node", self.name, "--devices", str(self.devices))
            exec_module(self._successor, *arguments)
        return code

    def _register(self) -> bool:
        deadline = time.monotonic() + GIVE_UP_S
        while not self._client.connect(self._hello()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _hello(self) -> NodeHello:
        return NodeHello(
            node=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started_at=start_time(),
            devices=self.devices,
        )

    def _poll(self) -> None:
        if not self._client.is_up and not self._reconnect():
            self._wait(0.05)
            self._reap()
            return
        try:
            self._wait(_TICK_S)
            self._client.send(Ping())
            self._client.check_quiet()
        except ControlLostError:
            self._client.drop()
        self._reap()
        if self._is_leaving and not self._children.running:
            self._is_dismissed = True

    def _wait(self, wait_s: float) -> None:
        connection = self._client.connection
        watched: list[Any] = [self._signals]
        watched += [] if connection is None else [connection]
        watched += [] if self._plan_pipe is None else [self._plan_pipe]
        readable, _, _ = select.select(watched, [], [], wait_s)
        if self._signals in readable:
            self._handle_signals()
        if self._plan_pipe in readable:
            self._read_plan()
        if connection is not None and connection in readable:
            for message in self._client.receive():
                self._handle(message)

    def _reconnect(self) -> bool:
        group = read_worker_group(self.store)
        if group is not None and group.node_module == ASYNC_NODE and self.name != LOCAL:
            # The run became asynchronous while this node was disconnected.
            self._is_dismissed, self._successor = True, ASYNC_NODE
            return False
        if self._client.connect(self._hello()):
            self._send(Prepared())
            return True
        lost_s = time.monotonic() - self._client.lost_at
        wait_s = GIVE_UP_S if self.name == LOCAL else _WAIT_S
        if lost_s > wait_s or (lost_s > 1 and self._client.is_over()):
            self._is_dismissed = True
        self._client.restart_supervisor(after_s=1.5)
        return False

    def _handle(self, message: Message) -> None:
        match message:
            case Fork():
                self._fork(message)
            case Kill():
                for pid, worker in self._children.running.items():
                    if worker == message.worker:
                        os.kill(pid, signal.SIGKILL)
            case Leave():
                self._is_dismissed, self._successor = True, message.successor
            case Reply() if not message.is_accepted:
                sys.stderr.write(f"the run rejected this node: {message.text}\n")
                self._is_refused = self._is_dismissed = True
            case _:
                pass

    def _handle_signals(self) -> None:
        if signal.SIGTERM in self._signals.take() and not self._is_leaving:
            self._is_leaving = True
            self._send(LeaveNotice())

    def _fork(self, request: Fork) -> None:
        reader, writer = os.pipe() if request.is_planner else (None, None)
        pid = self._children.fork(request.worker, lambda: self._run_child(request, writer))
        if writer is not None:
            os.close(writer)
            self._plan_pipe, self._plan_json = reader, b""
        else:
            started_at = start_time(pid)
            self._send(Forked(worker=request.worker, pid=pid, process_started_at=started_at))

    def _run_child(self, request: Fork, writer: int | None) -> int:
        self._signals.close()
        if self._client.connection is not None:
            self._client.connection.close()
        if writer is not None:
            return self._make_plan(writer)
        self._redirect(request.worker)
        return run_worker_agent(
            request.worker,
            node=self.name,
            run=self.store,
            body=lambda worker: self._body(worker, self._parts),
        )

    def _redirect(self, worker: int) -> None:
        with require_local(self.store).open_text_log(f"{Area.LOGS}/worker-{worker}.log") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def _make_plan(self, writer: int) -> int:
        try:
            planned = self._plan(self.store, self._parts, self.devices)
            result: Value = LayoutsPlanned(layouts=dict(planned))
        except BaseException as error:  # noqa: BLE001 (reported to the supervisor)
            traceback.print_exc()
            result = as_failure(error)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(result.model_dump_json())
        return 0

    def _read_plan(self) -> None:
        assert self._plan_pipe is not None
        data = os.read(self._plan_pipe, 1 << 16)
        self._plan_json += data
        if data:
            return
        os.close(self._plan_pipe)
        self._plan_pipe = None
        try:
            self._send(read_message(decode_json(self._plan_json)))
        except ValueError:
            error = TrainingError(
                "The planning process was killed.", hint="See worker.log for the cause."
            )
            self._send(as_failure(error))

    def _reap(self) -> None:
        """Reap ended children and report their exit codes."""
        for worker, code in self._children.reap():
            self._report_exit(worker, code)

    def _report_exit(self, worker: int, code: int) -> None:
        if worker >= 0:
            self._send(Exited(worker=worker, code=code))

    def _send(self, message: Value) -> None:
        try:
            self._client.send(message)
        except ControlLostError:
            self._client.drop()

    def _shut_down(self) -> int:
        """Give dismissed children a moment to exit, then kill them."""
        for worker, code in self._children.end(patience_s=_LEAVE_S):
            self._report_exit(worker, code)
        return 1 if self._is_refused else 0
