"""Two processes on two devices: DDP, FSDP2 and DTensor against the CPU; waits, hangs, aborts."""

from __future__ import annotations

import copy
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pretend_accelerator as pretend
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.pretend.programs.checks import raises

WORLD = 2


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(30, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 30))


def train(net: nn.Module, device: torch.device, steps: int = 3) -> list[float]:
    torch.manual_seed(10 + dist.get_rank())
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True), []
    for _ in range(steps):
        x = torch.randint(30, (4, 9)).to(device)
        loss = nn.functional.cross_entropy(net(x[:, :-1]).mT, x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_training(device: torch.device) -> None:
    expected = train(DistributedDataParallel(make_net()), torch.device("cpu"))
    assert train(DistributedDataParallel(make_net().to(device)), device) == expected
    net = make_net().to(device)
    mesh = init_device_mesh("npu", (WORLD,))
    for part in net[1:4]:
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    torch.testing.assert_close(train(net, device), expected, rtol=0, atol=1e-6)
    one = copy.deepcopy(make_net()).to(device)
    block = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for part in one[1:4]:
        parallelize_module(part, mesh, block)
    x = torch.arange(12, device=device).view(2, 6)
    loss = one(x).square().mean()
    loss.backward()
    whole = make_net()
    there = whole(x.cpu()).square().mean()
    there.backward()
    torch.testing.assert_close(loss.cpu(), there)
    torch.testing.assert_close(one[1][0].weight.grad.full_tensor().cpu(), whole[1][0].weight.grad)
    assert pretend.races() == []  # no false alarm


def check_collectives(device: torch.device) -> None:
    rank = dist.get_rank()

    def full(value: float) -> torch.Tensor:
        return torch.full((2,), float(value), device=device)

    x = full(rank)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [0.5, 0.5]
    out = torch.empty(4, device=device)
    dist.all_gather_into_tensor(out, full(rank))
    assert out.tolist() == [0, 0, 1, 1]
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, out)
    assert part.tolist() == [2 * rank, 2 * rank]
    dist.all_to_all_single(out, torch.arange(4.0, device=device) + 10 * rank)
    assert out.tolist() == [2 * rank, 2 * rank + 1, 2 * rank + 10, 2 * rank + 11]
    dist.broadcast(x.fill_(rank), 1)
    assert x.tolist() == [1, 1]
    peer = full(0.0)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, full(rank), 1 - rank), dist.P2POp(dist.irecv, peer, 1 - rank)]
    )
    for work in works:
        work.wait()
    assert peer.tolist() == [1 - rank] * 2
    told: list[object] = [None, None]
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": 0}, {"rank": 1}]
    dist.all_reduce(torch.ones(2))  # of the host, by gloo beside it
    with pretend.counting() as counts:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
    assert counts["collectives"] == 2
    assert counts["synchronizations"] == 0
    with pretend.counting() as counts:
        dist.barrier(device_ids=[rank])  # without, it is the CPU's
    assert counts["waits_barrier"] == 1


def check_a_missing_wait_is_a_race(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    work = dist.all_reduce(x, async_op=True)
    with raises(RuntimeError, "group stream"):
        x + 1
    work.wait()
    assert x.tolist() == [2, 2, 2, 2]
    # Gradients on their way in one half of a buffer, backward in the other half.
    buffer = torch.ones(8, device=device)
    work = dist.all_reduce(buffer[:4], async_op=True)
    buffer[4:].add_(1)
    work.wait()
    assert buffer.tolist() == [2] * 8


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def check_a_peer_that_does_not_come_hangs_until_abort(device: torch.device) -> None:
    group, store = dist.new_group(backend="npu:hccl"), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["aborted"])
        return
    x = torch.ones(4, device=device)
    found: list[list[float]] = []
    dist.all_reduce(x, group=group)
    thread = threading.Thread(target=lambda: found.append(x.tolist()))
    thread.start()
    assert not found
    group.abort()
    thread.join()
    store.set("aborted", "")
    assert all(math.isnan(value) for value in found[0])
    assert x.cpu().isnan().all()  # nothing of the group is at work any more: no race
    assert (x + 1).isnan().all()


def check_a_dead_peer_hangs_until_abort(device: torch.device) -> None:
    group = dist.new_group(backend="npu:hccl")
    x = torch.ones(4, device=device)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2, 2, 2, 2]
    if dist.get_rank() == 1:
        os._exit(0)
    found: list[list[float]] = []
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()  # makes the stream wait, not the host
    waits = (
        lambda: None,  # but to read the result does
        torch.accelerator.synchronize,
        torch.accelerator.current_stream().synchronize,
        torch.accelerator.current_stream().record_event().synchronize,
    )

    def step(wait: Callable[[], object]) -> None:
        torch.accelerator.set_device_index(device.index)
        wait()
        found.append((x + 1).tolist())

    threads = [threading.Thread(target=step, args=(wait,)) for wait in waits]
    for thread in threads:
        thread.start()
    backend = group._get_backend(device)
    until(backend.is_hanging)
    assert not found
    assert not work.is_completed()
    backend.abort()
    for thread in threads:
        thread.join()
    assert len(found) == len(waits)
    assert all(
        math.isnan(value) for values in found for value in values
    )  # what a broken collective leaves
    with raises(dist.DistBackendError, "aborted"):
        work.wait()
    with raises(dist.DistBackendError, "aborted"):
        dist.all_reduce(x, group=group)
    assert (torch.ones(2, device=device) + 1).tolist() == [2, 2]  # the device goes on


def run_rank(rank: int, folder: str) -> None:
    store = dist.FileStore(str(Path(folder, "store")), WORLD)
    device = torch.device("npu", rank)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        "cpu:gloo,npu:hccl", store=store, rank=rank, world_size=WORLD, device_id=device
    )
    assert dist.get_default_backend_for_device("npu") == "hccl"
    for check in (
        check_training,
        check_collectives,
        check_a_missing_wait_is_a_race,
        check_a_peer_that_does_not_come_hangs_until_abort,
        check_a_dead_peer_hangs_until_abort,
    ):
        check(device)
        if check is check_collectives:
            assert pretend.contexts() == [rank]


def ranks(folder: str) -> Iterator[int]:
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            try:
                run_rank(rank, folder)
                os.write(1, f"rank {rank} is done\n".encode())
                os._exit(0)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(1)
        yield child


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        children = list(ranks(folder))
        ended = [os.wait()[1] for _ in children]
    sys.exit(any(ended))
