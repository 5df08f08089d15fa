"""Programs that Yunlu starts: their files are private, their output is masked."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, TextIO, cast

from yunlu.core.secrets import mask


def make_process_private() -> None:
    """First call of every program that Yunlu starts.

    The umask covers files that libraries and the user's own code create. Text that Python code prints
    is masked line by line; what a library writes to the descriptor itself, or another program that the
    user's code starts, is not: it goes to the log as it is.
    """
    os.umask(0o077)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, MaskedStream):
            setattr(sys, name, cast("TextIO", MaskedStream(stream)))


class MaskedStream:
    """A text stream whose secrets are masked; everything else is that of the stream below."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._lines = threading.local()
        """What each thread has written, but not ended: a secret may come in several parts. Without a
        lock, which a forked child could find held for ever."""

    def write(self, text: str) -> int:
        """Write whole lines; the rest waits for its end."""
        before: str = getattr(self._lines, "rest", "")
        lines, end = before + text, max(text.rfind("\n"), text.rfind("\r"))
        if end < 0:
            self._lines.rest = lines
            if len(lines) > _LONGEST_LINE:
                self.flush()
            return len(text)
        cut = len(before) + end + 1
        self._lines.rest = lines[cut:]
        self._below.write(mask(lines[:cut]))
        self._below.flush()
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what has no end yet, too."""
        rest: str = getattr(self._lines, "rest", "")
        self._lines.rest = ""
        if rest:
            self._below.write(mask(rest))
        self._below.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


_LONGEST_LINE = 1 << 16
