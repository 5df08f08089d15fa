"""Processes that Yunlu starts or forks: identify, signal, stop and reap them, and say how they ended."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Generic, NoReturn, TypeVar

from yunlu.core.cgroup import count_oom_kills
from yunlu.core.settings import worker_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

    import psutil

_SAME_START_S = 0.005  # half a clock tick of the kernel
_STOP_S = 2.0
_POLL_S = 0.01
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # options of Linux's prctl
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ProcessHandle:
    """A process of this machine, by pid and start time: a pid alone may have been reused."""

    pid: int
    started_at: float
    """As ``start_time`` gives it."""

    def find(self) -> psutil.Process | None:
        """The process, unless it has ended."""
        import psutil  # noqa: PLC0415 - not needed to start a process

        try:
            if self.pid <= 0:
                return None
            process = psutil.Process(self.pid)
            is_same = is_same_start(start_time(self.pid), self.started_at)
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.Error, OSError, ValueError, OverflowError, TypeError):  # or no pid at all
            return None

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.find() is not None

    def send_signal(self, number: int, *, to_group: bool = False) -> None:
        """Signal it, or the process group that it leads, unless it has ended."""
        if self.find() is not None:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if to_group else os.kill)(self.pid, number)


def start_time(pid: int | None = None) -> float:
    """Start time of a process, by default of this one, in seconds since boot.

    Not by the system clock: when that is set, every process would seem to be another one.
    """
    if sys.platform != "linux":
        import psutil  # noqa: PLC0415 - not needed to start a process

        return psutil.Process(pid).create_time()
    try:
        line = Path(f"/proc/{pid or 'self'}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The name in brackets may hold spaces; the start is the 22nd field, the 20th after the name.
    return int(line.rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def is_same_start(one: float, other: float) -> bool:
    """Whether two start times are of one process."""
    return abs(one - other) < _SAME_START_S


def process_began_at() -> float:
    """When this process started, by the system clock."""
    if sys.platform != "linux":
        return start_time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start_time())


def start_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    log: IO[str] | IO[bytes] | None = None,
    is_piped: bool = False,
    errors: IO[bytes] | int | None = None,
    directory: Path | str | None = None,
    own_session: bool = False,
    own_group: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program of ours; without pipes its standard input is closed.

    ``environment``: by default that of workers. ``errors``: where its standard error goes, if not to the
    log. ``own_session``: it outlives our terminal and process group.
    """
    return subprocess.Popen(  # noqa: S603 (callers name our own interpreter and modules)
        command,
        stdin=subprocess.PIPE if is_piped else subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_piped else log,
        stderr=errors if log is None else subprocess.STDOUT,
        cwd=directory,
        env=worker_environment() if environment is None else environment,
        start_new_session=own_session,
        process_group=0 if own_group else None,
    )


def reap_in_background(child: subprocess.Popen[bytes]) -> None:
    """Wait for a child in a thread, so that a long-lived process collects no zombies."""
    threading.Thread(target=child.wait, name=f"wait-{child.pid}", daemon=True).start()


def stop_process(
    child: subprocess.Popen[bytes], *, grace_s: float = _STOP_S, number: int = signal.SIGTERM
) -> None:
    """Ask a child to end, kill it after a grace period, and reap it; ``number`` 0: it was asked before."""
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    child.send_signal(number)
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def piped_process(
    command: Sequence[str], *, errors: int | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """A child that ends with its standard input (``end_with_parent``); stopped at the end of the block."""
    child = start_process(command, is_piped=True, errors=errors)
    try:
        yield child
    finally:
        stop_process(child)


def end_with_parent() -> None:
    """Exit when standard input closes: the parent holds its other end, and its death closes it."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would be held at interpreter exit
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when the one that started it ends."""
    _call_prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended during the start
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs."""
    _call_prctl(_CHILD_SUBREAPER, 1)


def reap_children() -> tuple[dict[int, int], bool]:
    """Exit codes of children that have ended, by pid, and whether any child is left."""
    codes: dict[int, int] = {}
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return codes, False
    return codes, True


def kill_descendants() -> None:
    """Kill all children and theirs; what they start meanwhile is left to the next call."""
    import psutil  # noqa: PLC0415 - not needed to start a process

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()


def describe_exit(code: int) -> str:
    """How a process ended; negative codes are signals."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


class ExitDescriber:
    """Says how processes ended, and which of them the system killed for want of memory."""

    def __init__(self) -> None:
        self._oom_kills = _own_oom_kills()

    def describe(self, code: int) -> str:
        """As ``describe_exit``; called once for each process."""
        text = describe_exit(code)
        if code == -signal.SIGKILL and (kills := _own_oom_kills()) > self._oom_kills:
            self._oom_kills = kills
            text += ": killed by the system, out of memory"
        return text


@contextmanager
def forward_signals(stop: Callable[[], None]) -> Generator[None]:
    """Call ``stop`` instead of ending at a stop signal, so that a child ends in order."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return

    def forward(*_: object) -> None:
        stop()

    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class SignalPipe:
    """Makes signals readable, so that a loop that waits for sockets wakes up for them."""

    def __init__(self) -> None:
        self._writer, self._reader = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.setblocking(False)

    def listen(self, *numbers: int) -> None:
        """Receive these signals; called by the main thread."""
        for number in numbers:
            signal.signal(number, _take_note)
        self.watch()

    def watch(self) -> None:
        """Receive every signal that has a handler; called by the main thread."""
        # Python handlers wait until a call of a library returns; this descriptor is written at once.
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def unwatch(self) -> None:
        """Receive no more signals."""
        signal.set_wakeup_fd(-1)

    def wake(self) -> None:
        """Make it readable; from any thread."""
        with suppress(OSError):
            self._writer.send(b"\0")

    def take(self) -> frozenset[int]:
        """Signals since the last call."""
        try:
            return frozenset(self._reader.recv(4096))
        except BlockingIOError:
            return frozenset()

    def fileno(self) -> int:
        """Descriptor that becomes readable."""
        return self._reader.fileno()

    @property
    def descriptors(self) -> tuple[int, int]:
        """Both ends."""
        return self._writer.fileno(), self._reader.fileno()

    def close(self) -> None:
        """Close both ends."""
        self._writer.close()
        self._reader.close()


class ForkedProcesses(Generic[_T]):
    """Children that a single-threaded process forks, each with what it stands for."""

    def __init__(self) -> None:
        self.running: dict[int, _T] = {}
        """By pid."""

    def fork(
        self,
        what: _T,
        body: Callable[[], int | None],
        *,
        dies_with_parent: bool = False,
        blocks_sigterm: bool = False,
    ) -> int:
        """Fork a child in a session of its own; ``body`` returns its exit code. Returns its pid.

        ``blocks_sigterm``: until ``body`` unblocks it, so that none is lost before it has a handler.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid() if dies_with_parent else None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            _run_forked(body, parent, blocks_sigterm=blocks_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.running[pid] = what
        return pid

    def reap(self, pids: Collection[int] | None = None) -> Iterator[tuple[_T, int]]:
        """What has ended of these children, by default of all, and its exit code."""
        for pid in [pid for pid in self.running if pids is None or pid in pids]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                yield self.running.pop(pid), os.waitstatus_to_exitcode(status)

    def end(
        self,
        pids: Collection[int] | None = None,
        *,
        patience_s: float,
        wait: Callable[[float], object] = time.sleep,
    ) -> Iterator[tuple[_T, int]]:
        """Wait for children, by default all, to end; kill those that have not after ``patience_s``."""
        pids = list(self.running) if pids is None else pids
        deadline = time.monotonic() + patience_s
        is_killed = False
        while True:
            yield from self.reap(pids)
            left = [pid for pid in pids if pid in self.running]
            if not left:
                return
            if not is_killed and time.monotonic() >= deadline:
                is_killed = True
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            wait(_POLL_S)


def _run_forked(
    body: Callable[[], int | None], parent: int | None, *, blocks_sigterm: bool
) -> NoReturn:
    """Never returns, since the stack is the parent's."""
    code = 1
    try:
        # The Linux scheduler shares CPU by session: workers in one session would get the share of one.
        os.setsid()
        if parent is not None:
            die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        if not blocks_sigterm:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        code = body() or 0
    except BaseException:  # noqa: BLE001 (must not reach the parent's code)
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _own_oom_kills() -> int:
    """OOM kills in this process's control group so far."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition(":")[2].strip()
    except OSError:
        return 0
    root = Path("/sys/fs/cgroup")
    folders = (root / group.strip("/"), root)
    return next(map(count_oom_kills, filter(lambda f: (f / "memory.events").exists(), folders)), 0)


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _take_note(*_: object) -> None:
    """A signal only wakes the loop."""
