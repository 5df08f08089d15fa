"""Disk benchmark: write, flush and read a scratch file."""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING

from yunlu.core.private_files import make_directory
from yunlu.planning.machine_profile import DiskFigures

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 64 << 20
_CHUNK = 4 << 20


def measure_disk(folder: Path, size: int = SIZE, *, trials: int = 2) -> DiskFigures:
    """Best of a few trials; the file is deleted."""
    make_directory(folder)
    chunk = os.urandom(min(_CHUNK, size))  # random bytes: a disk may compress repetitions
    written: list[float] = []
    read: list[float] = []
    for _ in range(trials):
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".yunlu-probe-") as file:
            started_at = time.perf_counter()
            for _ in range(max(size // len(chunk), 1)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            written.append(time.perf_counter() - started_at)
            if hasattr(os, "posix_fadvise"):  # else it would be read from the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started_at = time.perf_counter()
            while file.read(_CHUNK):
                pass
            read.append(time.perf_counter() - started_at)
    total = max(size // len(chunk), 1) * len(chunk)
    return DiskFigures(write_bytes_per_s=total / min(written), read_bytes_per_s=total / min(read))
