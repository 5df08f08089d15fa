"""Files and directories that only their owner can open, whatever the umask says."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from yunlu.core.errors import StoreError
from yunlu.core.regular_files import open_regular

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
_OTHERS = 0o077
_OTHERS_WRITE = 0o022


def open_descriptor(path: Path, flags: int, *, below: Path | None = None) -> int:
    """``open_regular`` that creates with mode 0600, and takes the others' rights from an existing file."""
    descriptor = open_regular(path, flags, below=below, mode=FILE_MODE)
    try:
        if flags & os.O_CREAT:
            _restrict(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_private(path: Path, mode: str, *, below: Path | None = None, **options: Any) -> Any:
    """``open``, for a regular file that this creates: 0600."""
    return open(
        path,
        mode,
        opener=lambda name, flags: open_descriptor(Path(name), flags, below=below),
        **options,
    )


def create_private(path: Path) -> None:
    """Create an empty file for a library that would create it as the umask says."""
    os.close(open_descriptor(path, os.O_RDWR | os.O_CREAT))


def open_lock(path: Path) -> IO[str]:
    """A file to lock: nobody else can open it, and so nobody else can hold its lock."""
    return os.fdopen(open_descriptor(path, os.O_RDWR | os.O_CREAT), "r+")


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents with mode 0700; one that is there loses the others' rights."""
    try:
        path.mkdir(DIRECTORY_MODE)
    except FileNotFoundError:
        make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
    _restrict(path, DIRECTORY_MODE)


def restrict_tree(directory: Path) -> None:
    """Take the others' rights from everything below: libraries create files as the umask says."""
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            with suppress(FileNotFoundError):
                _restrict(path, DIRECTORY_MODE if path.is_dir() else FILE_MODE)


def check_home(home: Path) -> Path:
    """The home, if nobody else can write to it; one that others can read is closed to them.

    Whoever can write to a home can start jobs in it, which run as its owner.
    """
    try:
        about = home.stat()
    except (FileNotFoundError, NotADirectoryError):
        return home
    if about.st_uid != os.geteuid():
        raise StoreError(
            f"The home of the runs {home} belongs to another user (uid {about.st_uid}), "
            "who could start jobs in it as you.",
            hint="set YUNLU_HOME to a directory of your own",
        )
    if about.st_mode & _OTHERS_WRITE:
        raise StoreError(
            f"Others can write to the home of the runs {home} "
            f"(mode {stat.S_IMODE(about.st_mode):o}), and so start jobs in it as you.",
            hint=f"chmod 700 {home}",
        )
    _restrict(home, DIRECTORY_MODE)
    return home


def _restrict(file: int | Path, mode: int) -> None:
    """Give exactly this mode to what is ours and has another."""
    about = os.stat(file)  # noqa: PTH116 (a path or a descriptor)
    now = stat.S_IMODE(about.st_mode)
    is_restricted = not now & _OTHERS and now & mode == mode
    if is_restricted or not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        return
    with suppress(PermissionError, NotImplementedError):  # of another user, or without modes
        os.chmod(file, mode)  # noqa: PTH101 (as above)
