"""Connections without protection, for comparison: the same code, but no handshake and no records."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from yunlu.core import secure_link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class PlainLink(secure_link.SecureLink):
    """A plain socket with the methods of a secure link."""

    is_authenticated = property(lambda _: True)  # type: ignore[assignment]
    pending = property(lambda _: False)  # type: ignore[assignment]

    def __init__(self, sock: Any, secret: bytes, *, is_server: bool) -> None:
        super().__init__(sock, secret, is_server=True)  # a server begins without a session
        del is_server

    def handshake(self) -> None:
        """Nothing is proved."""

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """As the socket's."""
        return self._sock.sendmsg(views)

    def sendall(self, data: memoryview | bytes | bytearray) -> None:
        """As the socket's."""
        self._sock.sendall(data)

    def recv(self, limit: int) -> bytes:
        """As the socket's."""
        return self._sock.recv(limit)

    def recv_into(self, into: memoryview) -> int:
        """As the socket's."""
        return self._sock.recv_into(into)

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int]:
        """As the socket's."""
        return (self._sock.recvmsg_into(buffers)[0],)


def unprotect() -> None:
    """Replace secure links by plain ones, in every module that is loaded and in those to come."""
    replace_links(PlainLink)


def replace_links(kind: type[secure_link.SecureLink]) -> None:
    """Let all modules make links of this kind from now on."""
    for name, module in list(sys.modules.items()):
        if name.startswith("yunlu.") and hasattr(module, "SecureLink"):
            module.SecureLink = kind  # type: ignore[attr-defined]


def log_handshakes(log: str) -> None:
    """Append the instant and CPU seconds of all that this process does to make a link, certificates included."""
    for name in ("__init__", "handshake"):
        timed = _log_cpu(getattr(secure_link.SecureLink, name), log)
        setattr(secure_link.SecureLink, name, timed)


def cpu_of_handshakes(log: Path, after: float, until: float) -> float:
    """CPU seconds that were logged between two instants, by all processes."""
    rows = [line.split() for line in log.read_text(encoding="ascii").splitlines()]
    return sum(float(cpu_s) for at, cpu_s in rows if after <= float(at) <= until)


def _log_cpu(function: Callable[..., Any], log: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            line = f"{time.time():.6f} {time.thread_time() - began:.9f}\n"
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, line.encode())
            os.close(descriptor)

    return run
