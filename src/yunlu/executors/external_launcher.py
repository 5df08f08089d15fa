"""Workers of processes that a launcher started: children that live no longer than their parents."""

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

_LAUNCHED = (sys.executable, "-m", "yunlu.training.external_launcher")
_turns = itertools.count()
"""Runs that this process has trained: the others of the launch count alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """How a worker that another one speaks for has ended."""

    path: Path | None
    """The directory of the run, if it came to know it."""
    code: int


def current_launch() -> LaunchInfo | None:
    """Where this process stands among those it was started with; none where it is alone."""
    return detect_launch(launch_variables())


def worker_command() -> tuple[str, ...]:
    """What rank 0 starts for the next run; the run's directory follows."""
    return (*_LAUNCHED, "--parent", str(os.getpid()), "--turn", str(next(_turns)))


def run_follower() -> ChildResult:
    """Train what rank 0 trains, to its end."""
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
    """Whoever tells us to go means the worker: it saves, and goes together with the others."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return

    def pass_on(*_: object) -> None:
        stop()

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, reaction in before.items():
            signal.signal(number, reaction)
