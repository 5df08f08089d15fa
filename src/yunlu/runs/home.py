"""The home of runs: where new runs are created and existing ones found.

The only module that chooses an implementation of ``RunStore``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.files import sync_directory
from yunlu.core.private_files import check_home
from yunlu.core.settings import read_settings
from yunlu.runs.directory_store import DirectoryRunStore
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from yunlu.runs.run_store import RunStore

_STALE_S = 3600


def private_home() -> Path:
    """The home that the settings name; refused where others can write to it, closed to their eyes."""
    return check_home(read_settings().home)


def open_run(address: str | Path) -> RunStore:
    """The run at an address; whether there is one shows at the first read."""
    return DirectoryRunStore(Path(address))


def is_run_id(name: str) -> bool:
    """Whether a name can be that of a run: never a way out of the home."""
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")


def open_if_run(address: str | Path) -> RunStore | None:
    """The run at an address; None where there is none."""
    run = open_run(address)
    return run if run.has(Document.JOB) else None


def find_runs(home: Path, *, having: str | None = None) -> Iterator[RunStore]:
    """Runs of a home, in no order; those that have a certain document or log, if one is named."""
    if not home.is_dir():
        return
    with os.scandir(home) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            run = open_run(entry.path)
            if having is None or run.has(having):
                yield run


def find_links(home: Path) -> dict[str, str]:
    """Names in a home that lead to directories elsewhere, which are not read as its runs; and why."""
    if not home.is_dir():
        return {}
    with os.scandir(home) as entries:
        return {
            entry.name: f"{entry.path} is a symbolic link to a directory: it is not read as a run"
            for entry in entries
            if entry.is_symlink() and not entry.name.startswith(".") and entry.is_dir()
        }


@contextmanager
def new_run(home: Path, run_id: str) -> Generator[RunStore]:
    """A run to be filled: it appears in its home whole when the block ends, or not at all."""
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
    try:
        yield open_run(aside)
        # A run is never empty, so the rename fails rather than replace one.
        aside.rename(home / run_id)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_directory(home)


@contextmanager
def temporary_run(prefix: str) -> Generator[RunStore]:
    """A run outside every home, removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix=prefix) as directory:
        yield open_run(directory)


def remove_stale(home: Path) -> None:
    """Remove what a process that crashed long ago while it created a run left behind."""
    for path in home.glob(".new-*"):
        with suppress(FileNotFoundError):  # published meanwhile
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
