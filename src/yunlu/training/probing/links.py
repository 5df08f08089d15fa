"""Benchmark of worker start-up and of the link between two workers of this machine.

``python -m yunlu.training.probing.links STORE`` is the second worker: it reports how long it took to
start, then takes part in the exchange.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from yunlu.core.limits import decode_json
from yunlu.core.processes import end_with_parent, piped_process
from yunlu.planning.machine_profile import LinkFigures, StartFigures, fit_message_time
from yunlu.training.device import CPU, accelerator_kind, backend_of, open_device, synchronize
from yunlu.training.parallel.gloo_tunnel import keep_on_loopback
from yunlu.training.parallel.sockets import close_listeners, open_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
ROUNDS = 12
_TIMEOUT_S = 20
_DROPPED = 2
"""Warm-up rounds of each size: they connect and allocate."""


_PROGRAM = (sys.executable, "-m", "yunlu.training.probing.links")


class WorkerGoneError(Exception):
    """The second worker ended before it reported anything."""


def measure_start_and_link() -> tuple[StartFigures, LinkFigures | None]:
    """Start a second worker, then exchange arrays with it; no link figures if that fails."""
    with tempfile.TemporaryDirectory(prefix="yunlu-probe-") as directory:
        store = str(Path(directory) / "store")
        began_at = time.time()
        command = [*_PROGRAM, store, json.dumps(SIZES), str(ROUNDS)]
        with piped_process(command) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                raise WorkerGoneError
            report: dict[str, float] = decode_json(line)
            try:
                link = exchange(0, store, SIZES, ROUNDS)
            except RuntimeError:  # torch raises it for every failure of a collective
                link = None
    start = StartFigures(
        torch_s=report["torch_at"] - began_at,
        worker_s=report["worker_at"] - began_at,
        cpu_s=report["cpu_s"],
        resident_bytes=report["resident_bytes"],
    )
    return start, link


def exchange(rank: int, store: str, sizes: Sequence[int], rounds: int) -> LinkFigures | None:
    """Time collectives between both workers; returns the figures on the first."""
    kind = accelerator_kind()
    has_several = kind is not None and torch.accelerator.device_count() > 1
    device = open_device(kind, rank) if kind is not None and has_several else CPU
    backend = backend_of(device)
    keep_on_loopback()
    before = open_sockets()
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    close_listeners(before)
    try:
        sums_s: list[float] = []
        sends_s: list[float] = []
        for size in sizes:
            array = torch.zeros(max(size // 4, 1), device=device)
            sums_s.append(_best(partial(dist.all_reduce, array), rounds, device))
            # Half of a round trip.
            round_trip_s = _best(partial(_send_and_return, array, rank), rounds, device)
            sends_s.append(round_trip_s / 2)
    finally:
        dist.destroy_process_group()
    if rank:
        return None
    return LinkFigures(
        backend=backend,
        all_reduce=fit_message_time(sizes, sums_s),
        send=fit_message_time(sizes, sends_s),
    )


def _send_and_return(array: torch.Tensor, rank: int) -> None:
    for sender in (0, 1):
        if rank == sender:
            dist.send(array, 1 - rank)
        else:
            dist.recv(array, 1 - rank)


def _best(run: Callable[[], Any], rounds: int, device: torch.device) -> float:
    spans: list[float] = []
    for _ in range(rounds + _DROPPED):
        dist.barrier()
        started_at = time.perf_counter()
        run()
        synchronize(device)
        spans.append(time.perf_counter() - started_at)
    return min(spans[_DROPPED:])


def main(store: str, sizes: str, rounds: str) -> int:
    """The second worker."""
    torch_at = time.time()
    end_with_parent()
    import_module("yunlu.training.worker")  # what every worker loads
    worker_at = time.time()
    import_module("torch.utils.tensorboard")
    layer = torch.nn.Linear(64, 64)
    layer(torch.randn(64, 64)).sum().backward()  # allocates the kernels' memory
    process = psutil.Process()
    spent = process.cpu_times()
    report = {
        "torch_at": torch_at,
        "worker_at": worker_at,
        "cpu_s": spent.user + spent.system,
        "resident_bytes": process.memory_info().rss,
    }
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    exchange(1, store, decode_json(sizes), int(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
