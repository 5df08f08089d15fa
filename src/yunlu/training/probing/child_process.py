"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from yunlu.core.settings import worker_environment

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_TERMINATE_S = 2.0


def end_with_parent() -> None:
    """Exit when standard input closes: the parent holds its other end, and its death closes it."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would be held at interpreter exit
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def start_child(command: Sequence[str], *, quiet: bool = False) -> Generator[subprocess.Popen[str]]:
    """Start a process that ends with its standard input; stopped at the end of the block."""
    with subprocess.Popen(  # noqa: S603 - our own modules
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        env=worker_environment(),
    ) as child:
        try:
            yield child
        finally:
            _stop(child)


def _stop(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(_TERMINATE_S)
    except subprocess.TimeoutExpired:
        child.kill()
