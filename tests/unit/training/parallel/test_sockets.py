"""Which socket is ended, and which error is only another's."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from yunlu.core.errors import StoreError
from yunlu.training.parallel.sockets import Socket, is_connection_error, open_sockets, shut


def describe(connection: socket.socket) -> Socket:
    return Socket(connection.fileno(), os.fstat(connection.fileno()).st_ino)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_socket_is_ended_and_none_that_took_its_number() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = describe(ours)
        assert found in open_sockets()
        before = count_descriptors()
        shut(Socket(found.descriptor, found.inode + 1))
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        shut(found)
        assert theirs.recv(1) == b""
        assert count_descriptors() == before


def test_a_number_that_is_a_file_or_nothing_now_leaks_nothing() -> None:
    reader, writer = os.pipe()
    before = count_descriptors()
    shut(Socket(reader, os.fstat(reader).st_ino))
    shut(Socket(2**20, 1))
    assert count_descriptors() == before
    os.close(reader)
    os.close(writer)


def test_one_that_listens_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        shut(describe(door))
        socket.create_connection(door.getsockname(), timeout=60).close()


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("anything"),
        dist.DistStoreError("wait timeout"),
        RuntimeError("[third_party/gloo/transport/tcp/pair.cc:534] Timed out"),
        RuntimeError("Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("Broken pipe"),
    ],
)
def test_torch_tells_of_a_loss(error: Exception) -> None:
    assert is_connection_error(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EPIPE, "Broken pipe", "checkpoint"),
        RuntimeError("cannot restore the optimiser"),
        RuntimeError("the feature store has no connection to the sensor"),
        StoreError("connection reset by peer"),
        ValueError("gloo"),
    ],
)
def test_a_fault_of_ones_own_is_no_loss(error: Exception) -> None:
    assert not is_connection_error(error)
