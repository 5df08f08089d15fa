"""A measuring process that ends with the one that started it, however that one ends."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from yunlu.core.settings import worker_environment

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_LAST_WORDS_S = 2.0


def end_with_parent() -> None:
    """End when standard input does: whoever started us holds its other end, and a kill closes it."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def start_child(words: Sequence[str], *, quiet: bool = False) -> Generator[subprocess.Popen[str]]:
    """A process that watches its standard input; ended at the latest with this block."""
    with subprocess.Popen(  # noqa: S603 - our own modules
        words,
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
        child.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        child.kill()
