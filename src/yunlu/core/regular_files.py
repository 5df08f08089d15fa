"""Regular files: links, FIFOs, sockets and devices in their place are refused, and never waited for."""

from __future__ import annotations

import errno
import os
import stat
from typing import IO, TYPE_CHECKING

from yunlu.core.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
}


class IrregularFileError(StoreError):
    """A link, FIFO, socket or device stands where a file or directory is expected."""


def open_regular(
    path: Path, flags: int = os.O_RDONLY, *, below: Path | None = None, mode: int = 0o600
) -> int:
    """Open a regular file; anything else in its place is refused, and never waited for.

    A file of a run or home may come from somebody else: a FIFO would block whoever reads it, a link
    would lead out of the directory.

    Args:
        path: The file.
        flags: As of ``os.open``.
        below: Directory whose own path is trusted; no directory between it and the file may be a link.
            Default: the directory of the file.
        mode: Permissions of a file that is created.
    """
    _check_between(path, below)
    try:
        descriptor = os.open(path, flags | _SAFE, mode)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV}:
            raise _irregular(path, os.lstat(path).st_mode, "a regular file") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise _irregular(path, found.st_mode, "a regular file")
    return descriptor


def open_to_read(path: Path, *, below: Path | None = None) -> IO[bytes]:
    """Open a regular file to read it, as ``open_regular``."""
    return os.fdopen(open_regular(path, below=below), "rb")


def read_regular(path: Path, *, below: Path | None = None) -> bytes:
    """Content of a regular file, as ``open_regular``."""
    with open_to_read(path, below=below) as file:
        return file.read()


def check_regular(path: Path) -> None:
    """Refuse a link, FIFO or device where a library opens a file by its path; absent is fine."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise _irregular(path, mode, "a regular file")


def check_directory(path: Path, *, below: Path | None = None) -> None:
    """Refuse a link or file in place of a directory; absent is fine."""
    _check_between(path, below)
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(mode):
        raise _irregular(path, mode, "a directory")


def _check_between(path: Path, below: Path | None) -> None:
    if below is None or path.parent == below:
        return
    parts = path.relative_to(below).parts if path.is_relative_to(below) else ("..",)
    if ".." in parts:
        raise IrregularFileError(f"{path} leads out of {below}", hint="give a name inside of it")
    directory = below
    for part in parts[:-1]:
        directory /= part
        check_directory(directory)


def _irregular(path: Path, mode: int, expected: str) -> IrregularFileError:
    kind = _KINDS.get(stat.S_IFMT(mode), "no file")
    return IrregularFileError(
        f"{path} is {kind}, not {expected}: it was not opened",
        hint=f"put {expected} there, or remove it",
    )
