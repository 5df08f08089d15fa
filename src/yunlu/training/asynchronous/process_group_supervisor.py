"""Processes that are forked again when they die, and of which none stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from yunlu.core.errors import TrainingError, YunluError
from yunlu.runs.events import WorkerLost
from yunlu.runs.run_store import Area, Log, last_record, require_local
from yunlu.training.attempt import as_user_error
from yunlu.training.communication.servers.link import ServerLostError
from yunlu.training.elastic.event_reporter import EventReporter
from yunlu.training.elastic.messages import Failed, as_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from yunlu.runs.run_store import RunStore

STOPPED = 10
"""Exit code of who was asked to stop, and did."""
_HOPELESS = 11
"""Of who failed in a way that another try would not mend."""
_PARENT_DEATH_SIGNAL = 1
_LOOK_S = 0.05
_QUICK_S = 20.0
_QUICK_DEATHS = 5
_REST_S = 0.25
_LEAVE_S = 10.0


@dataclass
class ManagedProcess:
    """One process that there is to be, whoever fills it."""

    name: str
    body: Callable[[], int | None]
    number: int | None = None
    """Of a worker."""
    is_server: bool = False
    """Lives until it is told to end."""
    is_stoppable: bool = False
    """Listens to SIGTERM in its own time."""
    pid: int = 0
    code: int | None = None
    is_over: bool = False
    """It did what it was for."""
    started_at: float = 0.0
    quick_deaths: int = 0
    """In a row."""
    due_at: float = 0.0
    words: int = -1
    """Where a failure is told."""
    failure: Failed | None = None
    """The first of those."""


class RestartLimitError(TrainingError):
    """A process died again and again."""


class ProcessGroupSupervisor:
    """Forks processes, and forks them again when they die.

    Args:
        directory: Of the run: logs go there.
        in_child: Called in each of them first: what of the parent's it is to let go of.
        tell_loss: Told of a death that is made good: who, its pid, exit code, and why in words; else
            it becomes an event.
        rest: What to do for so many seconds while somebody is waited for.
        is_ending: Whether all are asked to go: a cluster asks everyone at once, and then deaths are no news.
    """

    def __init__(
        self,
        directory: RunStore,
        *,
        in_child: Callable[[], None] = lambda: None,
        tell_loss: Callable[[ManagedProcess, int, int, str], None] | None = None,
        rest: Callable[[float], None] = time.sleep,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._directory, self._is_ending = directory, is_ending
        self._in_child, self._rest = in_child, rest
        self._tell_loss = tell_loss or self._emit_fault
        self._logbook = EventReporter(directory)
        self._living: dict[int, ManagedProcess] = {}

    def keep_alive(self, *places: ManagedProcess) -> None:
        """Start those that are to live and do not."""
        for place in places:
            if not place.pid and not place.is_over and time.monotonic() >= place.due_at:
                self._start(place)

    def complete(self, place: ManagedProcess) -> None:
        """Start a process, and wait until it has done what it is for."""
        self._start(place)
        while place.pid:
            self._rest(_LOOK_S)
            self.bury()

    def bury(self) -> None:
        """See who has died, and why; raises where another try would be in vain."""
        for pid, place in list(self._living.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._living[pid]
                self._take_leave(place, os.waitstatus_to_exitcode(status))

    def dismiss(self, place: ManagedProcess) -> None:
        """Let one go that is no longer needed."""
        place.is_over = True
        if place.pid:
            os.kill(place.pid, signal.SIGTERM)
            self._part_with([place], patience_s=_LEAVE_S)

    def end(self, *, patience_s: float = 0.0) -> None:
        """Nobody stays behind; ``patience_s`` for those who are about to leave by themselves."""
        others = [place for place in self._living.values() if not place.is_server]
        self._part_with(others, patience_s=patience_s)
        servers = list(self._living.values())
        for place in servers:
            os.kill(place.pid, signal.SIGTERM)
        self._part_with(servers, patience_s=_LEAVE_S)

    def _part_with(self, places: Iterable[ManagedProcess], *, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        for place in places:
            is_killed = False
            while not os.waitpid(place.pid, os.WNOHANG)[0]:
                if not is_killed and time.monotonic() >= deadline:
                    is_killed = True
                    os.kill(place.pid, signal.SIGKILL)
                time.sleep(_LOOK_S / 5)
            os.close(place.words)
            del self._living[place.pid]

    def _take_leave(self, place: ManagedProcess, code: int) -> None:
        pid, place.pid, place.code = place.pid, 0, code
        failure = _read_words(place.words)
        if code in {0, STOPPED} and not place.is_server:
            place.is_over = True
            return
        place.failure = place.failure or failure
        words = self._logbook.explain_exit(0, code) if failure is None else failure.message
        if code == _HOPELESS or place.name == "planner":
            raise _as_error(failure, f"The {place.name} {words}.")
        if not (code in {0, -signal.SIGTERM} and self._is_ending()):
            self._tell_loss(place, pid, code, words)
        is_quick = time.monotonic() - place.started_at < _QUICK_S
        place.quick_deaths = place.quick_deaths + 1 if is_quick else 1
        if place.quick_deaths >= _QUICK_DEATHS:
            again = f"{place.name} died {place.quick_deaths} times in a row: {words}."
            raise _as_error(place.failure, again)
        place.due_at = time.monotonic() + _REST_S * (place.quick_deaths - 1)

    def _emit_fault(self, place: ManagedProcess, pid: int, code: int, words: str) -> None:
        self._logbook.emit(
            WorkerLost(
                cause="killed" if code < 0 else "failed",
                worker=place.name if place.number is None else str(place.number),
                rank=place.number,
                host=socket.gethostname(),
                pid=pid,
                step=last_step(self._directory),
                detail=words,
            )
        )

    def _start(self, place: ManagedProcess) -> None:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # What is asked of a child before it listens must not be lost, nor end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self._live_as(place, parent, writer)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(writer)
        place.pid, place.words, place.started_at = pid, reader, time.monotonic()
        self._living[pid] = place

    def _live_as(self, place: ManagedProcess, parent: int, writer: int) -> NoReturn:
        """Never returns: what stands on the stack is the parent's."""
        code = 1
        try:
            # Linux shares the processor out by session: workers of one would get the share of one.
            os.setsid()
            _end_with(parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if not place.is_stoppable:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            for other in self._living.values():
                os.close(other.words)
            self._in_child()
            if place.name != "planner":
                _print_to(self._directory, f"{Area.LOGS}/{place.name}.log")
            code = place.body() or 0
        except BaseException as error:  # noqa: BLE001 (nothing may escape into the parent's code)
            traceback.print_exc()
            is_certain = isinstance(error, YunluError) and not isinstance(error, ServerLostError)
            is_certain = is_certain and not place.is_server
            code = _HOPELESS if is_certain else 1
            with suppress(OSError):
                os.write(writer, describe(error).model_dump_json().encode())
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def describe(error: BaseException) -> Failed:
    """A failure, in words for whoever can mend it."""
    told = as_failure(error)
    shown = as_user_error(error) if isinstance(error, Exception) else None
    updates: dict[str, Any] = {
        "traceback": told.traceback[-20_000:]
    }  # a pipe holds no more at once
    if shown is not None:
        updates |= {"code": shown.code, "message": shown.message[:2000], "hint": shown.hint}
    return told.model_copy(update=updates)


def _read_words(descriptor: int) -> Failed | None:
    with os.fdopen(descriptor, "rb") as pipe:
        words = pipe.read()
    try:
        return Failed.model_validate_json(words) if words else None
    except ValueError:  # killed while it wrote
        return None


def _as_error(failure: Failed | None, otherwise: str) -> YunluError:
    if failure is None:
        return RestartLimitError(otherwise, hint="The run's logs directory has its last words.")
    error = YunluError(failure.message, hint=failure.hint)
    error.code = failure.code
    return error


def _print_to(run: RunStore, log: str) -> None:
    with require_local(run).open_text_log(log) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _end_with(parent: int) -> None:
    """Be ended together with the process that started us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # ended while we were starting
        os._exit(1)


def last_step(directory: RunStore) -> int:
    """The newest that the log of a run has."""
    last = last_record(directory, Log.METRICS)
    return 0 if last is None else int(last["step"])
