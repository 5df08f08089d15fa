"""What a program of ours prints is masked."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import TextIO

from yunlu.core.secrets import MaskedStream

SECRET = "ghp_" + "c4n4ry" * 5


def masked() -> tuple[TextIO, io.StringIO]:
    below = io.StringIO()
    return MaskedStream(below), below  # pyright: ignore[reportReturnType]


def test_printed_lines_are_masked() -> None:
    stream, below = masked()
    print("token", SECRET, "and", 3, file=stream)
    print(f"two {SECRET}\nlines", file=stream)
    assert below.getvalue() == "token *** and 3\ntwo ***\nlines\n"


def test_a_secret_in_parts_is_masked() -> None:
    stream, below = masked()
    for part in (SECRET[:9], SECRET[9:], "\n"):
        stream.write(part)
    assert below.getvalue() == "***\n"


def test_progress_bars_and_unfinished_lines_appear_when_flushed() -> None:
    stream, below = masked()
    stream.write("10 %\r20 %")
    assert below.getvalue() == "10 %\r"
    stream.flush()
    stream.write("\r30 %\n")
    assert below.getvalue() == "10 %\r20 %\r30 %\n"


def test_a_very_long_line_is_not_kept_in_memory() -> None:
    stream, below = masked()
    stream.write("x" * (1 << 17))
    assert len(below.getvalue()) == 1 << 17


def test_a_program_masks_its_tracebacks_warnings_and_logs_and_writes_private_files() -> None:
    program = (
        "import logging, os, pathlib, sys, warnings\n"
        "from yunlu.core.secrets import make_process_private\n"
        "make_process_private(); make_process_private()\n"
        f"warnings.warn('{SECRET}'); logging.error('{SECRET}'); print('{SECRET}', end=' ')\n"
        "sys.stdout.fileno()\n"
        "print(oct(os.umask(0)))\n"
        f"raise ValueError('{SECRET}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert SECRET not in done.stdout + done.stderr
    assert done.stdout == "*** 0o77\n"
    assert "ValueError: ***" in done.stderr
    assert done.stderr.count("***") >= 3
