"""Journal of a shard: its last state, and every change since.

A change is logged before it is acknowledged. From time to time the state is written
again and renamed into place; it names its log, so that state and log always match.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import CheckpointError, StoreError
from yunlu.core.files import sync_directory
from yunlu.core.framing import FrameError, FrameReader, encode_frame
from yunlu.core.secure_link import drop_sent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Buffer

    from yunlu.core.framing import Frame

_STATE = "state"
_ANY_BYTES = 1 << 62


class ShardJournal:
    """Files of one shard; open in one process at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log_bytes = 0
        self.waits_for_disk = False
        """Whether changes are synced to disk, to survive a power failure."""
        self._log = -1
        self._name = ""
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StoreError(
                f"another process serves {directory}",
                hint="end it first; it may be suspended",
            ) from error

    def read_state(self) -> Frame:
        """The last state written."""
        try:
            frame = next(self._frames(_STATE, is_complete=True))
        except (FileNotFoundError, StopIteration) as error:
            raise CheckpointError(
                f"{self.directory} contains no server state",
                hint="start a new run, or restore the directory",
            ) from error
        self._name = str(frame.control["log"])
        return frame

    def read_changes(self) -> Iterator[Frame]:
        """Changes since the last state; then the log is open for more. An incomplete record at its end is dropped."""
        path = self.directory / self._name
        path.touch(mode=0o600)
        yield from self._frames(self._name, is_complete=False)
        self._log = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._log, self.log_bytes)
        for other in self.directory.glob("log-*"):
            if other != path:
                other.unlink()  # belongs to a state that was replaced or never published

    def append(self, control: Mapping[str, Any], body: Buffer = b"") -> None:
        """Append a change; durable when this returns."""
        pieces = encode_frame(control, body)
        total = sum(len(piece) for piece in pieces)
        try:
            _write(self._log, pieces)
            if self.waits_for_disk:
                os.fdatasync(self._log)
        except OSError as error:
            os.ftruncate(self._log, self.log_bytes)
            raise StoreError(
                f"{self.directory / self._name} cannot be written: {error}",
                hint="free some space and restart the server; the workers wait for it",
            ) from error
        self.log_bytes += total

    def write_state(self, control: Mapping[str, Any], *bodies: Buffer) -> None:
        """Write the current state; changes go to a new log from now on."""
        name = f"log-{int(self._name.partition('-')[2]) + 1}"
        log = os.open(
            self.directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600
        )
        try:
            write_state(self.directory, {**control, "log": name}, *bodies)
        except BaseException:
            os.close(log)
            raise
        os.close(self._log)
        (self.directory / self._name).unlink()
        self._log, self._name, self.log_bytes = log, name, 0

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._log, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._log = self._lock = -1

    def _frames(self, name: str, *, is_complete: bool) -> Iterator[Frame]:
        reader = FrameReader(control_bytes=_ANY_BYTES, body_bytes=_ANY_BYTES)
        self.log_bytes = 0
        with (self.directory / name).open("rb", buffering=0) as file:
            while True:
                try:
                    frame = reader.read(lambda buffer: file.readinto(buffer) or 0)
                except EOFError:
                    if reader.is_between or not is_complete:
                        return
                    raise self._damage(name, "it ends too early") from None
                except FrameError as error:
                    raise self._damage(name, str(error)) from error
                if frame is not None:
                    self.log_bytes = file.tell()
                    yield frame

    def _damage(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.directory / name} is damaged: {reason}",
            hint="restore the directory, or start from a checkpoint of the run",
        )


def write_state(directory: Path, control: Mapping[str, Any], *bodies: Buffer) -> None:
    """Publish a state by an atomic rename."""
    temporary = directory / f".{_STATE}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write(descriptor, encode_frame(control, *bodies, limit_bytes=_ANY_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(directory / _STATE)
    sync_directory(directory)


def _write(descriptor: int, pieces: list[memoryview]) -> None:
    remaining = list(pieces)
    while remaining:
        drop_sent(remaining, os.writev(descriptor, remaining))
