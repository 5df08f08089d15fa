"""Replace this process by another main module of ours; its pid stays the same."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from yunlu.core.settings import worker_environment
from yunlu.hardware.accelerators import worker_defaults

ASYNC_SUPERVISOR = "yunlu.training.asynchronous.supervisor"
"""Main module of an asynchronous run; it takes the place of the elastic supervisor."""
ASYNC_NODE = "yunlu.training.asynchronous.node"
_MODULES = frozenset({ASYNC_SUPERVISOR, ASYNC_NODE})
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


def exec_module(module: str, *arguments: str, bind: str | None = None) -> NoReturn:
    """Exec a module; stop signals stay blocked until it calls ``unblock_stop_signals``.

    ``bind``: address to listen on, unless the environment sets one.
    """
    if module not in _MODULES:  # named by a supervisor, maybe on another machine
        raise ValueError(f"{module!r} is no main module of an asynchronous run")
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    signal.set_wakeup_fd(-1)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = worker_defaults() | worker_environment(threads=1)
    if bind is not None:
        environment.setdefault("YUNLU_BIND", bind)
    command = [sys.executable, "-m", module, *arguments]
    os.execve(sys.executable, command, environment)  # noqa: S606 (our own interpreter)


def unblock_stop_signals() -> None:
    """Unblock SIGTERM and SIGINT; called once a handler is installed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
