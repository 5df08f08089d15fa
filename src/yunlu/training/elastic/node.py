"""Node agents: one process per machine that loads data and model once and forks workers."""

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
from yunlu.core.limits import decode_json
from yunlu.core.processes import ForkedProcesses, SignalPipe, start_time
from yunlu.core.secrets import make_process_private
from yunlu.core.secure_link import is_loopback, load_tls
from yunlu.core.settings import read_settings
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, require_local
from yunlu.runs.worker_group import LOCAL, read_worker_group
from yunlu.training.elastic.control_channel import GIVE_UP_S, ControlClient, ControlLostError
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
    from yunlu.planning.layouts import Layout
    from yunlu.runs.run_store import RunStore

_TICK_S = 0.25
_QUIET_S = 3.0
"""The supervisor sends a ping every second: a remote node that receives none was cut off and
reconnects. By then the supervisor has given it up, so closing the connection loses nothing."""
WAIT_S = 600.0
"""Time to look for the supervisor; a node that is not its own holds no device, or goes on when the run is resumed."""
_LEAVE_S = 6.0


Parts = TypeVar("Parts")


def run_node(
    *,
    prepare: Callable[[RunStore], Parts],
    plan: Callable[[RunStore, Parts, int], Mapping[int, Layout]],
    body: Callable[[WorkerAgent, Parts], None],
) -> int:
    """Command line of a node; ``yunlu.training.elastic`` describes the three functions."""
    options = start_node_process(node_arguments("yunlu node"))
    node = ElasticNodeAgent(
        open_run(options.run), options.node, options.devices, prepare=prepare, plan=plan, body=body
    )
    return node.run()


def node_arguments(name: str) -> argparse.ArgumentParser:
    """Command line of the main module of a node."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("run", type=Path)
    parser.add_argument("--node", required=True)
    parser.add_argument("--devices", type=int, required=True)
    return parser


def start_node_process(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line and make the process fit to fork."""
    options = arguments.parse_args()
    make_process_private()
    # fork() does not copy threads: torch must not have started any.
    torch.set_num_threads(1)
    return options


def print_to_log(run: RunStore, name: str) -> None:
    """In a forked child: write its output to a log of the run."""
    with require_local(run).open_text_log(f"{Area.LOGS}/{name}.log") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class NodeAgent:
    """A node of any worker group: registers, stays in touch, reports, and is dismissed or refused.

    Single-threaded, because it forks.
    """

    def __init__(self, run: RunStore, name: str, devices: int, client: ControlClient) -> None:
        self.store, self.name, self.devices = run, name, devices
        self._client = client
        self._is_dismissed = False
        self._is_refused = False
        self._successor = ""
        """Main module that this process execs at the end."""

    def _connect(self) -> bool:
        """Try to register with the current coordinator."""
        is_connected = self._client.connect(
            NodeHello(
                node=self.name,
                host=socket.gethostname(),
                pid=os.getpid(),
                process_started_at=start_time(),
                devices=self.devices,
            )
        )
        if is_connected and not is_loopback(self._client.local_host):
            load_tls()  # before the fork: workers of this node may connect to those of other machines
        return is_connected

    def _stay_in_touch(self) -> None:
        """Handle what comes within a moment, and show that this node is there."""
        try:
            self._wait(_TICK_S)
            self._client.send(Ping())
            self._client.check_quiet()
        except ControlLostError:
            self._client.drop()

    def _wait(self, wait_s: float) -> None:
        connection = self._client.connection
        watched = self._watched()
        watched += [] if connection is None else [connection]
        readable, _, _ = select.select(watched, [], [], wait_s)
        self._serve(readable)
        if connection is not None and connection in readable:
            for message in self._client.receive():
                self._handle(message)

    def _watched(self) -> list[Any]:
        """What to wait for besides messages."""
        return []

    def _serve(self, readable: list[Any]) -> None:
        """Serve what was waited for besides messages."""

    def _is_abandoned(self, wait_s: float) -> bool:
        """Whether the run ended, or its coordinator was looked for in vain."""
        if self._client.is_up:
            return False
        lost_s = time.monotonic() - self._client.lost_at
        return lost_s > wait_s or (lost_s > 1 and self._client.is_over())

    def _handle(self, message: Message) -> None:
        match message:
            case Leave():
                self._is_dismissed, self._successor = True, message.successor
            case Reply() if not message.is_accepted:
                sys.stderr.write(f"the run rejected this node: {message.text}\n")
                self._is_refused = self._is_dismissed = True
            case _:
                pass

    def _send(self, message: Value) -> None:
        """Send, if connected; what is lost is told again by the next registration."""
        try:
            self._client.send(message)
        except ControlLostError:
            self._client.drop()

    def _close_inherited(self) -> None:
        """In a forked child: close the node's connection."""
        with suppress(OSError):
            if self._client.connection is not None:
                self._client.connection.close()


class ElasticNodeAgent(NodeAgent):
    """Forks the workers and the planner that the coordinator asks for."""

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
        quiet_s = _QUIET_S * read_settings().patience
        client = ControlClient(run) if name == LOCAL else ControlClient(run, quiet_s=quiet_s)
        super().__init__(run, name, devices, client)
        self._prepare, self._plan, self._body = prepare, plan, body
        self._parts: Any = None
        self._children = ForkedProcesses[int]()
        """Worker numbers; -1 for the planner."""
        self._plan_pipe: int | None = None
        self._plan_json = b""
        self._is_leaving = False
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
        while not self._connect():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _poll(self) -> None:
        if not self._client.is_up and not self._reconnect():
            self._wait(0.05)
            self._reap()
            return
        self._stay_in_touch()
        self._reap()
        if self._is_leaving and not self._children.running:
            self._is_dismissed = True

    def _watched(self) -> list[Any]:
        return [self._signals, *([] if self._plan_pipe is None else [self._plan_pipe])]

    def _serve(self, readable: list[Any]) -> None:
        if self._signals in readable:
            self._handle_signals()
        if self._plan_pipe in readable:
            self._read_plan()

    def _reconnect(self) -> bool:
        group = read_worker_group(self.store)
        if group is not None and group.node_module == ASYNC_NODE and self.name != LOCAL:
            # The run became asynchronous while this node was disconnected.
            self._is_dismissed, self._successor = True, ASYNC_NODE
            return False
        if self._connect():
            self._send(Prepared())
            return True
        if self._is_abandoned(GIVE_UP_S if self.name == LOCAL else WAIT_S):
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
            case _:
                super()._handle(message)

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
        self._close_inherited()
        if writer is not None:
            return self._make_plan(writer)
        print_to_log(self.store, f"worker-{request.worker}")
        return run_worker_agent(
            request.worker,
            node=self.name,
            run=self.store,
            body=lambda worker: self._body(worker, self._parts),
        )

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

    def _shut_down(self) -> int:
        """Give dismissed children a moment to exit, then kill them."""
        for worker, code in self._children.end(patience_s=_LEAVE_S):
            self._report_exit(worker, code)
        return 1 if self._is_refused else 0
