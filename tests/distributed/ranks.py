"""Several real processes for a test: forked from one that has torch loaded, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from yunlu.planning.layouts import Layout

_context: Any = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "yunlu.training.engine",
        "yunlu.training.parallel.parallel_model",
        "yunlu.training.elastic.worker_agent",
        "torch._dynamo",
    ]
)


def run_world(
    function: Callable[..., Any],
    layout: Layout,
    *args: Any,
    timeout_s: float = LIMIT_S,
    in_order: bool = True,
) -> list[Any]:
    """``function(world, *args)`` on every rank of a layout; what each returned, by rank.

    ``function`` lies at the top of a test module, and returns plain values or CPU tensors' lists.
    """
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        return run_ranks(
            _in_world,
            layout.world,
            function,
            layout,
            store,
            args,
            timeout_s=timeout_s,
            in_order=in_order,
        )


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = LIMIT_S,
    in_order: bool = True,
) -> list[Any]:
    """``function(rank, *args)`` in ``size`` processes; the first failure is raised here.

    ``in_order`` waits for the lower ranks first; otherwise whoever fails first ends them all.
    """
    readers: list[Connection] = []
    processes: list[Any] = []
    deadline = time.monotonic() + timeout_s
    try:
        for rank in range(size):
            reader, writer = _context.Pipe(duplex=False)
            process = _context.Process(target=_child, args=(writer, function, rank, args))
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        if in_order:
            return [_answer(reader, rank, deadline) for rank, reader in enumerate(readers)]
        answers: dict[int, Any] = {}
        while len(answers) < size:
            left = [readers[rank] for rank in range(size) if rank not in answers]
            for reader in wait(left, max(0.0, deadline - time.monotonic())) or left:
                rank = readers.index(cast("Connection", reader))
                answers[rank] = _answer(readers[rank], rank, deadline)
        return [answers[rank] for rank in range(size)]
    finally:
        for process in processes:
            if process.is_alive():
                process.join(1)  # it has answered, or never will
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def _answer(reader: Connection, rank: int, deadline: float) -> Any:
    if not reader.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"rank {rank} did not answer in time")
    try:
        is_good, value = reader.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died without a word") from None
    if not is_good:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def _child(
    writer: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        writer.send((True, function(rank, *args)))
    except BaseException:  # noqa: BLE001 - it is told to the test
        writer.send((False, traceback.format_exc()))


def _in_world(
    rank: int, function: Callable[..., Any], layout: Layout, store: str, args: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    from tests.training_device import device_of
    from yunlu.training.device import synchronize
    from yunlu.training.parallel.world import form_world

    meeting = dist.FileStore(store, layout.world) if layout.world > 1 else None
    world = form_world(layout, rank, meeting, secret=b"test", device=device_of(rank))
    try:
        answer = function(world, *args)
        synchronize(world.device)  # others may still receive what a device has not sent yet
        return answer
    finally:
        world.close()
