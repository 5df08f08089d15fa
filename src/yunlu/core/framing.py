"""Frames: a header, a JSON object and raw bytes with checksums; on connections and in files.

Lengths are checked before memory is allocated; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from yunlu.core.errors import StoreError
from yunlu.core.limits import decode_json
from yunlu.core.secure_link import drop_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer

    from yunlu.core.secure_link import SecureLink

CONTROL_BYTES = 4 << 20
"""Limit of the JSON object, far above every message; a peer that announces more is none of ours."""
_FIELDS = struct.Struct("<2sBBIIQQ")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_MAGIC, _VERSION = b"YF", 1
_EMPTY = memoryview(b"")
_DAMAGED = "a frame has a wrong checksum"


class FrameError(StoreError):
    """Received bytes are no frame of ours, are too many, or are damaged."""


class Header(NamedTuple):
    """What precedes each frame."""

    channel: int
    tag: int
    """Number of the exchange that the frame belongs to."""
    control_bytes: int
    body_bytes: int
    checksum: int


class Frame(NamedTuple):
    """One message or record."""

    control: dict[str, Any]
    body: memoryview


def encode_frame(
    control: Mapping[str, Any], *bodies: Buffer, limit_bytes: int = CONTROL_BYTES
) -> list[memoryview]:
    """A frame in pieces; the bodies are not copied."""
    encoded = json.dumps(control).encode()
    if len(encoded) > limit_bytes:
        raise FrameError(f"a message of {len(encoded)} bytes is longer than {limit_bytes}")
    views = [memoryview(body).cast("B") for body in bodies if memoryview(body).nbytes]
    total, checksum = sum(map(len, views)), _checksum(encoded, *views)
    return [memoryview(encode_header(len(encoded), total, checksum) + encoded), *views]


def encode_body(body: memoryview, *, channel: int, tag: int) -> list[memoryview]:
    """A frame without a JSON object, in pieces."""
    size = len(body)
    header = encode_header(0, size, xxhash.xxh3_64_intdigest(body), channel=channel, tag=tag)
    return [memoryview(header), body] if size else [memoryview(header)]


def encode_header(
    control_bytes: int, body_bytes: int, checksum: int, *, channel: int = 0, tag: int = 0
) -> bytes:
    """What precedes a frame, with a checksum of its own."""
    fields = _FIELDS.pack(_MAGIC, _VERSION, channel, tag, control_bytes, body_bytes, checksum)
    return fields + _CHECK.pack(zlib.crc32(fields))


def send_frame(link: SecureLink, control: Mapping[str, Any], *bodies: Buffer) -> int:
    """Send a whole frame on a blocking connection; returns its size."""
    pieces = encode_frame(control, *bodies)
    total = sum(map(len, pieces))
    while pieces:
        drop_sent(pieces, link.sendmsg(pieces))
    return total


def receive_frame(link: SecureLink, reader: FrameReader) -> Frame:
    """Receive a whole frame; ``EOFError`` once the peer has closed, ``BlockingIOError`` to be repeated."""
    while (frame := reader.read(link.recv_into)) is None:
        pass
    return frame


class FrameReader:
    """Parses frames from any source that fills a buffer, however they are cut, within limits.

    ``allocate`` refuses a header, or returns the memory for the body; by default memory of its own.
    """

    def __init__(
        self,
        *,
        control_bytes: int = CONTROL_BYTES,
        body_bytes: int = 0,
        allocate: Callable[[Header], memoryview] | None = None,
    ) -> None:
        self.control_bytes, self.body_bytes, self._allocate = control_bytes, body_bytes, allocate
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._header: Header | None = None
        self._control = self._body = _EMPTY
        self._filled = 0

    @property
    def is_between(self) -> bool:
        """Whether the last frame was complete."""
        return self._filled == 0

    def read(self, fill: Callable[[memoryview], int]) -> Frame | None:
        """Read once; returns the frame if complete. ``EOFError`` at the end of the source."""
        count = fill(self.buffers()[0])
        if count == 0:
            raise EOFError
        return self.advance(count)

    def buffers(self, expected: memoryview = _EMPTY) -> list[memoryview]:
        """Where the next bytes belong; ``expected``: where a body belongs that is certain to follow."""
        if self._header is None:
            head = self._head[self._filled :]
            return [head, expected] if len(expected) else [head]
        at = self._filled - HEADER_BYTES
        if at < len(self._control):
            return [self._control[at:]]
        return [self._body[at - len(self._control) :]]

    def advance(self, count: int) -> Frame | None:
        """So many bytes were put there; returns the frame if complete."""
        self._filled += count
        header = self._header
        if header is None:
            if self._filled < HEADER_BYTES:
                return None
            header = self._header = _decode_header(self._head)
            self._open(header)
        if self._filled < HEADER_BYTES + header.control_bytes + header.body_bytes:
            return None
        body = self._body
        control = self._read_control(header) if header.control_bytes else {}
        if not header.control_bytes and xxhash.xxh3_64_intdigest(body) != header.checksum:
            raise FrameError(_DAMAGED)
        self._header, self._filled = None, 0
        return Frame(control, body)

    def _open(self, header: Header) -> None:
        if header.control_bytes > self.control_bytes or (
            self._allocate is None and header.body_bytes > self.body_bytes
        ):
            raise FrameError(
                f"received a frame of {header.control_bytes} and {header.body_bytes} bytes,"
                f" the limits are {self.control_bytes} and {self.body_bytes}"
            )
        # The body has memory of its own: there it is aligned, so that values can be read in place.
        self._body = (
            memoryview(bytearray(header.body_bytes))
            if self._allocate is None
            else self._allocate(header)
        )
        if self.control_bytes:
            self._control = memoryview(bytearray(header.control_bytes))

    def _read_control(self, header: Header) -> dict[str, Any]:
        if _checksum(self._control, self._body) != header.checksum:
            raise FrameError(_DAMAGED)
        return _decode_control(self._control)


def _decode_header(head: memoryview) -> Header:
    magic, version, channel, tag, control_bytes, body_bytes, checksum = _FIELDS.unpack_from(head)
    if _CHECK.unpack_from(head, _FIELDS.size)[0] != zlib.crc32(head[: _FIELDS.size]):
        raise FrameError("received data is not a frame")
    if version != _VERSION or magic != _MAGIC:
        raise FrameError("the frame has another version")
    return Header(channel, tag, control_bytes, body_bytes, checksum)


def _decode_control(data: memoryview) -> dict[str, Any]:
    try:
        control = decode_json(bytes(data))
    except ValueError as error:
        raise FrameError("a frame does not hold JSON") from error
    if not isinstance(control, dict):
        raise FrameError("a frame does not hold a JSON object")
    return control


def _checksum(*parts: Buffer) -> int:
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    sum_of = xxhash.xxh3_64()
    for part in parts:
        sum_of.update(part)
    return sum_of.intdigest()
