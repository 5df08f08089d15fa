"""Files of runs and homes: regular files only, atomic writes, append-only JSON lines."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import IO, TYPE_CHECKING, Any

from yunlu.core.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
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


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write aside, flush to disk, then publish by one rename: readers see old or new, never half."""
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        aside.unlink(missing_ok=True)
        created = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_regular(aside, created, mode=0o644), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename inside the directory survive a power cut."""
    _sync(directory)


def sync_tree(directory: Path) -> None:
    """Make every file below the directory survive a power cut; done before it is published."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def append_lines(path: Path, records: Iterable[Any]) -> None:
    """Append records as JSON lines in one write, so that two writers never mix within a line."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if not text:
        return
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=0o644)
    try:
        # A crash can leave half a line at the end; a newline first keeps the next record whole.
        if _ends_torn(path):
            text = "\n" + text
        data = text.encode()
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def read_lines(
    path: Path, *, offset: int = 0, below: Path | None = None
) -> Iterator[tuple[Any, int]]:
    """Yield ``(record, offset after it)`` for each whole line; half lines are left for later."""
    try:
        file = open_to_read(path, below=below)
    except (FileNotFoundError, NotADirectoryError):
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            if line.strip():
                try:
                    record = load_json(line)
                except (ValueError, RecursionError):  # a torn line, closed by the next writer
                    continue
                yield record, offset


def load_json(data: bytes) -> Any:
    """A JSON value; lone surrogates, which no encoding has, become question marks."""
    value = json.loads(data)
    return _without_surrogates(value) if b"\\ud" in data.lower() else value


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        items: list[Any] = value
        return [_without_surrogates(item) for item in items]
    if isinstance(value, dict):
        fields: dict[str, Any] = value
        return {_without_surrogates(key): _without_surrogates(item) for key, item in fields.items()}
    return value


def read_last(path: Path, *, tail_bytes: int = 1 << 16) -> Any:
    """The last whole record of a log; none where there is none."""
    try:
        with open_to_read(path) as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - tail_bytes, 0))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    for line in reversed(lines[:-1]):  # what follows the last line's end is torn
        try:
            return load_json(line)
        except (ValueError, RecursionError):
            continue
    return None


def _ends_torn(path: Path) -> bool:
    with open_to_read(path) as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
