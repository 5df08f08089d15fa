"""An attempt at a run: its lock, its start, how it is asked to stop, and how it failed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import StoreError, TrainingError, YunluError, is_disk_full
from yunlu.core.processes import process_began_at, start_time
from yunlu.runs.events import AttemptStarted, StateChanged
from yunlu.runs.run_store import Claim, HeldClaim
from yunlu.training.callbacks import StopRequest
from yunlu.training.memory.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Generator

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
    own_process = began_at is None
    began_at = process_began_at() if began_at is None else began_at
    directory.emit(
        AttemptStarted(
            number=number,
            pid=os.getpid(),
            process_started_at=start_time(),
            began_at=began_at,
            own_process=own_process,
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


@contextmanager
def signals_as_stop() -> Generator[StopRequest]:
    """Turn SIGTERM and Ctrl-C into a stop request for the next step boundary."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals belong to the main thread
        return
    previous = {
        number: signal.signal(number, stop.set) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def as_user_error(error: Exception) -> YunluError:
    """Convert any exception to an error with a message and a hint for the user."""
    if isinstance(error, YunluError):
        return error
    if is_disk_full(error):
        return TrainingError(
            f"The disk is full: {error}", hint="Free some space, then `yunlu resume`."
        )
    if is_out_of_memory(error):
        return TrainingError(
            f"Memory ran out: {error}", hint="Lower train.micro_batch, then `yunlu resume`."
        )
    internal = YunluError(
        f"{type(error).__name__}: {error}", hint="`--debug` shows where; worker.log keeps it."
    )
    internal.code = "internal"
    return internal
