"""Local ports that stand for workers on other machines."""

from __future__ import annotations

import socket

import pytest

from yunlu.training.parallel import gloo_tunnel


# Ports next to which the system, which prefers the lower half of its range, offers hardly another one.
@pytest.mark.parametrize("own_port", [0x8000, 0x80FF, 0xB400, 0xB4FF, 0xEDFF, 0xEE00, 40_000])
@pytest.mark.parametrize("is_less", [True, False])
def test_a_port_is_found_on_either_side_of_any_port(own_port: int, is_less: bool) -> None:
    # As many as other machines have workers: each takes a port away from the next.
    found = [gloo_tunnel._bind_ordered(own_port, is_less=is_less) for _ in range(16)]
    try:
        ports = [listener.getsockname()[1] for listener in found]
        assert len(set(ports)) == 16
        assert all((socket.htons(port) < socket.htons(own_port)) == is_less for port in ports)
    finally:
        for listener in found:
            listener.close()
