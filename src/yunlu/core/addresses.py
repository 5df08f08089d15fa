"""Network addresses of this machine: where to listen, and what is reached from it alone."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from yunlu.core.errors import YunluError
from yunlu.core.settings import bind_setting

LOOPBACK = "127.0.0.1"


def bind_address() -> str:
    """Where supervisors and servers listen: ``YUNLU_BIND``, else this machine alone."""
    address = bind_setting()
    if address is None:
        return LOOPBACK
    if address == "auto":
        return routed_address()
    if address in {"*", "0.0.0.0", "::", "[::]"}:  # noqa: S104 (refused)
        raise YunluError(
            f"YUNLU_BIND is {address}: a run listens on one address, not on every network of its machine.",
            hint="Set it to the address of the interface that the other machines use, or to auto for "
            "that of the default route.",
        )
    return address


def routed_address() -> str:
    """Address of this machine on its default route; no packet is sent to find it."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    return LOOPBACK  # no route: only this machine can connect


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine only."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
