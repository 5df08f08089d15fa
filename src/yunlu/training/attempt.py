"""An attempt at a run: its lock, its start, its environment, how it is asked to stop, and how it failed.

Supervisors make attempts, too: nothing here loads torch before an error of torch has to be named.
"""

from __future__ import annotations

import errno
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu import __version__
from yunlu.core.errors import StoreError, TrainingError, YunluError, is_disk_full
from yunlu.core.processes import SignalPipe, process_began_at, start_time
from yunlu.core.secrets import mask
from yunlu.runs.events import AttemptStarted, StateChanged
from yunlu.runs.run_store import Claim, HeldClaim

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from yunlu.hardware.fleet import Machine
    from yunlu.runs.run_store import RunStore
    from yunlu.runs.states import RunState


class RunBusyError(StoreError):
    """Another worker holds the lock of the run."""


def change_state(directory: RunStore, state: RunState, **data: Any) -> RunState:
    """Report the new state of the run."""
    directory.emit(StateChanged(state=state, **data))
    return state


def latest_attempt(directory: RunStore) -> tuple[int, float]:
    """Number of the current attempt, and when it began."""
    attempts = read_attempts(directory)
    return len(attempts), attempts[-1].began_at


def read_attempts(run: RunStore) -> list[AttemptStarted]:
    """All attempts at the run so far."""
    return [event for event, _ in run.read_events() if isinstance(event, AttemptStarted)]


def begin_attempt(directory: RunStore, *, began_at: float | None = None) -> tuple[int, float]:
    """Report a new attempt; pid and start time together identify its process.

    ``began_at`` is given where the run is younger than the process.
    """
    number = len(read_attempts(directory)) + 1
    is_own_process = began_at is None
    began_at = process_began_at() if began_at is None else began_at
    directory.emit(
        AttemptStarted(
            number=number,
            pid=os.getpid(),
            process_started_at=start_time(),
            began_at=began_at,
            own_process=is_own_process,
        )
    )
    return number, began_at


@contextmanager
def run_lock(directory: RunStore, *, passed_on: str | None = None) -> Generator[HeldClaim]:
    """Hold the claim on the run: two workers on one run would destroy each other's work.

    ``passed_on``: the claim, where the program that this process was before held it.
    """
    with ExitStack() as stack:
        claim = directory.claim(Claim.WORKER, wait=False, passed_on=passed_on)
        try:
            held = stack.enter_context(claim)
        except BlockingIOError as error:
            raise RunBusyError(
                f"Run {directory.id} already has a worker.", hint="`yunlu ps` shows it."
            ) from error
        yield held


class StopRequestedError(BaseException):
    """What was being done is abandoned: a stop was requested. No failure, so no handler of failures takes it."""


_UNWINDING = False, False
"""After a stop request nothing is interrupted again: what follows cleans up."""


class StopRequest:
    """Set by a signal; read at step boundaries, and raised where work may be abandoned."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._interrupts = self._may_exit = False

    def set(self) -> None:
        """Request a stop at the next step boundary."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether a stop was requested."""
        return self._event.is_set()

    def receive(self, *_: object) -> None:
        """Signal handler: request a stop, and end what may be abandoned."""
        self._event.set()
        if self._interrupts:
            self._interrupts = False  # a second signal must not disturb the cleaning up
            raise StopRequestedError

    @contextmanager
    def interrupting(self, *, may_exit: bool = False) -> Generator[None]:
        """A stop request ends the block at once, with ``StopRequestedError``.

        For work that changes nothing which is kept, or can be undone: Python runs the handler between two
        of its instructions, so that an operator of torch comes to its end, and nothing after it begins.

        ``may_exit``: the process may end instead, where such a call takes long: see ``signals_as_stop``.
        """
        outside = self._interrupts, self._may_exit
        self._interrupts, self._may_exit = True, may_exit or self._may_exit
        try:
            if self._event.is_set():
                raise StopRequestedError
            yield
        finally:
            self._interrupts, self._may_exit = outside if not self._event.is_set() else _UNWINDING

    @property
    def is_stuck(self) -> bool:
        """Whether the process may end, and the main thread has not come to run the handler."""
        return self._may_exit


@contextmanager
def signals_as_stop(on_stuck: Callable[[], None] | None = None) -> Generator[StopRequest]:
    """Turn SIGTERM and Ctrl-C into a stop request.

    ``on_stuck``: called in a thread before this process ends, where the main thread computes in one long
    call of a library, such as one that trains a tokenizer, while it may be ended.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals belong to the main thread
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, stop.receive) for number in numbers}
    pipe = None if on_stuck is None else SignalPipe()
    if pipe is not None and on_stuck is not None:
        pipe.watch()
        arguments = pipe, stop, on_stuck
        threading.Thread(target=_end_if_stuck, args=arguments, name="stop", daemon=True).start()
    try:
        yield stop
    finally:
        if pipe is not None:
            pipe.unwatch()
        for number, handler in previous.items():
            signal.signal(number, handler)


_STUCK_S = 1.0


def _end_if_stuck(pipe: SignalPipe, stop: StopRequest, on_stuck: Callable[[], None]) -> None:
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    while not stop_signals & pipe.take():
        select.select([pipe], [], [])
    time.sleep(_STUCK_S)
    if stop.is_stuck:
        on_stuck()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def as_user_error(error: Exception) -> YunluError:
    """Convert any exception to an error with a message and a hint for the user."""
    if isinstance(error, YunluError):
        return error
    if is_disk_full(error):
        return TrainingError(
            f"The disk is full: {error}", hint="Free some space, then `yunlu resume`."
        )
    if _lacks_memory(error):
        return TrainingError(
            f"Memory ran out: {error}", hint="Lower train.micro_batch, then `yunlu resume`."
        )
    internal = YunluError(
        f"{type(error).__name__}: {error}", hint="`--debug` shows where; worker.log keeps it."
    )
    internal.code = "internal"
    return internal


def _lacks_memory(error: Exception) -> bool:
    if "torch" in sys.modules:
        from yunlu.training.memory.out_of_memory import is_out_of_memory  # noqa: PLC0415 - loads torch

        return is_out_of_memory(error)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "datasets",
    "keras",
    "scikit-learn",
    "pyarrow",
    "pillow",
    "soundfile",
    "pytorch-optimizer",
    "tensorboard",
    "wandb",
    "mlflow",
    "fsspec",
    "s3fs",
    "pydantic",
)
"""Packages whose version can change what a run computes or where it logs."""

_GIT_TIMEOUT_S = 5.0


def describe_environment(machine: Machine) -> dict[str, Any]:
    """Data of the environment event. Never environment variables, never credentials."""
    commit, dirty = read_git(Path.cwd())
    return {
        "yunlu": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": machine.hostname,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "devices": [device.model_dump(mode="json") for device in machine.devices],
        "packages": package_versions(),
        "git_commit": commit,
        "git_dirty": dirty,
        "argv": [mask(argument) for argument in sys.argv],
    }


def package_versions() -> dict[str, str]:
    """Versions of the installed packages in ``PACKAGES``, from metadata, without importing them."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def read_git(directory: Path) -> tuple[str | None, bool | None]:
    """Commit of the directory and whether tracked files differ from it; None where unknown."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None
    # Untracked files are left out: counting them can take minutes beside a large data set.
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        completed = subprocess.run(  # noqa: S603 (fixed arguments, no shell)
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
