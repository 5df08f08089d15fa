"""One machine of the crew: a process that has loaded everything once, and forks workers."""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import psutil
import torch
import torch.utils._device  # pyright: ignore[reportUnusedImport] - needed by every group: loaded before the fork

from yunlu.core.errors import TrainingError
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, require_local
from yunlu.runs.worker_group import LOCAL, WRONG_TOKEN, read_crew
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
"""The supervisor speaks every second: a node on another machine that hears nothing was cut off, and
looks for it again. By then it has been given up there, and nothing is lost by hanging up."""
_WAIT_S = 600.0
"""How long it looks; a node holds no device."""
_LEAVE_S = 6.0


Parts = TypeVar("Parts")


def run_node(
    *,
    prepare: Callable[[RunStore], Parts],
    plan: Callable[[RunStore, Parts, int], Mapping[int, Layout]],
    body: Callable[[WorkerAgent, Parts], None],
) -> int:
    """The command line of a node; see ``yunlu.training.elastic`` for the three functions."""
    parser = argparse.ArgumentParser(prog="yunlu node")
    parser.add_argument("run", type=Path)
    parser.add_argument("--node", required=True)
    parser.add_argument("--devices", type=int, required=True)
    asked = parser.parse_args()
    # A fork copies no threads: none may have been started, by torch's kernels least of all.
    torch.set_num_threads(1)
    node = NodeAgent(
        open_run(asked.run), asked.node, asked.devices, prepare=prepare, plan=plan, body=body
    )
    return node.run()


class NodeAgent:
    """Single-threaded: whoever forks must not have threads."""

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
        self._contact = (
            ControlClient(run) if name == LOCAL else ControlClient(run, quiet_s=_QUIET_S)
        )
        self._parts: Any = None
        self._children: dict[int, int] = {}
        """Members by pid; -1 for the one that plans."""
        self._plan_pipe: int | None = None
        self._plan_words = b""
        self._is_leaving = False
        self._is_dismissed = False
        self._is_refused = False
        self._successor = ""
        """The program that this process is to become."""
        self._wake, self._woken = socket.socketpair()

    def run(self) -> int:
        """Until nobody needs it; its exit code."""
        self._listen_to_signals()
        if not self._call_in():
            return 1
        try:
            self._parts = self._prepare(self.store)
        except BaseException as error:  # noqa: BLE001 (the last border: it becomes a message)
            traceback.print_exc()
            with suppress(ControlLostError):
                self._contact.send(as_failure(error))
            return 1
        gc.collect()
        gc.freeze()  # what is loaded is garbage for nobody: collecting would only unshare its pages
        self._tell(Prepared())
        while not self._is_dismissed:
            self._turn()
        code = self._wind_up()
        if self._successor and self.name != LOCAL and not self._is_leaving:
            words = (self.store.address, "--node", self.name, "--devices", str(self.devices))
            exec_module(self._successor, *words)
        return code

    def _call_in(self) -> bool:
        deadline = time.monotonic() + GIVE_UP_S
        while not self._contact.connect(self._hello()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _hello(self) -> NodeHello:
        return NodeHello(
            token="",
            node=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started_at=psutil.Process().create_time(),
            devices=self.devices,
        )

    def _turn(self) -> None:
        if not self._contact.is_up and not self._find_again():
            self._wait(0.05)
            self._bury()
            return
        try:
            self._wait(_TICK_S)
            self._contact.send(Ping())
            self._contact.check_quiet()
        except ControlLostError:
            self._contact.drop()
        self._bury()
        if self._is_leaving and not self._children:
            self._is_dismissed = True

    def _wait(self, span_s: float) -> None:
        connection = self._contact.connection
        watched: list[Any] = [self._woken]
        watched += [] if connection is None else [connection]
        watched += [] if self._plan_pipe is None else [self._plan_pipe]
        readable, _, _ = select.select(watched, [], [], span_s)
        if self._woken in readable:
            self._hear_signals()
        if self._plan_pipe in readable:
            self._read_plan()
        if connection is not None and connection in readable:
            for message in self._contact.receive():
                self._hear(message)

    def _find_again(self) -> bool:
        crew = read_crew(self.store)
        if crew is not None and crew.node_module == ASYNC_NODE and self.name != LOCAL:
            # The run goes on in another way, and we were not told.
            self._is_dismissed, self._successor = True, ASYNC_NODE
            return False
        if self._contact.connect(self._hello()):
            self._tell(Prepared())
            return True
        lost_s = time.monotonic() - self._contact.lost_at
        wait_s = GIVE_UP_S if self.name == LOCAL else _WAIT_S
        if lost_s > wait_s or (lost_s > 1 and self._contact.is_over()):
            self._is_dismissed = True
        self._contact.restart_supervisor(after_s=1.5)
        return False

    def _hear(self, message: Message) -> None:
        match message:
            case Fork():
                self._fork(message)
            case Kill():
                for pid, worker in self._children.items():
                    if worker == message.worker:
                        os.kill(pid, signal.SIGKILL)
            case Leave():
                self._is_dismissed, self._successor = True, message.successor
            case Reply() if not message.is_accepted and message.text != WRONG_TOKEN:
                sys.stderr.write(f"not taken into the run: {message.text}\n")
                self._is_refused = self._is_dismissed = True
            case _:
                pass

    def _hear_signals(self) -> None:
        with suppress(BlockingIOError):
            if signal.SIGTERM in self._woken.recv(4096) and not self._is_leaving:
                self._is_leaving = True
                self._tell(LeaveNotice())

    def _fork(self, wanted: Fork) -> None:
        reader, writer = os.pipe() if wanted.is_planner else (None, None)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._live_as_child(wanted, writer)
        self._children[pid] = wanted.worker
        if writer is not None:
            os.close(writer)
            self._plan_pipe, self._plan_words = reader, b""
        else:
            started_at = psutil.Process(pid).create_time()
            self._tell(Forked(worker=wanted.worker, pid=pid, process_started_at=started_at))

    def _live_as_child(self, wanted: Fork, writer: int | None) -> NoReturn:
        """Never returns: what stands on the stack is the parent's."""
        code = 1
        try:
            # Linux shares the processor out by session: workers of one would get the share of one.
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD):  # Ctrl-C stays ignored
                signal.signal(number, signal.SIG_DFL)
            self._wake.close()
            self._woken.close()
            if self._contact.connection is not None:
                self._contact.connection.close()
            if writer is not None:
                code = self._make_plan(writer)
            else:
                self._redirect(wanted.worker)
                code = run_worker_agent(
                    wanted.worker,
                    node=self.name,
                    run=self.store,
                    body=lambda worker: self._body(worker, self._parts),
                )
        except BaseException:  # noqa: BLE001 (nothing may escape into the parent's code)
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _redirect(self, worker: int) -> None:
        with require_local(self.store).open_text_log(f"{Area.LOGS}/worker-{worker}.log") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def _make_plan(self, writer: int) -> int:
        try:
            found = self._plan(self.store, self._parts, self.devices)
            words: Value = LayoutsPlanned(layouts=dict(found))
        except BaseException as error:  # noqa: BLE001 (the last border: it becomes a message)
            traceback.print_exc()
            words = as_failure(error)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(words.model_dump_json())
        return 0

    def _read_plan(self) -> None:
        assert self._plan_pipe is not None
        data = os.read(self._plan_pipe, 1 << 16)
        self._plan_words += data
        if data:
            return
        os.close(self._plan_pipe)
        self._plan_pipe = None
        try:
            self._tell(read_message(json.loads(self._plan_words)))
        except ValueError:
            gone = TrainingError(
                "The process that plans was ended.", hint="worker.log may say why."
            )
            self._tell(as_failure(gone))

    def _bury(self) -> None:
        """Tell how each child that is over ended."""
        for pid, worker in list(self._children.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._children[pid]
                if worker >= 0:
                    self._tell(Exited(worker=worker, code=os.waitstatus_to_exitcode(status)))

    def _tell(self, message: Value) -> None:
        try:
            self._contact.send(message)
        except ControlLostError:
            self._contact.drop()

    def _listen_to_signals(self) -> None:
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, _take_note)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _wind_up(self) -> int:
        """Children that were told to leave get a moment; then they are ended."""
        deadline = time.monotonic() + _LEAVE_S
        while self._children and time.monotonic() < deadline:
            select.select([self._woken], [], [], 0.05)
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            self._bury()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return 1 if self._is_refused else 0


def _take_note(*_: object) -> None:
    """The loop has been woken: that is all a signal is for."""
