"""Space on disk, as the file system allots it; links are counted as links and never followed."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from yunlu.core.value import Value

if TYPE_CHECKING:
    from pathlib import Path


class DiskSize(Value):
    """Space of files."""

    bytes: int = 0
    files: int = 0
    is_partial: bool = False
    """There is more: counting ended at a limit."""

    def __add__(self, other: DiskSize) -> DiskSize:
        """Both together."""
        return DiskSize(
            bytes=self.bytes + other.bytes,
            files=self.files + other.files,
            is_partial=self.is_partial or other.is_partial,
        )


class DiskMeter:
    """Measures trees; a file that has several names counts once, under the first that is met."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def measure(self, path: Path, *, most: int | None = None) -> DiskSize:
        """A file, or a directory with all that is in it; what vanishes meanwhile counts nothing.

        Args:
            path: The file or directory.
            most: Stop after so many files.
        """
        total, files, pending = 0, 0, [str(path)]
        while pending and (most is None or files < most):
            name = pending.pop()
            try:
                about = os.lstat(name)
                if stat.S_ISDIR(about.st_mode):
                    pending += (entry.path for entry in os.scandir(name))
            except OSError:  # removed meanwhile, or not for us to look at
                continue
            if not stat.S_ISDIR(about.st_mode):
                files += 1
                if about.st_nlink > 1:
                    if (about.st_dev, about.st_ino) in self._seen:
                        continue
                    self._seen.add((about.st_dev, about.st_ino))
            total += about.st_blocks * 512
        return DiskSize(bytes=total, files=files, is_partial=bool(pending))
