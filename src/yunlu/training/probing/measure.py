"""Measure this machine, whole or in a hurry.

``python -m yunlu.training.probing.measure [--quick] [--threads N]`` does it for rooms that must not
import torch, and for runs whose memory is measured: a JSON line for each part as it begins, and one with
the figures at the end. It ends when its standard input does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.settings import read_settings
from yunlu.planning.machine_profile import MachineProfile, make_monotonic
from yunlu.training.probe import probe_machine
from yunlu.training.probing.child_process import end_with_parent
from yunlu.training.probing.microbenchmarks import (
    ATTENTIONS,
    CONVOLUTIONS,
    GPU_PRODUCT_SIDES,
    MOVED_BYTES,
    PRODUCT_SIDES,
    bench_for,
    measure_attention,
    measure_bandwidth,
    measure_convolutions,
    measure_moves,
    measure_products,
    with_threads,
)
from yunlu.training.probing.model_benchmarks import measure_call, measure_mixed
from yunlu.training.probing.profile_store import save_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from yunlu.hardware.machine import Machine
    from yunlu.planning.machine_profile import KernelTiming, Kind
    from yunlu.training.probing.microbenchmarks import Bench

    Part = tuple[str, Callable[[], dict[str, Any]]]
    Told = Callable[[str, int, int], None]

_ARRAY_BYTES = 64 << 20
_QUICK_ARRAY_BYTES = 16 << 20
_QUICK_BUDGET_S = 0.012
_BUDGET_S = 0.06
_MOVES: tuple[Kind, ...] = ("stream", "function", "random", "update")


def measure_machine(*, quick: bool = False, told: Told | None = None) -> MachineProfile:
    """All figures: in under a minute, or in about a second those that a plan needs at once."""
    with torch.random.fork_rng(devices=[]):  # a run that begins here draws what it would have drawn
        return _measure(quick=quick, told=told)


def _measure(*, quick: bool, told: Told | None) -> MachineProfile:
    began_at, machine = time.perf_counter(), probe_machine()
    device = machine.best_device
    parts = list(_parts(machine, quick=quick))
    found: dict[str, Any] = {"paces": ()}
    for place, (name, run) in enumerate(parts):
        if told is not None:
            told(name, place, len(parts))
        part = run()
        found |= {**part, "paces": (*found["paces"], *part.get("paces", ()))}
    found["paces"] = make_monotonic(found["paces"])
    probed = MachineProfile(
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
        **found,
    )
    with with_threads(1), torch.enable_grad():
        return measure_mixed(probed, bench_for(probed.kind, 1), trials=5 if quick else 25)


def _parts(machine: Machine, *, quick: bool) -> Iterator[Part]:
    kind, budget_s = machine.best_device.kind, _QUICK_BUDGET_S if quick else _BUDGET_S
    threads = sorted({1, torch.get_num_threads()}) if kind == "cpu" else [1]
    if not quick:
        yield "starting a worker, exchanging arrays with it", _start_and_link
    yield "calls of operators", lambda: {"call_s": _call_s(kind)}
    for count in threads:
        bench = bench_for(kind, count, budget_s=budget_s)
        words = f", {count} thread{'s' if count > 1 else ''}" if kind == "cpu" else ""
        for precision in _precisions(machine, quick=quick or count > 1):
            yield (
                f"matrix products in {precision}{words}",
                lambda b=bench, p=precision: {"paces": (_products(b, p, quick=quick),)},
            )
        yield (
            f"convolutions{words}",
            lambda b=bench: {"paces": measure_convolutions(b, CONVOLUTIONS)},
        )
        yield (
            f"attention{words}",
            lambda b=bench: {"paces": (measure_attention(b, ATTENTIONS),)},
        )
        for move in _MOVES:
            sizes = MOVED_BYTES[:-2] if quick else MOVED_BYTES
            yield (
                f"{_MOVE_NAMES[move]}{words}",
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
        return ["fp32", *(each for each in device.fast_precisions if each in {"bf16", "fp16"})]
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
    except WorkerGoneError:  # the other figures stand without it
        return {}
    return {"start": start, "link": link}


def _disk() -> dict[str, Any]:
    from yunlu.training.probing.disk import measure_disk  # noqa: PLC0415 - only here

    try:
        return {"disk": measure_disk(read_settings().home)}
    except OSError:  # read-only or full: the other figures stand without it
        return {}


def main() -> int:
    """Measure, telling each part, and store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    end_with_parent()
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)

    def tell(name: str, place: int, of: int) -> None:
        sys.stdout.write(json.dumps({"part": name, "place": place, "of": of}) + "\n")
        sys.stdout.flush()

    probed = measure_machine(quick=asked.quick, told=tell)
    save_profile(probed)
    sys.stdout.write(json.dumps({"probed": probed.model_dump(mode="json")}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
