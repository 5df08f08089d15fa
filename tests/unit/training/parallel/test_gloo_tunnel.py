"""Gloo and its tunnel: what leaves the machine goes through it, unless the job trusts the network."""

from __future__ import annotations

import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from yunlu.core.errors import TrainingError
from yunlu.planning.layouts import Layout
from yunlu.spec.communication import CommunicationSpec
from yunlu.training.parallel import gloo_tunnel
from yunlu.training.parallel.gloo_tunnel import GlooTunnel, TunnelStore, secure_gloo
from yunlu.training.parallel.world import _form_groups

SECRET = b"of this group"
NEAR, FAR = "127.0.0.1", "127.0.0.2"
"""Two hosts: both are addresses of this machine, but only the first is where gloo may listen."""


@pytest.fixture(autouse=True)
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")


def secure(hosts: list[str], *, trusts_network: bool) -> list[tuple[dist.Store, GlooTunnel | None]]:
    store = dist.HashStore()
    with ThreadPoolExecutor() as threads:
        workers = [
            threads.submit(
                secure_gloo, store, rank, len(hosts), host, SECRET, trusts_network=trusts_network
            )
            for rank, host in enumerate(hosts)
        ]
        return [worker.result() for worker in workers]


def test_only_a_job_that_trusts_the_network_lets_gloo_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert CommunicationSpec().trust == "workers"
    monkeypatch.setattr(gloo_tunnel, "is_loopback", lambda _: False)
    for _, tunnel in secure([NEAR, NEAR], trusts_network=False):
        assert tunnel is None
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    for store, tunnel in secure([NEAR, FAR], trusts_network=False):
        assert tunnel is not None
        with closing(tunnel):
            assert isinstance(store, TunnelStore)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"

    monkeypatch.setattr(gloo_tunnel, "interface_of", lambda host: f"interface of {host}")
    for store, tunnel in secure([NEAR, FAR], trusts_network=True):
        assert tunnel is None
        assert isinstance(store, dist.HashStore)
    assert os.environ["GLOO_SOCKET_IFNAME"] in {f"interface of {NEAR}", f"interface of {FAR}"}


def test_gloo_never_chooses_an_interface_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_tunnel, "interface_of", lambda _: None)
    with pytest.raises(TrainingError, match="has to listen"):
        secure([NEAR, NEAR], trusts_network=False)


def test_accelerators_of_several_machines_need_a_job_that_trusts_the_network() -> None:
    with pytest.raises(TrainingError, match="does not authenticate or encrypt") as caught:
        _form_groups(Layout(dp=2), 0, dist.HashStore(), torch.device("cuda", 0), is_tunnelled=True)
    assert "communication.trust to network" in str(caught.value.hint)
    assert not dist.is_initialized()


def address(port: int, host: bytes = bytes((127, 0, 0, 1))) -> bytes:
    """As gloo stores it: host name, ``sockaddr_in``, and what follows."""
    socket_address = struct.pack("<H", 2) + port.to_bytes(2, "big") + host + bytes(8)
    parts = (b"name", socket_address)
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts) + b"rest"


def test_the_address_of_another_machine_becomes_a_local_port() -> None:
    with closing(GlooTunnel(0, [NEAR, FAR], SECRET)) as tunnel:
        own = tunnel.publish("group/0", address(4000))
        assert own.endswith(address(4000))
        far = own.replace(struct.pack("<4sI", b"YLgt", 0), struct.pack("<4sI", b"YLgt", 1))
        found = tunnel.resolve("group/1", far)
        port = int.from_bytes(found[22:24], "big")
        assert found == address(port)
        assert port != 4000
        assert tunnel.resolve("group/1", far) == found
        assert tunnel.resolve("group/0", own) == address(4000)  # of this machine: as it is
        assert len(tunnel.listeners) == 2


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 60) + bytes(64),
        struct.pack("<Q", 4) + b"name" + struct.pack("<Q", 1 << 60) + bytes(64),
        struct.pack("<Q", 4) + b"name" + struct.pack("<Q", 2) + bytes(2),
        address(4000, bytes((10, 0, 0, 1))),
        b"any other value",
    ],
)
def test_what_is_no_address_of_gloo_passes_unchanged(value: bytes) -> None:
    with closing(GlooTunnel(0, [NEAR, FAR], SECRET)) as tunnel:
        assert tunnel.publish("group/0", value) == value
        assert tunnel.resolve("group/1", value) == value
        marked = struct.pack("<4sI", b"YLgt", 1) + value
        assert tunnel.resolve("group/1", marked) == value
        assert len(tunnel.listeners) == 1


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
