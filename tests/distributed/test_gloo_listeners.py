"""Gloo accepts whoever connects: other users of this machine must not get in, nor end a run."""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks, run_world
from tests.waiting import LIMIT_S, wait_until
from yunlu.planning.layouts import Layout
from yunlu.training.parallel import sockets
from yunlu.training.parallel.sockets import close_listeners, open_sockets
from yunlu.training.parallel.world import World

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user"),
]
STRANGER = 54_321
"""Number of a user that nobody is."""


def as_stranger(function: Any, *args: Any) -> Any:
    """What a function returns in a process of another user."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def run() -> None:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        writer.send(function(*args))
        reader.poll(None)  # holds its connections until it is ended

    process = context.Process(target=run)
    process.start()
    try:
        assert reader.poll(LIMIT_S)
        return reader.recv()
    finally:
        process.kill()
        process.join()


def gloo_ports() -> list[int]:
    """Ports on which this process listens on the loopback interface."""
    return [
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == "127.0.0.1"
    ]


def try_to_connect(ports: list[int]) -> int:
    """How many ports take a connection and say so; a dropped one is never answered."""
    socks = [socket.socket() for _ in ports]
    for sock, port in zip(socks, ports, strict=True):
        sock.settimeout(0.5)
        with suppress(OSError):
            sock.connect(("127.0.0.1", port))
    return sum(is_connected(sock) for sock in socks)


def is_connected(sock: socket.socket) -> bool:
    with suppress(OSError):
        return bool(sock.getpeername())
    return False


def _attack_formed(world: World) -> tuple[int, int, float]:
    ports = gloo_ports()
    world.sum_over_all(torch.zeros(1))  # all are formed
    connected = as_stranger(try_to_connect, ports)
    total = torch.ones(1)
    dist.all_reduce(total)
    return len(ports), connected, total.item()


def test_nobody_connects_to_a_group_that_is_formed() -> None:
    for ports, connected, total in run_world(_attack_formed, Layout(dp=2, tp=2)):
        assert ports >= 1
        assert connected == 0
        assert total == 4.0


def _control_without_the_cure(rank: int, store: str) -> int:
    before = open_sockets()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    open_to_all = as_stranger(try_to_connect, _ports_since(before))
    dist.barrier()
    dist.destroy_process_group()
    return open_to_all


def _ports_since(before: Any) -> list[int]:
    found: list[int] = []
    for item in open_sockets() - before:
        sock = socket.socket(fileno=os.dup(item.descriptor))
        with sock:
            if sock.family == socket.AF_INET and sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                found.append(sock.getsockname()[1])
    return found


def test_gloo_alone_lets_everybody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the cure the attack above succeeds."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert run_ranks(_control_without_the_cure, 2, str(tmp_path / "store")) == [1, 1]


def test_connections_of_others_are_shut_and_ours_stay() -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        own = socket.create_connection(("127.0.0.1", port))
        accepted_own, _ = listener.accept()
        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)

        def attack() -> None:
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(struct.pack("<q", 0))  # the number of a pair, as a worker of gloo sends it
            writer.send("connected")
            writer.send(sock.recv(1))

        process = context.Process(target=attack)
        process.start()
        assert reader.poll(LIMIT_S)
        assert reader.recv() == "connected"
        accepted_foreign, _ = listener.accept()
        assert not sockets.is_own_connection(accepted_foreign)
        close_listeners(before)
        assert reader.poll(LIMIT_S)
        assert reader.recv() == b""  # the stranger was hung up on
        process.join()
        own.sendall(b"x")
        assert accepted_own.recv(1) == b"x"
        for sock in (own, accepted_own, accepted_foreign):
            sock.close()
        wait_until(lambda: process.exitcode == 0, "the stranger's end")
