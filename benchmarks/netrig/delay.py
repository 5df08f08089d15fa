"""A cable with a delay: ``delay.py HOST_END SWITCH_END MILLISECONDS`` makes both ends and carries frames.

What the host sends arrives later; what it receives comes at once: between two hosts, each way has the delay
once. The kernel has such a queue (netem), but not every kernel was built with it. It ends when one of
the ends is removed.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 1 << 16


def main() -> None:
    """Make the ends, say so, and carry."""
    host, switch = (make_end(name) for name in sys.argv[1:3])
    print("ready", flush=True)  # noqa: T201 (the rig waits for it)
    with suppress(OSError):  # an end was removed
        _carry(host, switch, float(sys.argv[3]) / 1000)


def make_end(name: str) -> int:
    """One end of a cable: an interface whose frames this process carries."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return end


def _carry(host: int, switch: int, delay_s: float) -> None:
    poll = select.poll()
    poll.register(host, select.POLLIN)
    poll.register(switch, select.POLLIN)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        # A poll counts whole milliseconds, rounded up: the last one is spent asking.
        left_s = waiting[0][0] - time.monotonic() if waiting else 1.0
        poll.poll(max(0.0, left_s * 1000 - 1))
        while (frame := read_frame(host)) is not None:
            waiting.append((time.monotonic() + delay_s, frame))
        while (frame := read_frame(switch)) is not None:
            write_frame(host, frame)
        while waiting and waiting[0][0] <= time.monotonic():
            write_frame(switch, waiting.popleft()[1])


def read_frame(end: int) -> bytes | None:
    """The next frame; None if there is none yet."""
    try:
        return os.read(end, _FRAME)
    except BlockingIOError:
        return None


def write_frame(end: int, frame: bytes) -> None:
    """Pass a frame on."""
    with suppress(OSError):  # a cable that is pulled, or a queue that is full, loses frames
        os.write(end, frame)


if __name__ == "__main__":
    main()
