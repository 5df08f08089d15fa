"""Faults of several workers on accelerators, two ranks; each check fails without its cure."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pretend_accelerator as pretend
import torch
import torch.distributed as dist
from torch import nn

from tests.pretend.programs.checks import raises
from yunlu.planning.layouts import Layout
from yunlu.training.checkpoint.store import SaveGroup
from yunlu.training.communication.allreducer import ThreadedAllReducer, TorchAllReducer
from yunlu.training.device import kind_of
from yunlu.training.engine import Engine
from yunlu.training.parallel.gradient_allreduce import GradientAllReduce
from yunlu.training.parallel.redistribute import broadcast_json, gather_json
from yunlu.training.parallel.sync_batch_norm import synchronise_batch_norm
from yunlu.training.parallel.world import World, _form_groups, form_world

WORLD = 2


def check_numbers_of_the_host_need_no_device(world: World) -> None:
    assert pretend.contexts() == [], "forming a world computes nothing"
    assert gather_json(world.rank) == [0, 1]
    assert broadcast_json(world.rank, source=1) == 1
    assert SaveGroup(rank=world.rank, size=2).all_good(is_good=True)
    assert world.sum_over_all(torch.ones(2, dtype=torch.float64)).tolist() == [2, 2]
    assert world.broadcast_numbers(world.rank + 5.0) == [5]
    group = world.group("dp")
    flags = torch.ones(2)
    dist.all_reduce(flags, group=group)
    assert flags.tolist() == [2, 2]
    assert pretend.contexts() == []
    assert torch.accelerator.current_device_index() == world.rank, "groups take the current device"


def check_a_library_that_connects_at_once_is_told_the_device(world: World) -> None:
    told: list[dict[str, Any]] = []

    class FormedError(Exception):
        """Far enough."""

    def note(*_: object, **settings: Any) -> None:
        told.append(settings)
        raise FormedError

    kind, init = kind_of(world.device.type), dist.init_process_group
    dist.init_process_group = note
    try:
        for connects in (False, True):
            kind.connects_at_once = connects
            with suppress(FormedError):
                _form_groups(world.layout, world.rank, None, world.device, is_tunnelled=False)
    finally:
        dist.init_process_group = init
        del kind.connects_at_once
    assert [settings["device_id"] for settings in told] == [None, world.device]


def check_gradients_are_sent_while_backward_runs(world: World) -> None:
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(world.device)
    reducer = TorchAllReducer(world.group("dp"), world.wait_for)
    gradients = GradientAllReduce(list(net.parameters()), reducer, bucket_bytes=1)
    sent: list[int] = []
    before = pretend.counters()["collectives"]
    first: Any = net[0].weight
    first.register_hook(lambda _: sent.append(pretend.counters()["collectives"] - before))
    for _ in range(2):
        gradients.arm()
        net(torch.ones(2, 32, device=world.device)).sum().backward()
        gradients.finish()
        first.sum().item()
    assert sent[0] >= 6, "all layers but the first are on their way"
    assert gradients.exchange_s > 0, "of the step before: two events tell it, no wait"
    with pretend.counting() as counts:
        gradients.is_watched = True
        gradients.arm()
        net(torch.ones(2, 32, device=world.device)).sum().backward()
        gradients.finish()
        local, summed = gradients.squares()
    assert {local.dtype, summed.dtype} == {torch.float32}
    assert summed.item() > 3.9 * local.item()
    assert counts["waits_item"] == counts["waits_copy_to_host"] == 0
    gradients.close()


def check_sums_by_a_thread_take_tensors_of_the_device(world: World) -> None:
    transport = world.open_transport()

    def run(_transport: object, flat: torch.Tensor, _key: int, _tag: int) -> None:
        flat.mul_(2)  # as if the other had sent the same

    reducer = ThreadedAllReducer(transport, run)
    values = torch.arange(1000.0, device=world.device).to(torch.bfloat16)
    with pretend.counting() as counts:
        pending = reducer.begin(values, key=0)
    assert counts["synchronizations"] == 0, "backward goes on"
    pending.wait()
    assert torch.equal(values.cpu(), (2 * torch.arange(1000.0)).to(torch.bfloat16))
    reducer.close()


def check_batch_norm_over_the_group_waits_for_nothing(world: World) -> None:
    torch.manual_seed(3)
    values = torch.randn(2, 8, 5) * 0.1 + 100
    whole, part = nn.BatchNorm1d(5, momentum=0.3), nn.BatchNorm1d(5, momentum=0.3).to(world.device)
    expected = whole(values.flatten(0, 1))
    synchronise_batch_norm(part, world.adding("dp", "fsdp"))
    here = values[world.rank].to(world.device)
    part(here)  # the running mean is near from now on
    whole.train()(values.flatten(0, 1))
    with pretend.counting() as counts:
        found = part(here)
    assert counts["synchronizations"] == 0
    torch.testing.assert_close(
        found.cpu(), expected.view(2, 8, 5)[world.rank], rtol=2e-3, atol=2e-3
    )
    torch.testing.assert_close(part.running_var.cpu(), whole.running_var, rtol=1e-3, atol=1e-6)


def check_a_dead_peer_ends_by_abort(world: World) -> None:
    """Last: the other rank dies in a collective of the device, where no socket of ours waits."""
    device = world.device
    values = torch.ones(4, device=device)
    world.sum_over_all(values)
    assert values.tolist() == [2] * 4
    world.sum_over_all(torch.ones(1))  # by the hosts: gloo has sent all that the other waits for
    if world.rank == 1:
        os._exit(0)
    ended = threading.Event()

    def step() -> None:
        world.sum_over_all(values)
        values.tolist()  # as the loss of a step
        ended.set()

    thread = threading.Thread(target=step)
    thread.start()
    backend = world.group("dp")._get_backend(device)
    default: Any = dist.group.WORLD
    until(lambda: backend.is_hanging() or default._get_backend(device).is_hanging())
    assert not ended.is_set()
    world.disconnect()
    thread.join()
    assert ended.is_set()
    with raises(dist.DistBackendError, "abort"):
        dist.all_reduce(values)
    # A step that reads it must not pass for one whose loss is no number: it would be skipped, and not logged.
    nothing = SimpleNamespace(unread=None)
    engine: Any = SimpleNamespace(world=world, clock=None, _feed=None, noise=nothing)
    with raises(dist.DistNetworkError, "cut"):
        Engine._read_from_device(engine, values[0], values[1])


def until(condition: Callable[[], bool]) -> None:
    moment = threading.Event()
    while not condition():
        moment.wait(0.01)


CHECKS = (
    check_a_library_that_connects_at_once_is_told_the_device,
    check_numbers_of_the_host_need_no_device,
    check_gradients_are_sent_while_backward_runs,
    check_sums_by_a_thread_take_tensors_of_the_device,
    check_batch_norm_over_the_group_waits_for_nothing,
    check_a_dead_peer_ends_by_abort,
)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), WORLD)
    # The current device is the first one: whoever forms the world sees to it.
    device = torch.device("npu", rank)
    world = form_world(Layout(dp=WORLD), rank, store, device=device, secret=b"0" * 32)
    for check in CHECKS:
        check(world)
        os.write(1, f"{check.__name__}: rank {rank}\n".encode())
    assert pretend.contexts() == [rank]
    assert not pretend.races()


def run_ranks(run: Callable[[int, str], None]) -> int:
    """Fork the ranks; 0 if all ended well. The others of one that failed would wait for it: they end."""
    with TemporaryDirectory() as folder:
        children = {_fork_rank(run, rank, folder) for rank in range(WORLD)}
        failed = 0
        while children:
            child, status = os.wait()
            children.discard(child)
            if status and not failed:
                failed = 1
                for other in children:
                    os.kill(other, signal.SIGKILL)
        return failed


def _fork_rank(run: Callable[[int, str], None], rank: int, folder: str) -> int:
    child = os.fork()
    if child == 0:
        try:
            run(rank, folder)
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
    return child


if __name__ == "__main__":
    sys.exit(run_ranks(run_rank))
