"""What a shard must not forget: its state as it was, and every change since.

A change is in the log before anyone hears that it was made. From time to time the state is written
anew, aside and renamed; it names the log that continues it, so at no instant are there two truths.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import CheckpointError, StoreError
from yunlu.core.files import sync_directory
from yunlu.training.communication.servers.frames import BadFrameError, FrameReader, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Buffer

    from yunlu.training.communication.servers.frames import Frame

_STATE = "state"
_ANY_BYTES = 1 << 62


class ShardJournal:
    """The files of one shard; one process at a time has them open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log_bytes = 0
        self.waits_for_disk = False
        """Whether a change is kept only when it would also outlive a power cut."""
        self._log = -1
        self._name = ""
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StoreError(
                f"another process serves {directory}",
                hint="end it first: it may be stopped rather than gone",
            ) from error

    def read_state(self) -> Frame:
        """The state as it was last written."""
        try:
            frame = next(self._frames(_STATE, is_whole=True))
        except (FileNotFoundError, StopIteration) as error:
            raise CheckpointError(
                f"{self.directory} holds no state of a server",
                hint="begin the run anew, or bring the directory back",
            ) from error
        self._name = str(frame.control["log"])
        return frame

    def read_changes(self) -> Iterator[Frame]:
        """Each change since; then the log is open for more. Half a record at its end is cut off."""
        path = self.directory / self._name
        path.touch(mode=0o600)
        yield from self._frames(self._name, is_whole=False)
        self._log = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._log, self.log_bytes)
        for other in self.directory.glob("log-*"):
            if other != path:
                other.unlink()  # a state that was never published, or has been replaced, named it

    def append(self, control: Mapping[str, Any], body: Buffer = b"") -> None:
        """Write one change; when this returns it is kept."""
        pieces = pack(control, body)
        total = sum(len(piece) for piece in pieces)
        try:
            _write(self._log, pieces)
            if self.waits_for_disk:
                os.fdatasync(self._log)
        except OSError as error:
            os.ftruncate(self._log, self.log_bytes)
            raise StoreError(
                f"{self.directory / self._name} cannot be written: {error}",
                hint="make room and start the server again: workers wait for it",
            ) from error
        self.log_bytes += total

    def write_state(self, control: Mapping[str, Any], *bodies: Buffer) -> None:
        """Write the state as it is; changes go to a new log from now on."""
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
        """Let another process have the files."""
        for descriptor in (self._log, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._log = self._lock = -1

    def _frames(self, name: str, *, is_whole: bool) -> Iterator[Frame]:
        reader = FrameReader(control_bytes=_ANY_BYTES, body_bytes=_ANY_BYTES)
        self.log_bytes = 0
        with (self.directory / name).open("rb", buffering=0) as file:
            while True:
                try:
                    frame = reader.read(lambda place: file.readinto(place) or 0)
                except EOFError:
                    if reader.is_between or not is_whole:
                        return
                    raise self._damage(name, "it ends too early") from None
                except BadFrameError as error:
                    raise self._damage(name, str(error)) from error
                if frame is not None:
                    self.log_bytes = file.tell()
                    yield frame

    def _damage(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.directory / name} is damaged: {reason}",
            hint="bring the directory back from a copy, or begin from a checkpoint of the run",
        )


def write_state(directory: Path, control: Mapping[str, Any], *bodies: Buffer) -> None:
    """Publish a state by one rename."""
    aside = directory / f".{_STATE}.part"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write(descriptor, pack(control, *bodies))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    aside.replace(directory / _STATE)
    sync_directory(directory)


def _write(descriptor: int, pieces: list[memoryview]) -> None:
    left = list(pieces)
    while left:
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
