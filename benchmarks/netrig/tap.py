"""A cable with somebody in the middle: ``tap.py HOST_END SWITCH_END DIRECTORY`` reads and alters frames.

What the TCP connections carry is written to ``DIRECTORY/seen``. Once ``DIRECTORY/alter`` exists, one
bit of the next long TCP segment is changed, with a checksum that fits; ``altered`` then says so. It ends
when one of the ends is removed.
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


def main() -> None:
    """Make the ends, say so, and carry."""
    host, switch = (make_end(name) for name in sys.argv[1:3])
    directory = Path(sys.argv[3])
    with (directory / "seen").open("wb", buffering=0) as seen:
        print("ready", flush=True)  # noqa: T201 (the rig waits for it)
        with suppress(OSError):  # an end was removed
            _carry(host, switch, lambda frame: _pass(frame, seen, directory))


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


def _pass(frame: bytes, seen: BinaryIO, directory: Path) -> bytes:
    payload_at = _find_payload(frame)
    if payload_at is None:
        return frame
    seen.write(frame[payload_at:])
    if len(frame) - payload_at < _LONG_BYTES or not (directory / "alter").exists():
        return frame
    if (directory / "altered").exists():
        return frame
    (directory / "altered").touch()
    return _flip(frame, payload_at + _LONG_BYTES // 2)


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
    at -= (at - tcp_at) % 2  # checksums add words of two bytes
    changed = bytearray(frame)
    changed[at] ^= 0x40
    (old,), (new,) = _SHORT.unpack_from(frame, at), _SHORT.unpack_from(changed, at)
    (checksum,) = _SHORT.unpack_from(frame, tcp_at + 16)
    total = (~checksum & 0xFFFF) + (~old & 0xFFFF) + new
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    _SHORT.pack_into(changed, tcp_at + 16, ~total & 0xFFFF)
    return bytes(changed)


if __name__ == "__main__":
    main()
