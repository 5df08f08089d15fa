"""Child processes that train on behalf of externally launched ones, and end with them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.launch import detect_launch
from yunlu.core.settings import launch_variables, worker_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from yunlu.core.launch import LaunchInfo

_WORKER = (sys.executable, "-m", "yunlu.training.external_launcher")
_run_indices = itertools.count()
"""Runs trained by this process; all ranks count alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """Result of a worker on a rank other than 0."""

    path: Path | None
    """Directory of the run, if rank 0 shared it."""
    code: int


def current_launch() -> LaunchInfo | None:
    """Rank of this process in an external launch; None if it was started alone."""
    return detect_launch(launch_variables())


def worker_command() -> tuple[str, ...]:
    """Command of rank 0 for the next run; the run's directory is appended."""
    return (*_WORKER, "--parent", str(os.getpid()), "--run-index", str(next(_run_indices)))


def run_follower() -> ChildResult:
    """Train the run of rank 0 until it ends."""
    child = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        [*worker_command(), "-"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=worker_environment(),
        process_group=0,
        text=True,
    )
    assert child.stdout is not None
    with forward_signals(lambda: child.send_signal(signal.SIGTERM)), child.stdout as lines:
        path = lines.readline().strip()
        code = child.wait()
    return ChildResult(path=Path(path) if path else None, code=code)


@contextmanager
def forward_signals(stop: Callable[[], None]) -> Generator[None]:
    """Forward stop signals to the worker, which saves and stops together with the others."""
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
