"""A program with competitors: ``busy.py 3 COMMAND ...`` runs it beside three processes that never rest.

They are its children: of the same session and pinned alike, so that the scheduler takes their time from
it, not from the other hosts. They end with it.
"""

from __future__ import annotations

import os
import sys
import time

_LOOK_S = 0.2


def main() -> None:
    """Start the competitors, then become the program."""
    program = os.getpid()
    for _ in range(int(sys.argv[1])):
        if os.fork() == 0:
            _compete(program)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 (what the caller asks for)


def _compete(program: int) -> None:
    while os.getppid() == program:
        until = time.monotonic() + _LOOK_S
        while time.monotonic() < until:
            pass
    os._exit(0)


if __name__ == "__main__":
    main()
