"""Files of runs and homes: regular, private to their owner, written atomically, of trusted users.

Links, FIFOs, sockets and devices in place of a file are refused, and never waited for.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from yunlu.core.errors import StoreError
from yunlu.core.limits import decode_json
from yunlu.core.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

_MANY = 32
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
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _irregular(path, status.st_mode, "a regular file")
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
    """Make a directory and its missing parents with mode 0700; one that is there loses the others' rights.

    Parents that are there keep theirs: they may be ``/``, or hold what others need.
    """
    try:
        path.mkdir(DIRECTORY_MODE)
    except FileNotFoundError:
        _make_parents(path.parent)
        with suppress(FileExistsError):
            path.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
    _restrict(path, DIRECTORY_MODE)


def _make_parents(path: Path) -> None:
    if not path.is_dir():
        _make_parents(path.parent)
        with suppress(FileExistsError):
            path.mkdir(DIRECTORY_MODE)
            _restrict(path, DIRECTORY_MODE)  # the umask may have left less


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
    if home.parent == home:
        raise StoreError(
            f"The home of the runs is {home}, the root of all files, which would be closed to others.",
            hint="set YUNLU_HOME to a directory of its own",
        )
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


WRITABLE_HOME = "make it writable, or set YUNLU_HOME to a directory that is"
"""What to do where nothing can be written to the home."""


def _restrict(file: int | Path, mode: int) -> None:
    """Give exactly this mode to what is ours and has another."""
    about = os.stat(file)  # noqa: PTH116 (a path or a descriptor)
    now = stat.S_IMODE(about.st_mode)
    is_restricted = not now & _OTHERS and now & mode == mode
    if is_restricted or not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        return
    with suppress(PermissionError, NotImplementedError):  # of another user, or without modes
        os.chmod(file, mode)  # noqa: PTH101 (as above)


def write_atomically(path: Path, content: str | bytes, *, private: bool = True) -> None:
    """Write aside, flush to disk, then publish by one rename: readers see old or new, never half.

    A file that a user asked for by name, outside of the home, is not private: it follows the umask.
    """
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        aside.unlink(missing_ok=True)
        with open_private(aside, "xb") if private else aside.open("xb") as file:
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


def sync_directories(directories: Collection[Path]) -> None:
    """As ``sync_directory``; where there are many, everything at once."""
    if len(directories) > _MANY:
        os.sync()
        return
    for directory in directories:
        _sync(directory)


def sync_tree(directory: Path) -> None:
    """Make every file below the directory survive a power cut; done before it is published."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


SET_ASIDE = ".trash-"
"""What a name begins with that waits for its deletion: whoever reads directories passes over it."""


def set_aside(path: Path) -> Path:
    """Hide what is to be deleted by one rename; the hidden path. The caller makes it durable.

    A process that is killed before the deletion ends leaves a name that no reader looks at, and that
    ``find_set_aside`` finds again; never a directory that looks whole and is not.
    """
    if path.name.startswith(SET_ASIDE):
        return path
    aside = path.with_name(f"{SET_ASIDE}{path.name.lstrip('.')}-{secrets.token_hex(4)}")
    return path.rename(aside)


def remove_tree(path: Path) -> None:
    """Remove a directory: hidden by one rename, then deleted."""
    try:
        aside = set_aside(path)
    except FileNotFoundError:
        return
    sync_directory(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def find_set_aside(directory: Path) -> list[Path]:
    """What a killed process had set aside here and did not delete."""
    return sorted(path for path in directory.glob(f"{SET_ASIDE}*") if not path.is_symlink())


def append_lines(path: Path, records: Iterable[Any]) -> None:
    """Append records as JSON lines in one write, so that two writers never mix within a line."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if not text:
        return
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
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
                    record = decode_json(line, replace_lone=True)
                except ValueError:  # a torn line, closed by the next writer
                    continue
                yield record, offset


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


_ROOT = 0


def name_if_foreign(uid: int) -> str | None:
    """Name of a user whose files are not trusted; None for one whose files are."""
    if uid in {os.geteuid(), _ROOT}:  # root can change our own files, too
        return None
    name = _name(uid)
    return None if {name, str(uid)} & read_settings().trusted_users else name


def require_private(path: Path) -> None:
    """Refuse a file or directory that another user owns, or that others can write."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise StoreError(
            f"{path} is a symbolic link, so what it says is not followed",
            hint="put the file or directory itself there",
        )
    owner = name_if_foreign(status.st_uid)
    if owner is not None:
        raise StoreError(
            f"{path} belongs to {owner}, so what it says is not followed",
            hint=f"do this as {owner}; if the file is yours: export YUNLU_TRUSTED_USERS={owner}",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(
            f"others can write {path} (mode {stat.S_IMODE(status.st_mode):o}), "
            "so what it says is not followed",
            hint=f"if its content is yours: chmod go-w {path}",
        )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
