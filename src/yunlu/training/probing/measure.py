"""Benchmarks of this machine, complete or quick.

``python -m yunlu.training.probing.measure [--quick] [--threads N]`` runs them for packages that must not
import torch, and for runs whose memory is measured: a JSON line for each part as it begins, and one with
the profile at the end. It ends when its standard input closes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.files import make_directory
from yunlu.core.processes import end_with_parent
from yunlu.core.settings import read_settings
from yunlu.planning.machine_profile import DiskFigures, MachineProfile, make_monotonic
from yunlu.training.probe import probe_machine
from yunlu.training.probing.microbenchmarks import (
    ATTENTIONS,
    CONVOLUTIONS,
    GPU_PRODUCT_SIDES,
    MOVED_BYTES,
    PRODUCT_SIDES,
    bench_for,
    measure_attention,
    measure_bandwidth,
    measure_call,
    measure_convolutions,
    measure_mixed,
    measure_moves,
    measure_products,
    with_threads,
)
from yunlu.training.probing.profile_store import save_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from yunlu.hardware.fleet import Machine
    from yunlu.planning.machine_profile import KernelTiming, Kind
    from yunlu.training.probing.microbenchmarks import Bench

    Part = tuple[str, Callable[[], dict[str, Any]]]
    ProgressCallback = Callable[[str, int, int], None]

SIZE = 64 << 20
_CHUNK = 4 << 20


def measure_disk(folder: Path, size: int = SIZE, *, trials: int = 2) -> DiskFigures:
    """Best of a few trials; the file is deleted."""
    make_directory(folder)
    chunk = os.urandom(min(_CHUNK, size))  # random bytes: a disk may compress repetitions
    written: list[float] = []
    read: list[float] = []
    for _ in range(trials):
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".yunlu-probe-") as file:
            started_at = time.perf_counter()
            for _ in range(max(size // len(chunk), 1)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            written.append(time.perf_counter() - started_at)
            if hasattr(os, "posix_fadvise"):  # else it would be read from the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started_at = time.perf_counter()
            while file.read(_CHUNK):
                pass
            read.append(time.perf_counter() - started_at)
    total = max(size // len(chunk), 1) * len(chunk)
    return DiskFigures(write_bytes_per_s=total / min(written), read_bytes_per_s=total / min(read))


_ARRAY_BYTES = 64 << 20
_QUICK_ARRAY_BYTES = 16 << 20
_QUICK_BUDGET_S = 0.012
_BUDGET_S = 0.06
_MOVES: tuple[Kind, ...] = ("stream", "function", "random", "update")


def measure_machine(
    *, quick: bool = False, on_part: ProgressCallback | None = None
) -> MachineProfile:
    """All benchmarks in under a minute, or those a plan needs first in about a second."""
    with torch.random.fork_rng(devices=[]):  # a run in this process keeps its random numbers
        return _measure(quick=quick, on_part=on_part)


def _measure(*, quick: bool, on_part: ProgressCallback | None) -> MachineProfile:
    began_at, machine = time.perf_counter(), probe_machine()
    device = machine.best_device
    parts = list(_parts(machine, quick=quick))
    figures: dict[str, Any] = {"paces": ()}
    for index, (name, run) in enumerate(parts):
        if on_part is not None:
            on_part(name, index, len(parts))
        part = run()
        figures |= {**part, "paces": (*figures["paces"], *part.get("paces", ()))}
    figures["paces"] = make_monotonic(figures["paces"])
    profile = MachineProfile(
        at=time.time(),
        took_s=time.perf_counter() - began_at,
        is_quick=quick,
        host=machine.hostname,
        kind=device.kind,
        device=device.name,
        devices=max(machine.gpus, 1),
        cores=machine.cores,
        memory_bytes=machine.memory_bytes if device.kind == "cpu" else device.memory_bytes,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        **figures,
    )
    with with_threads(1), torch.enable_grad():
        return measure_mixed(profile, bench_for(profile.kind, 1), trials=5 if quick else 25)


def _parts(machine: Machine, *, quick: bool) -> Iterator[Part]:
    kind, budget_s = machine.best_device.kind, _QUICK_BUDGET_S if quick else _BUDGET_S
    threads = sorted({1, torch.get_num_threads()}) if kind == "cpu" else [1]
    if not quick:
        yield "starting a worker, exchanging arrays with it", _start_and_link
    yield "calls of operators", lambda: {"call_s": _call_s(kind)}
    for count in threads:
        bench = bench_for(kind, count, budget_s=budget_s)
        label = f", {count} thread{'s' if count > 1 else ''}" if kind == "cpu" else ""
        for precision in _precisions(machine, quick=quick or count > 1):
            yield (
                f"matrix products in {precision}{label}",
                lambda b=bench, p=precision: {"paces": (_products(b, p, quick=quick),)},
            )
        yield (
            f"convolutions{label}",
            lambda b=bench: {"paces": measure_convolutions(b, CONVOLUTIONS)},
        )
        yield (
            f"attention{label}",
            lambda b=bench: {"paces": (measure_attention(b, ATTENTIONS),)},
        )
        for move in _MOVES:
            sizes = MOVED_BYTES[:-2] if quick else MOVED_BYTES
            yield (
                f"{_MOVE_NAMES[move]}{label}",
                lambda b=bench, m=move, s=sizes: {"paces": (measure_moves(b, m, s),)},
            )
    yield "memory bandwidth", lambda: _bandwidth(kind, max(threads), quick=quick)
    if not quick:
        yield "the disk", _disk


_MOVE_NAMES = {
    "stream": "sums",
    "function": "functions",
    "random": "drawn numbers",
    "update": "the optimiser's update",
}


def _precisions(machine: Machine, *, quick: bool) -> list[str]:
    device = machine.best_device
    if quick:
        return ["fp32", *(name for name in device.fast_precisions if name in {"bf16", "fp16"})]
    tf32 = ["tf32"] if "tf32" in device.fast_precisions else []
    return ["fp32", *tf32, "bf16", "fp16"]


def _products(bench: Bench, precision: str, *, quick: bool) -> KernelTiming:
    sides = PRODUCT_SIDES if bench.kind == "cpu" else GPU_PRODUCT_SIDES
    return measure_products(bench, precision, sides[:-1] if quick else sides)


def _call_s(kind: str) -> float:
    with with_threads(1), torch.enable_grad():
        return measure_call(bench_for(kind, 1))


def _bandwidth(kind: str, threads: int, *, quick: bool) -> dict[str, Any]:
    size, rates = _QUICK_ARRAY_BYTES if quick else _ARRAY_BYTES, list[float]()
    for count in {
        1,
        threads,
    }:  # on a busy machine threads wait for each other longer than they compute
        with with_threads(count):
            rates.append(measure_bandwidth(bench_for(kind, count), size)[0])
    return {"memory_bytes_per_s": max(rates)}


def _start_and_link() -> dict[str, Any]:
    from yunlu.training.probing.links import (  # noqa: PLC0415 - only here
        WorkerGoneError,
        measure_start_and_link,
    )

    try:
        start, link = measure_start_and_link()
    except WorkerGoneError:  # the other figures do not need it
        return {}
    return {"start": start, "link": link}


def _disk() -> dict[str, Any]:

    try:
        return {"disk": measure_disk(read_settings().home)}
    except OSError:  # read-only or full: the other figures do not need it
        return {}


def main() -> int:
    """Run the benchmarks with progress on standard output, and store the profile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    end_with_parent()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)

    def print_part(name: str, index: int, of: int) -> None:
        sys.stdout.write(json.dumps({"part": name, "index": index, "of": of}) + "\n")
        sys.stdout.flush()

    profile = measure_machine(quick=arguments.quick, on_part=print_part)
    save_profile(profile)
    sys.stdout.write(json.dumps({"probed": profile.model_dump(mode="json")}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
