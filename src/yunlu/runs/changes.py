"""Marks of runs whose events have grown, for the index of their home: one empty file by the name of each.

Whoever appends to a run's events marks it after that. Whoever updates the index takes the marks first, reads
the runs, stores what it read, and only then removes what it took. So no change is missed, whoever dies when.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from yunlu.core.files import FILE_MODE, check_directory, make_directory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_MARKS = ".changed"
_TAKEN = "."
"""Before the name of a mark that was taken; no run has such a name."""
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


def open_marks(home: Path) -> bool:
    """Make the directory of the marks; whether it was there, so that nothing can have gone unmarked."""
    directory = home / _MARKS
    check_directory(directory)
    was_there = directory.is_dir()
    make_directory(directory)
    return was_there


def mark_changed(home: Path, run_id: str) -> None:
    """Mark a run, if its home has an index; what cannot be marked is found out when it is listed."""
    with suppress(OSError):
        directory = os.open(home / _MARKS, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
        try:
            flags = os.O_WRONLY | os.O_CREAT | _SAFE
            os.close(os.open(run_id, flags, FILE_MODE, dir_fd=directory))
        finally:
            os.close(directory)


def take_marks(home: Path) -> set[str]:
    """Ids of the marked runs, and of those that somebody took who did not get to the end."""
    directory = home / _MARKS
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return set()
    for name in names:
        if not name.startswith(_TAKEN):
            with suppress(FileNotFoundError):  # another process took it, and reads the run
                (directory / name).rename(directory / f"{_TAKEN}{name}")
    return {name.removeprefix(_TAKEN) for name in names}


def drop_marks(home: Path, run_ids: Iterable[str]) -> None:
    """Remove marks that were taken: their runs are in the index as they are now, or later."""
    for run_id in run_ids:
        (home / _MARKS / f"{_TAKEN}{run_id}").unlink(missing_ok=True)
