"""Supervisor of forked processes: restarts those that die, and ends all of them."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import TrainingError, YunluError
from yunlu.core.processes import ForkedProcesses
from yunlu.runs.events import WorkerLost
from yunlu.runs.run_store import Log, last_record
from yunlu.training.attempt import as_user_error
from yunlu.training.communication.servers.server_link import ServerLostError
from yunlu.training.elastic.event_reporter import EventReporter
from yunlu.training.elastic.messages import Failed, as_failure
from yunlu.training.elastic.node import print_to_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from yunlu.runs.run_store import RunStore

STOPPED = 10
"""Exit code of a process that was asked to stop."""
_PERMANENT_FAILURE = 11
"""Exit code after an error that a restart would not fix."""
_POLL_S = 0.05
_EARLY_EXIT_S = 20.0
_MAX_EARLY_EXITS = 5
_RESTART_S = 0.25
_LEAVE_S = 10.0


@dataclass
class ManagedProcess:
    """A process to be kept running; restarts have other pids."""

    name: str
    body: Callable[[], int | None]
    number: int | None = None
    """Of a worker."""
    is_server: bool = False
    """Runs until it is terminated."""
    is_stoppable: bool = False
    """Handles SIGTERM itself."""
    pid: int = 0
    code: int | None = None
    is_done: bool = False
    """It has completed."""
    started_at: float = 0.0
    early_exits: int = 0
    """Consecutive exits shortly after a start."""
    due_at: float = 0.0
    pipe: int = -1
    """Descriptor of the pipe for its failure."""
    failure: Failed | None = None
    """Its first failure."""


class RestartLimitError(TrainingError):
    """A process died repeatedly."""


class ProcessGroupSupervisor:
    """Forks processes and restarts those that die.

    Args:
        directory: The run; logs are written there.
        in_child: Called first in each child, to close what it inherits.
        report_loss: Called on a death that leads to a restart, with process, pid, exit code and cause; by default
            emits an event.
        wait: Called with seconds to wait for a process.
        is_ending: Whether all are asked to end: a cluster signals all at once, and exits are then expected.
    """

    def __init__(
        self,
        directory: RunStore,
        *,
        in_child: Callable[[], None] = lambda: None,
        report_loss: Callable[[ManagedProcess, int, int, str], None] | None = None,
        wait: Callable[[float], None] = time.sleep,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._directory, self._is_ending = directory, is_ending
        self._in_child, self._wait = in_child, wait
        self._report_loss = report_loss or self._emit_fault
        self._reporter = EventReporter(directory)
        self._forked = ForkedProcesses[ManagedProcess]()

    def keep_alive(self, *processes: ManagedProcess) -> None:
        """Start processes that should run and do not."""
        for process in processes:
            if not process.pid and not process.is_done and time.monotonic() >= process.due_at:
                self._start(process)

    def run_to_end(self, process: ManagedProcess) -> None:
        """Start a process and wait until it completes."""
        self._start(process)
        while process.pid:
            self._wait(_POLL_S)
            self.reap()

    def reap(self) -> None:
        """Reap exited processes; raises if a restart would not help."""
        for process, code in self._forked.reap():
            self._handle_exit(process, code)

    def dismiss(self, process: ManagedProcess) -> None:
        """Terminate a process that is no longer needed."""
        process.is_done = True
        if process.pid:
            os.kill(process.pid, signal.SIGTERM)
            self._wait_for_exit([process], patience_s=_LEAVE_S)

    def end(self, *, patience_s: float = 0.0) -> None:
        """End all processes; ``patience_s`` for those that exit by themselves."""
        others = [process for process in self._forked.running.values() if not process.is_server]
        self._wait_for_exit(others, patience_s=patience_s)
        servers = list(self._forked.running.values())
        for process in servers:
            os.kill(process.pid, signal.SIGTERM)
        self._wait_for_exit(servers, patience_s=_LEAVE_S)

    def _wait_for_exit(self, processes: Iterable[ManagedProcess], *, patience_s: float) -> None:
        pids = [process.pid for process in processes]
        for process, _ in self._forked.end(pids, patience_s=patience_s):
            os.close(process.pipe)

    def _handle_exit(self, process: ManagedProcess, code: int) -> None:
        pid, process.pid, process.code = process.pid, 0, code
        failure = _read_failure(process.pipe)
        if code in {0, STOPPED} and not process.is_server:
            process.is_done = True
            return
        process.failure = process.failure or failure
        cause = self._reporter.explain_exit(0, code) if failure is None else failure.message
        if code == _PERMANENT_FAILURE or process.name == "planner":
            raise _as_error(failure, f"The {process.name} {cause}.")
        if not (code in {0, -signal.SIGTERM} and self._is_ending()):
            self._report_loss(process, pid, code, cause)
        is_early = time.monotonic() - process.started_at < _EARLY_EXIT_S
        process.early_exits = process.early_exits + 1 if is_early else 1
        if process.early_exits >= _MAX_EARLY_EXITS:
            message = f"{process.name} died {process.early_exits} times in a row: {cause}."
            raise _as_error(process.failure, message)
        process.due_at = time.monotonic() + _RESTART_S * (process.early_exits - 1)

    def _emit_fault(self, process: ManagedProcess, pid: int, code: int, cause: str) -> None:
        self._reporter.emit(
            WorkerLost(
                cause="killed" if code < 0 else "failed",
                worker=process.name if process.number is None else str(process.number),
                rank=process.number,
                host=socket.gethostname(),
                pid=pid,
                step=last_step(self._directory),
                detail=cause,
            )
        )

    def _start(self, process: ManagedProcess) -> None:
        reader, writer = os.pipe()

        def body() -> int:
            os.close(reader)
            return self._run_child(process, writer)

        process.pid = self._forked.fork(
            process, body, dies_with_parent=True, blocks_sigterm=process.is_stoppable
        )
        os.close(writer)
        process.pipe, process.started_at = reader, time.monotonic()

    def _run_child(self, process: ManagedProcess, writer: int) -> int:
        try:
            for other in self._forked.running.values():
                os.close(other.pipe)
            self._in_child()
            if process.name != "planner":
                print_to_log(self._directory, process.name)
            return process.body() or 0
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            traceback.print_exc()
            with suppress(OSError):
                os.write(writer, describe_failure(error).model_dump_json().encode())
            is_permanent = isinstance(error, YunluError) and not isinstance(error, ServerLostError)
            return _PERMANENT_FAILURE if is_permanent and not process.is_server else 1


def describe_failure(error: BaseException) -> Failed:
    """A failure as shown to the user."""
    failure = as_failure(error)
    shown = as_user_error(error) if isinstance(error, Exception) else None
    updates: dict[str, Any] = {"traceback": failure.traceback[-20_000:]}  # capacity of a pipe
    if shown is not None:
        updates |= {"code": shown.code, "message": shown.message[:2000], "hint": shown.hint}
    return failure.model_copy(update=updates)


def _read_failure(descriptor: int) -> Failed | None:
    with os.fdopen(descriptor, "rb") as pipe:
        text = pipe.read()
    try:
        return Failed.model_validate_json(text) if text else None
    except ValueError:  # killed while writing
        return None


def _as_error(failure: Failed | None, message: str) -> YunluError:
    if failure is None:
        return RestartLimitError(message, hint="See its log in the run's logs directory.")
    error = YunluError(failure.message, hint=failure.hint)
    error.code = failure.code
    return error


def last_step(directory: RunStore) -> int:
    """The newest step in the run's metrics."""
    last = last_record(directory, Log.METRICS)
    return 0 if last is None else int(last["step"])
