"""Workers that die or stop in the middle of a sum: the others learn of it, none of them hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.waiting import LIMIT_S
from yunlu.training.communication.allreduce import ALGORITHMS
from yunlu.training.communication.allreducer import AllReducer, ThreadedAllReducer, TorchAllReducer
from yunlu.training.communication.transport import LinkLostError, Transport, connect

if TYPE_CHECKING:
    from collections.abc import Generator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.distributed

SIZE = 4
_context: Any = multiprocessing.get_context("forkserver")


def _sum_until_lost(told: Connection, rank: int, path: str, method: str, patience_s: float) -> None:
    """Say when the first sum is done, and what ended the last one."""
    torch.set_num_threads(1)
    store = dist.FileStore(path, SIZE)
    host = f"127.0.0.{1 + rank // 2}"
    transport = connect(store, rank, SIZE, host, secret=b"test", patience_s=patience_s)
    flat = torch.zeros(300_000)
    tag = 0
    try:
        while True:
            ALGORITHMS[method](transport, flat, tag=tag)
            if not tag:
                told.send("summing")
            tag += 1
    except LinkLostError as error:
        told.send(type(error).__name__)
    told.recv()  # it lives on: only what it did, not its end, may have told the others


@contextmanager
def _workers(path: Path, method: str, patience_s: float) -> Generator[list[tuple[Any, Connection]]]:
    workers: list[tuple[Any, Connection]] = []
    try:
        for rank in range(SIZE):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_sum_until_lost, args=(theirs, rank, str(path / "store"), method, patience_s)
            )
            process.start()
            theirs.close()
            workers.append((process, ours))
        yield workers
    finally:
        for process, ours in workers:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            ours.close()


def _receive(ours: Connection) -> str:
    assert ours.poll(LIMIT_S), "it hangs"
    return ours.recv()


@pytest.mark.parametrize("method", ALGORITHMS)
def test_who_is_killed_in_the_middle_of_a_sum_is_missed_by_all(tmp_path: Path, method: str) -> None:
    with _workers(tmp_path, method, 600.0) as workers:
        assert [_receive(ours) for _, ours in workers] == ["summing"] * SIZE
        os.kill(workers[-1][0].pid, signal.SIGKILL)
        assert [_receive(ours) for _, ours in workers[:-1]] == ["LinkLostError"] * (SIZE - 1)


@pytest.mark.parametrize("method", ["ring", "hierarchical"])
def test_who_is_stopped_in_the_middle_of_a_sum_is_missed_after_a_while(
    tmp_path: Path, method: str
) -> None:
    with _workers(tmp_path, method, 2.0) as workers:
        assert [_receive(ours) for _, ours in workers] == ["summing"] * SIZE
        os.kill(workers[1][0].pid, signal.SIGSTOP)
        heard = [_receive(ours) for number, (_, ours) in enumerate(workers) if number != 1]
        assert heard == ["LinkLostError"] * (SIZE - 1)


def _add(transport: Transport, flat: Tensor, _key: int, tag: int) -> None:
    ALGORITHMS["direct"](transport, flat, tag=tag)


def _sum_both_ways(rank: int, path: str) -> list[list[float]]:
    store = dist.FileStore(path, 3)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=3)
    assert dist.group.WORLD is not None
    ways: list[AllReducer] = [
        TorchAllReducer(dist.group.WORLD),
        ThreadedAllReducer(connect(store, rank, 3, "127.0.0.1", secret=b"test"), _add),
    ]
    found: list[list[float]] = []
    for way in ways:
        flats = [torch.arange(6.0) * (rank + 1) + key for key in range(3)]
        pendings = [way.begin(flat, key=key) for key, flat in enumerate(flats)]
        for pending in pendings:
            pending.wait()
        found.append(torch.cat(flats).tolist())
        assert way.traffic().sent_bytes >= 3 * 2 * 2 * 24 // 3
    dist.barrier()
    ways[1].close()
    dist.destroy_process_group()
    return found


def test_torch_and_wires_give_the_same_sums(tmp_path: Path) -> None:
    expected = [6.0 * value + 3 * key for key in range(3) for value in range(6)]
    assert run_ranks(_sum_both_ways, 3, str(tmp_path / "store")) == [[expected, expected]] * 3
