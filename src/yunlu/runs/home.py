"""The home of runs, one directory each: where new runs are created and existing ones found.

A run is a directory of this machine, or of a file system that several machines mount.
"""
# ruff: noqa: D102 (what methods do is said in RunStore)

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from yunlu.core.files import (
    append_lines,
    check_directory,
    check_home,
    make_directory,
    name_if_foreign,
    open_descriptor,
    open_private,
    open_regular,
    open_to_read,
    read_lines,
    remove_tree,
    sync_directory,
    write_atomically,
)
from yunlu.core.settings import read_settings
from yunlu.runs.changes import mark_changed
from yunlu.runs.run_store import Area, Claim, Document, ItemStat, Log, RunStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

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
    for path in find_stale(home):
        shutil.rmtree(path, ignore_errors=True)


def find_stale(home: Path) -> list[Path]:
    """Runs that a process began to create long ago, and never published."""
    stale: list[Path] = []
    for path in home.glob(".new-*"):
        with suppress(FileNotFoundError):  # published meanwhile
            if not path.is_symlink() and time.time() - path.stat().st_mtime > _STALE_S:
                stale.append(path)
    return stale


_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


class DirectoryRunStore(RunStore):
    """``RunStore`` over the files of one directory; its name is the id of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_quiet = False

    def __repr__(self) -> str:
        return f"DirectoryRunStore({str(self.path)!r})"

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def address(self) -> str:
        return str(self.path.absolute())

    def location(self, name: str) -> str:
        return str(self.path / name)

    @property
    def foreign_owner(self) -> str | None:
        try:
            return name_if_foreign(self.path.stat().st_uid)
        except OSError:  # not there, or not for us to look at: whoever reads it says so
            return None

    def stat(self, name: str) -> ItemStat | None:
        """As ``RunStore.stat``; of a link, what is known of the link itself."""
        try:
            stat = (self.path / name).lstat() if name else self.path.stat()
        except ValueError:  # a name that no file can have, from an event that somebody else wrote
            return None
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        return ItemStat(
            size=stat.st_size,
            modified_at=stat.st_mtime,
            version=(stat.st_ino, stat.st_mtime_ns, stat.st_size),
        )

    def read(self, name: str, *, offset: int = 0) -> bytes | None:
        try:
            with open_to_read(self.path / name, below=self.path) as file:
                if offset < 0:
                    offset = max(0, file.seek(0, os.SEEK_END) + offset)
                file.seek(offset)
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: str | bytes, *, durable: bool = True) -> None:
        path = self._ready(name)
        if durable:
            write_atomically(path, content)
            return
        data = content.encode() if isinstance(content, str) else content
        aside = path.with_name(f".{path.name}.{os.getpid()}.part")
        aside.unlink(missing_ok=True)
        try:
            with open_private(aside, "xb") as file:
                file.write(data)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)

    def names(self, area: str) -> list[str]:
        check_directory(self.path / area, below=self.path)
        try:
            return sorted(
                path.name for path in (self.path / area).iterdir() if not path.name.startswith(".")
            )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def append(self, log: str, records: Iterable[Any]) -> None:
        append_lines(self.path / log, records)
        if log == Log.EVENTS:
            mark_changed(self.path.parent, self.path.name)

    def read_log(self, log: str, *, offset: int = 0) -> Iterator[tuple[Any, int]]:
        yield from read_lines(self.path / log, offset=offset, below=self.path)

    @contextmanager
    def claim(
        self, claim: Claim, *, wait: bool, passed_on: str | None = None
    ) -> Generator[_HeldLock]:
        """As ``RunStore.claim``: a lock on a file, which the system frees if the process dies."""
        if passed_on is None:
            descriptor = open_descriptor(self.path / claim, os.O_RDWR | os.O_CREAT)
        else:
            descriptor = int(passed_on)
        with os.fdopen(descriptor, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            _held_locks.append(file)
            try:
                yield _HeldLock(file)
            finally:
                if file in _held_locks:  # not in a forked child
                    _held_locks.remove(file)

    def is_claimed(self, claim: Claim) -> bool:
        if not (self.path / claim).exists():
            return False
        try:
            with self.claim(claim, wait=False):
                return False
        except BlockingIOError:
            return True

    @property
    def home(self) -> Path:
        return self.path.parent

    def directory(self, area: Area) -> Path:
        return self.path / area

    def open_text_log(self, name: str) -> IO[bytes]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return os.fdopen(open_regular(self._ready(name), flags, below=self.path), "ab")

    def _ready(self, name: str) -> Path:
        """Path of an item that is about to be written; its area is there."""
        path = self.path / name
        if "/" in name:
            check_directory(path.parent, below=self.path)
            make_directory(path.parent)
        return path


class _HeldLock:
    """A locked file: whoever inherits its descriptor holds the lock."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def pass_on(self) -> str:
        os.set_inheritable(self._file.fileno(), True)
        return str(self._file.fileno())


_held_locks: list[IO[str]] = []


def _drop_locks() -> None:
    while _held_locks:
        _held_locks.pop().close()


# A forked child (a loader, a worker) can outlive its parent: a copy of the lock would keep the claim.
os.register_at_fork(after_in_child=_drop_locks)
