"""Probe of this machine: its devices, and the speed of each precision.

``python -m yunlu.training.probe [--measure]`` prints it as JSON, also where torch is not installed,
for packages that must not import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil
import xxhash
from pydantic import TypeAdapter

from yunlu.core.cgroup import Cgroup, read_cgroup
from yunlu.core.files import make_directory, write_atomically
from yunlu.core.settings import read_settings
from yunlu.hardware.fleet import Device, Machine, Precision, PrecisionSpeed
from yunlu.planning.machine_profile import read_processor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Clock: TypeAlias = "Callable[[], float]"

# Flags of processors that compute in the precision instead of converting back and forth.
_CPU_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
_CPU_FP16 = ("avx512_fp16", "amx_fp16")


def probe_machine() -> Machine:
    """This machine: cores and memory as its containers allow, its devices, its price."""
    limits = read_cgroup()
    memory_bytes, free_bytes = _memory(limits)
    return Machine(
        hostname=socket.gethostname(),
        cores=count_cores(limits),
        memory_bytes=memory_bytes,
        devices=(_cpu(free_bytes), *_accelerators()),
        dollars_per_hour=read_settings().dollars_per_hour,
    )


def count_cores(limits: Cgroup) -> int:
    """Cores this process may use: its affinity, limited by the container's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:  # macOS, Windows
        allowed = os.cpu_count() or 1
    granted = limits.cores if limits.cores is not None else allowed
    return max(1, min(allowed, int(granted)))


def _memory(limits: Cgroup) -> tuple[int, int]:
    """Total and free bytes of the machine, limited by the container."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
        free = min(free, limits.memory_bytes - limits.memory_used_bytes)
    return total, max(0, free)


def _cpu(free_bytes: int) -> Device:
    torch = _torch()
    flags = {} if torch is None else dict(torch.cpu.get_capabilities())
    fast: list[Precision] = ["fp32"]
    if any(flags.get(flag) for flag in _CPU_BF16):
        fast.append("bf16")
    if any(flags.get(flag) for flag in _CPU_FP16):
        fast.append("fp16")
    return Device(kind="cpu", name=cpu_name(), memory_bytes=free_bytes, fast_precisions=tuple(fast))


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    return read_processor(text) or platform.processor() or platform.machine()


def _accelerators() -> list[Device]:
    torch = _torch()
    if torch is None:
        return []
    from yunlu.training.device import accelerator_kind, kind_of  # noqa: PLC0415 - imports torch

    name = accelerator_kind()
    if name is None:
        return []
    kind, count = kind_of(name), max(torch.accelerator.device_count(), 1)
    # Asking a device opens a context there: only the one that this process uses is asked.
    own = torch.accelerator.current_device_index() if kind.has_groups else 0
    device = Device(
        kind=name,
        name=kind.describe(own),
        memory_bytes=kind.memory_bytes(own),
        fast_precisions=tuple(kind.fast_precisions(own)),
    )
    return [device] * count


_SPEEDS = TypeAdapter(tuple[PrecisionSpeed, ...])


def measured_speeds(device: Device, *, ignore_cache: bool = False) -> tuple[PrecisionSpeed, ...]:
    """Speed of each precision, cached by device, torch version and number of threads."""
    known = None if ignore_cache else load_speeds(device)
    if known is not None:
        return known
    path, speeds = _speeds_file(device), tuple(measure_precisions(device))
    try:
        make_directory(path.parent)
        write_atomically(path, _SPEEDS.dump_json(speeds))
    except OSError:
        pass  # without a cache the next run measures again
    return speeds


def load_speeds(device: Device) -> tuple[PrecisionSpeed, ...] | None:
    """The speeds as measured before; None if they never were."""
    try:
        return _SPEEDS.validate_json(_speeds_file(device).read_bytes())
    except (OSError, ValueError):
        return None  # not cached, or damaged


def _speeds_file(device: Device) -> Path:
    import torch  # noqa: PLC0415 (takes seconds)

    where = [device.kind, device.name, torch.__version__, torch.get_num_threads()]
    key = xxhash.xxh3_64_hexdigest(json.dumps(where).encode())
    return read_settings().cache / "precisions" / f"{key}.json"


def measure_precisions(device: Device) -> list[PrecisionSpeed]:
    """Time the three matrix products of a linear layer in each precision; below a second."""
    if device.kind != "cpu":
        return _measure(device, time.perf_counter)
    import torch  # noqa: PLC0415

    # One thread by its own clock: on a busy machine threads wait for each other far longer than
    # they compute, and a precision that is fifty times slower can look like the faster one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(device, time.thread_time)
    finally:
        torch.set_num_threads(threads)


def _measure(device: Device, clock: Clock) -> list[PrecisionSpeed]:
    size = _benchmark_size(device.kind, clock)
    reference_s = _best_time(_products(device.kind, size, "fp32"), clock)
    speeds = [judge("fp32", 1.0, device.kind)]
    others: tuple[Precision, ...] = ("tf32", "bf16", "fp16")
    for precision in others:
        # FP8 is not timed: how fast it is depends on the kernels that convert to it.
        if precision == "tf32" and "tf32" not in device.fast_precisions:
            continue
        relative = _slow_speed(device.kind, precision, clock)
        if relative is None:
            work = _products(device.kind, size, precision)
            relative = reference_s / _best_time(work, clock, give_up_s=4 * reference_s)
        speeds.append(judge(precision, relative, device.kind))
    return speeds


def _slow_speed(kind: str, precision: Precision, clock: Clock) -> float | None:
    """Speed of a very slow precision, from a small product; None if it is not very slow."""
    reference_s = _best_time(_products(kind, _SMALL, "fp32"), clock)
    give_up_s = _VERY_SLOW * reference_s
    seconds = _best_time(_products(kind, _SMALL, precision), clock, give_up_s=give_up_s)
    return reference_s / seconds if seconds > give_up_s else None


def judge(precision: Precision, relative_speed: float, kind: str) -> PrecisionSpeed:
    """Judge whether a precision is worth using."""
    worth = precision == "fp32" or relative_speed >= _WORTH_FROM
    if precision == "fp32":
        verdict = "the reference: always right"
    elif relative_speed < 1 / _WORTH_FROM:
        times = 1 / relative_speed
        verdict = f"{times:.{0 if times >= 10 else 1}f}× slower: not native to this {kind}"
    elif not worth:
        verdict = "no faster: saves memory only"
    elif precision == "tf32":
        verdict = "fast, with ten bits of fraction and the range of fp32"
    elif precision == "fp16":
        verdict = "fast, but needs loss scaling: prefer bf16 where it is as fast"
    else:
        verdict = "fast, with the range of fp32: use it"
    return PrecisionSpeed(
        precision=precision, relative_speed=relative_speed, is_worth_using=worth, verdict=verdict
    )


_WORTH_FROM = 1.2
"""A smaller gain in the products is lost to the conversions around them."""
_BUDGET_S = 0.1
_SMALL, _VERY_SLOW = 128, 4


def _benchmark_size(kind: str, clock: Clock) -> int:
    """Matrices large enough that fp32 takes milliseconds: smaller ones time the overhead."""
    size, largest = 256, 2048 if kind == "cpu" else 8192
    while size < largest and _best_time(_products(kind, size, "fp32"), clock, rounds=3) < 2e-3:
        size *= 2
    return size


def _products(kind: str, size: int, precision: Precision) -> Callable[[], None]:
    import torch  # noqa: PLC0415

    from yunlu.training.device import synchronize  # noqa: PLC0415
    from yunlu.training.precision.autocast import tf32_products  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    inputs, weights, gradient = (
        torch.randn(size, size, generator=generator).to(kind, dtype) for _ in range(3)
    )

    def once() -> None:
        with tf32_products() if precision == "tf32" else nullcontext():
            _ = inputs @ weights.T  # forward
            _ = gradient @ weights  # gradient of the inputs
            _ = gradient.T @ inputs  # gradient of the weights
        synchronize(torch.device(kind))

    return once


def _best_time(
    work: Callable[[], None], clock: Clock, *, rounds: int = 30, give_up_s: float = float("inf")
) -> float:
    """Best of several rounds: noise only adds time. Very slow work is not repeated."""
    work()  # libraries load and choose their kernels the first time
    best, began = float("inf"), clock()
    for _ in range(rounds):
        start = clock()
        work()
        end = clock()
        best = min(best, end - start)
        if best > give_up_s or end - began > _BUDGET_S:
            break
    return best


def _torch() -> Any:
    return _load_torch()[0]


def _load_torch() -> tuple[Any, str | None]:
    """Torch, or None and why it cannot be imported."""
    try:
        import torch  # noqa: PLC0415 (may be absent, and takes seconds)
    except ModuleNotFoundError as error:
        return None, "is not installed" if error.name == "torch" else f"lacks {error.name}"
    except (ImportError, OSError) as error:  # a library it links to is missing
        return None, f"cannot be imported: {error}"
    return torch, None


def _builds(torch: Any) -> list[str]:
    """Kinds of accelerators that this build of torch can drive, whether or not they are here."""
    has = {
        "cuda": torch.version.cuda is not None,
        "rocm": torch.version.hip is not None,
        "npu": hasattr(torch, "npu"),
        "xpu": getattr(torch.version, "xpu", None) is not None,
        "mps": torch.backends.mps.is_built(),
    }
    return [name for name, is_there in has.items() if is_there]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, torch's state and, with ``--measure``, the speeds, as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m yunlu.training.probe")
    parser.add_argument("--measure", action="store_true", help="time each precision (a second)")
    measure: bool = parser.parse_args(argv).measure
    machine = probe_machine()
    torch, problem = _load_torch()
    answer: dict[str, Any] = {
        "machine": machine.model_dump(mode="json"),
        "torch": {
            "version": torch and torch.__version__,
            "problem": problem,
            "builds": _builds(torch) if torch is not None else [],
        },
    }
    if measure and torch is not None:
        best = machine.best_device
        speeds = [
            speed.model_dump(mode="json") for speed in measured_speeds(best, ignore_cache=True)
        ]
        answer["measured"] = {"device": best.kind, "precisions": speeds}
    sys.stdout.write(json.dumps(answer, ensure_ascii=False, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
