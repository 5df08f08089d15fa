"""Files of runs and homes: regular files only, atomic writes, append-only JSON lines."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from yunlu.core.json_decode import decode_json
from yunlu.core.private_files import open_descriptor, open_private
from yunlu.core.regular_files import open_to_read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


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


def sync_tree(directory: Path) -> None:
    """Make every file below the directory survive a power cut; done before it is published."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


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
