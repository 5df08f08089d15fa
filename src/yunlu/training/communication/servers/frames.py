"""Frames: a JSON object and raw bytes with checksums, on sockets and in files.

Lengths are checked before memory is allocated; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import xxhash

from yunlu.core.json_decode import decode_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer

CONTROL_BYTES = 256 << 10
"""Limit of a control message."""
_LENGTHS = struct.Struct("<2sBxIQQ")
_CHECK = struct.Struct("<I")
_HEADER_BYTES = _LENGTHS.size + _CHECK.size
_MAGIC, _VERSION = b"YS", 1


class BadFrameError(Exception):
    """Received data is not a frame, is too long, or is corrupt."""


class Frame(NamedTuple):
    """One message or record."""

    control: dict[str, Any]
    body: memoryview


def pack(control: Mapping[str, Any], *bodies: Buffer) -> list[memoryview]:
    """A frame in pieces; the bodies are not copied."""
    encoded = json.dumps(control).encode()
    views = [memoryview(body).cast("B") for body in bodies if memoryview(body).nbytes]
    total = sum(len(view) for view in views)
    head = _LENGTHS.pack(_MAGIC, _VERSION, len(encoded), total, _checksum(encoded, *views))
    return [memoryview(head + _CHECK.pack(xxhash.xxh32_intdigest(head)) + encoded), *views]


class FrameReader:
    """Parses frames from any source that fills a buffer."""

    def __init__(self, *, control_bytes: int = CONTROL_BYTES, body_bytes: int = 0) -> None:
        self.control_bytes, self.body_bytes = control_bytes, body_bytes
        self._start()

    @property
    def is_between(self) -> bool:
        """Whether the last frame was complete."""
        return self._control is None and self._filled == 0

    def read(self, fill: Callable[[memoryview], int]) -> Frame | None:
        """Read once; returns the frame if complete. ``EOFError`` at the end of the source."""
        count = fill(self._buffer[self._filled :])
        if count == 0:
            raise EOFError
        self._filled += count
        if self._filled < len(self._buffer):
            return None
        if self._control is None:
            self._open()
        elif self._buffer is self._control:
            self._fill_next(self._body)
        if len(self._buffer) > self._filled:
            return None
        return self._end()

    def _start(self) -> None:
        self._control: memoryview | None = None
        self._fill_next(memoryview(bytearray(_HEADER_BYTES)))

    def _fill_next(self, buffer: memoryview) -> None:
        self._buffer, self._filled = buffer, 0

    def _open(self) -> None:
        head, check = self._buffer[: _LENGTHS.size], self._buffer[_LENGTHS.size :]
        if _CHECK.unpack(check)[0] != xxhash.xxh32_intdigest(head):
            raise BadFrameError("received data is not a frame")
        magic, version, control, body, self._sum = _LENGTHS.unpack(head)
        if (magic, version) != (_MAGIC, _VERSION):
            raise BadFrameError("the frame has another version")
        if not 0 < control <= self.control_bytes or body > self.body_bytes:
            raise BadFrameError(
                f"received a frame of {control} and {body} bytes, the limits are {self.control_bytes} and"
                f" {self.body_bytes}"
            )
        # The body is aligned in memory, so that values can be read in place.
        self._control, self._body = memoryview(bytearray(control)), memoryview(bytearray(body))
        self._fill_next(self._control)

    def _end(self) -> Frame:
        assert self._control is not None
        if _checksum(self._control, self._body) != self._sum:
            raise BadFrameError("a frame has a wrong checksum")
        try:
            control = decode_json(bytes(self._control))
        except ValueError as error:
            raise BadFrameError("a frame does not hold JSON") from error
        if not isinstance(control, dict):
            raise BadFrameError("a frame does not hold a JSON object")
        frame = Frame(cast("dict[str, Any]", control), self._body)
        self._start()
        return frame


def _checksum(*parts: Buffer) -> int:
    sum_of = xxhash.xxh3_64()
    for part in parts:
        sum_of.update(part)
    return sum_of.intdigest()
