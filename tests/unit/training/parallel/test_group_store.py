"""The store of a worker group: as torch's, for those who know the secret."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tests.waiting import LIMIT_S
from yunlu.training.parallel.group_store import GroupStore, StoreServer

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = b"group"
LIMIT = timedelta(seconds=LIMIT_S)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    hosting = StoreServer("127.0.0.1", SECRET)
    yield hosting
    hosting.close()


@pytest.fixture
def store(server: StoreServer) -> Iterator[GroupStore]:
    with closing(GroupStore((server.host, server.port), SECRET, timeout=LIMIT)) as joined:
        yield joined


def test_it_does_what_torchs_store_does(store: GroupStore) -> None:
    own, others = PrefixStore("a", store), dist.HashStore()
    answers = [
        (
            kind.set("key", "value"),
            kind.get("key"),
            kind.check(["key"]),
            kind.check(["key", "none"]),
            kind.add("count", 2),
            kind.add("count", 40),
            kind.get("count"),
            kind.compare_set("first", "", "mine"),
            kind.compare_set("first", "", "yours"),
            kind.compare_set("first", "mine", "yours"),
            kind.delete_key("key"),
            kind.delete_key("key"),
            kind.check(["key"]),
        )
        for kind in (own, others)
    ]
    assert answers[0] == answers[1]
    assert store.num_keys() == 2


def test_a_wait_ends_when_another_sets_the_value(server: StoreServer, store: GroupStore) -> None:
    with closing(store.clone()) as other, ThreadPoolExecutor() as threads:
        waiting = threads.submit(store.get, "later")
        other.set("later", b"\0\xff")
        assert waiting.result() == b"\0\xff"
    with pytest.raises(dist.DistStoreError, match="never"):
        store.wait(["later", "never"], timedelta(milliseconds=1))
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(store.get, "never")
        server.close()
        with pytest.raises((dist.DistNetworkError, dist.DistStoreError)):
            waiting.result()


def test_strangers_neither_read_nor_write(server: StoreServer, store: GroupStore) -> None:
    store.set("key", "value")
    with pytest.raises(dist.DistNetworkError, match="not ours"):
        GroupStore((server.host, server.port), b"guessed", timeout=LIMIT)
    silent = [socket.create_connection((server.host, server.port)) for _ in range(100)]
    try:
        for caller in silent[:10]:
            caller.sendall(b"\0\0\0\x20" + b'{"op":"set","key":"key","value":""}')
        with closing(store.clone()) as another:  # whoever knows the secret still gets in
            assert another.get("key") == b"value"
    finally:
        for caller in silent:
            caller.close()


def test_a_bad_request_ends_only_its_own_connection(server: StoreServer, store: GroupStore) -> None:
    with closing(store.clone()) as other:
        for request in ({}, {"op": "shell"}, {"op": "get", "key": "none"}, {"op": "add", "key": 1}):
            with closing(store.clone()) as bad, pytest.raises(dist.DistNetworkError):
                bad._call(**request)
        other.set("key", "value")
    assert store.get("key") == b"value"


def test_it_listens_where_it_was_told_and_nowhere_else(server: StoreServer) -> None:
    assert [listener.getsockname()[0] for listener in server._listeners] == ["127.0.0.1"]
    two = StoreServer("127.0.0.1", SECRET, other_hosts=["127.0.0.2"])
    with (
        closing(two),
        closing(GroupStore(("127.0.0.2", two.port), SECRET, timeout=LIMIT)) as joined,
    ):
        joined.set("key", "value")
        with closing(GroupStore(("127.0.0.1", two.port), SECRET, timeout=LIMIT)) as other:
            assert other.get("key") == b"value"
