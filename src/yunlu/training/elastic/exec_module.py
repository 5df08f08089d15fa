"""One process becomes another program: whoever knows it by its number need not be told."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from yunlu.core.settings import worker_environment

ASYNCHRONOUS = "yunlu.training.asynchronous.supervisor"
"""The program of a run whose workers train for servers; it stands where the supervisor of a crew does."""
ASYNCHRONOUS_NODE = "yunlu.training.asynchronous.node"
_ASKS = frozenset({signal.SIGTERM, signal.SIGINT})


def exec_module(module: str, *words: str, bind: str | None = None) -> NoReturn:
    """Go on as this module of ours; who is asked to stop meanwhile hears of it once it listens.

    ``bind``: where it is to listen, if the environment says nothing.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)
    signal.set_wakeup_fd(-1)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = worker_environment(threads=1)
    if bind is not None:
        environment.setdefault("YUNLU_BIND", bind)
    command = [sys.executable, "-m", module, *words]
    os.execve(sys.executable, command, environment)  # noqa: S606 (our own interpreter)


def hear_asks() -> None:
    """Listen again: called once somebody is there to whom a stop means something."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)
