"""A cable with somebody in the middle: ``tap.py HOST_END SWITCH_END DIRECTORY`` reads and alters frames.

What the TCP connections carry is written to ``DIRECTORY/seen``. Once ``DIRECTORY/alter`` exists, one
bit of what a connection carries is changed, in the next long segment of new data and wherever that is
sent again, with a checksum that fits; ``altered`` then says so. It ends when one of the ends is removed.
"""

from __future__ import annotations

import select
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if __package__:
    from benchmarks.netrig.delay import make_end, read_frame, write_frame
else:
    from delay import make_end, read_frame, write_frame

if TYPE_CHECKING:
    from collections.abc import Callable

_ETHERNET, _IPV4, _TCP = 14, 0x0800, 6
_LONG_BYTES = 400
"""Handshakes and acknowledgements are shorter: what is altered belongs to a message."""
_SHORT = struct.Struct("!H")
_WORD, _HALF = 0xFFFF_FFFF, 0x8000_0000


def main() -> None:
    """Make the ends, say so, and carry."""
    host, switch = (make_end(name) for name in sys.argv[1:3])
    directory = Path(sys.argv[3])
    with (directory / "seen").open("wb", buffering=0) as seen:
        print("ready", flush=True)  # noqa: T201 (the rig waits for it)
        with suppress(OSError):  # an end was removed
            _carry(host, switch, Tap(seen, directory).carry)


def _carry(host: int, switch: int, change: Callable[[bytes], bytes]) -> None:
    poll = select.poll()
    poll.register(host, select.POLLIN)
    poll.register(switch, select.POLLIN)
    while True:
        poll.poll()
        while (frame := read_frame(host)) is not None:
            write_frame(switch, change(frame))
        while (frame := read_frame(switch)) is not None:
            write_frame(host, change(frame))


class Tap:
    """Reads what passes, and alters one byte of one connection on request."""

    def __init__(self, seen: BinaryIO, directory: Path) -> None:
        self._seen, self._directory = seen, directory
        self._ends: dict[bytes, int] = {}
        """Sequence number after the last byte of each direction of a connection."""
        self._target: tuple[bytes, int] | None = None
        """Connection and sequence number of the altered byte."""

    def carry(self, frame: bytes) -> bytes:
        """The frame as it goes on."""
        payload_at = _find_payload(frame)
        if payload_at is None or payload_at == len(frame):
            return frame
        self._seen.write(frame[payload_at:])
        flow, first = _find_position(frame)
        size = len(frame) - payload_at
        is_new = _offset(self._ends.get(flow, first), first) >= 0
        if is_new:
            self._ends[flow] = (first + size) & _WORD
        # Data sent again may have arrived before: changing only that would change nothing.
        is_wanted = self._target is None and is_new and size >= _LONG_BYTES
        if is_wanted and (self._directory / "alter").exists():
            self._target = flow, (first + _LONG_BYTES // 2) & _WORD
            (self._directory / "altered").touch()
        if self._target is None or self._target[0] != flow:
            return frame
        at = _offset(first, self._target[1])
        return _flip(frame, payload_at + at) if 0 <= at < size else frame


def _find_position(frame: bytes) -> tuple[bytes, int]:
    """Connection and direction of a TCP segment, and the sequence number of its first byte."""
    tcp_at = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    flow = frame[_ETHERNET + 12 : _ETHERNET + 20] + frame[tcp_at : tcp_at + 4]
    return flow, int.from_bytes(frame[tcp_at + 4 : tcp_at + 8])


def _offset(start: int, end: int) -> int:
    """Distance of two sequence numbers, which wrap around."""
    return ((end - start + _HALF) & _WORD) - _HALF


def _find_payload(frame: bytes) -> int | None:
    """Offset of what a TCP segment carries; None for other frames."""
    if len(frame) < _ETHERNET + 40 or _SHORT.unpack_from(frame, 12)[0] != _IPV4:
        return None
    if frame[_ETHERNET + 9] != _TCP:
        return None
    tcp_at = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    return tcp_at + 4 * (frame[tcp_at + 12] >> 4)


def _flip(frame: bytes, at: int) -> bytes:
    """Change one bit and the checksum with it (RFC 1624)."""
    tcp_at = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    changed = bytearray(frame)
    changed[at] ^= 0x40
    at -= (at - tcp_at) % 2  # checksums add words of two bytes
    (old,), (new,) = _SHORT.unpack_from(frame, at), _SHORT.unpack_from(changed, at)
    (checksum,) = _SHORT.unpack_from(frame, tcp_at + 16)
    total = (~checksum & 0xFFFF) + (~old & 0xFFFF) + new
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    _SHORT.pack_into(changed, tcp_at + 16, ~total & 0xFFFF)
    return bytes(changed)


if __name__ == "__main__":
    main()
