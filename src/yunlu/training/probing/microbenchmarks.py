"""Microbenchmarks of operators by kind and size: best time of short trials, and their spread."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from yunlu.planning.machine_profile import KernelTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.planning.machine_profile import Kind

    Run = Callable[[], object]

PRODUCT_SIDES = (8, 16, 32, 64, 128, 256, 512, 1024)
GPU_PRODUCT_SIDES = (32, 128, 512, 1024, 2048, 4096, 8192)
MOVED_BYTES = tuple(3 << shift for shift in (12, 15, 18, 20, 22, 24, 25))
"""From L1 cache size to beyond the last-level cache."""
CONVOLUTIONS = ((8, 8, 4), (16, 8, 32), (32, 8, 32), (32, 16, 32), (64, 16, 32))
"""Channels, image side, samples."""
ATTENTIONS = ((4, 2, 8, 16), (32, 4, 16, 16), (16, 4, 64, 24), (16, 4, 128, 32))
"""Samples, heads, tokens, head width."""
ROW_FLOPS = 5000
_FAR_BYTES = 16 << 20
_MOST_COPIES = 64
_LONG_S = 0.1
"""Larger sizes are skipped once the best trial takes this long."""
_FEWEST_TRIALS = 3
"""Fewer may all be disturbed by the same load."""
_FEWEST_SIZES = 3
"""Sizes needed for a curve, however slow the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Device, thread count, clock and budget of a benchmark."""

    kind: str = "cpu"
    budget_s: float = 0.1
    """Seconds for the trials of one size."""
    trials: int = 40
    threads: int = 1
    clock: Callable[[], float] = field(default=time.perf_counter)

    @property
    def device(self) -> torch.device:
        """Where the operators run."""
        return torch.device(self.kind)

    def synchronize(self) -> None:
        """Wait for pending GPU work."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        elif self.kind == "mps":
            torch.mps.synchronize()

    def time(self, run: Callable[[], object]) -> tuple[float, float]:
        """Best time, and the relative excess of the median."""
        self._once(run)  # warm-up: selects kernels, allocates memory
        spans: list[float] = []
        while len(spans) < _FEWEST_TRIALS or (
            len(spans) < self.trials and sum(spans) < self.budget_s
        ):
            spans.append(self._once(run))
        best = max(min(spans), 1e-9)
        return best, median(spans) / best - 1

    def _once(self, run: Callable[[], object]) -> float:
        started_at = self.clock()
        run()
        self.synchronize()
        return self.clock() - started_at


def bench_for(kind: str, threads: int, *, budget_s: float = 0.1) -> Bench:
    """A bench; one thread uses its CPU clock, immune to other load, several use wall time."""
    uses_thread_clock = kind == "cpu" and threads == 1
    clock = time.thread_time if uses_thread_clock else time.perf_counter
    return Bench(kind=kind, budget_s=budget_s, threads=threads, clock=clock)


@contextmanager
def with_threads(count: int) -> Generator[None]:
    """Compute with ``count`` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def measure_products(bench: Bench, precision: str, sides: Sequence[int]) -> KernelTiming:
    """Square matrices; FLOPs are twice the cube of the side."""
    from yunlu.training.precision.autocast import tf32_products  # noqa: PLC0415 - loads much else

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)

    def make(side: int) -> tuple[float, list[Run]]:
        def one() -> Run:
            left, right = (torch.randn(side, side).to(bench.device, dtype) for _ in range(2))
            return lambda: left @ right

        return 2.0 * side**3, _copies(one, 8 * side * side)

    with tf32_products() if precision == "tf32" else nullcontext():
        return _time_sizes(bench, "product", sides, make, precision=precision)


def measure_convolutions(
    bench: Bench, shapes: Sequence[tuple[int, int, int]]
) -> tuple[KernelTiming, KernelTiming]:
    """Convolutions with 3x3 kernels: forward, and backward for inputs and weights."""

    def tensors(shape: tuple[int, int, int]) -> tuple[float, torch.Tensor, torch.Tensor]:
        channels, side, samples = shape
        images = torch.randn(samples, channels, side, side, device=bench.device)
        weights = torch.randn(channels, channels, 3, 3, device=bench.device)
        return 2.0 * samples * (channels * side * 3) ** 2, images, weights

    def forward(shape: tuple[int, int, int]) -> tuple[float, list[Run]]:
        flops, images, weights = tensors(shape)
        return flops, [lambda: functional.conv2d(images, weights, padding=1)]

    def backward(shape: tuple[int, int, int]) -> tuple[float, list[Run]]:
        flops, images, weights = tensors(shape)
        both = [True, True, False]
        run = lambda: torch.ops.aten.convolution_backward(
            images, images, weights, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, both
        )
        return 2 * flops, [run]

    return (
        _time_sizes(bench, "convolution", shapes, forward),
        _time_sizes(bench, "convolution_back", shapes, backward),
    )


def measure_attention(bench: Bench, shapes: Sequence[tuple[int, int, int, int]]) -> KernelTiming:
    """Torch's attention kernel, forward; sizes by ``attention_size``."""

    def make(shape: tuple[int, int, int, int]) -> tuple[float, list[Run]]:
        query = torch.randn(shape, device=bench.device)
        run = lambda: functional.scaled_dot_product_attention(query, query, query)
        return attention_size(shape, shape[2], products=2), [run]

    return _time_sizes(bench, "attention", shapes, make)


def attention_size(query: Sequence[int], keys: int, *, products: int) -> float:
    """FLOPs of attention, with an equivalent per row for softmax and short loops."""
    rows = math.prod(query[:-1])
    return float(products * rows * (2 * keys * query[-1] + ROW_FLOPS))


def measure_moves(bench: Bench, kind: Kind, moved_bytes: Sequence[int]) -> KernelTiming:
    """Elementwise operators: a sum, a function, random numbers, an optimiser update."""
    bytes_each = {"stream": 12, "function": 8, "random": 8, "update": 28}[kind]

    def make(size: int) -> tuple[float, list[Run]]:
        numbers = max(size // bytes_each, 1)

        def one() -> Run:
            a, b = (torch.rand(numbers, device=bench.device) for _ in range(2))
            if kind == "function":
                return lambda: functional.gelu(a)
            if kind == "random":
                return lambda: a.bernoulli_(0.9)
            return _update(a, b) if kind == "update" else lambda: a + b

        return float(bytes_each * numbers), _copies(one, size)

    return _time_sizes(bench, kind, moved_bytes, make)


def _copies(make: Callable[[], Run], copy_bytes: float) -> list[Run]:
    """Enough copies to exceed the cache: operators in a model find little of their data there."""
    count = int(min(max(_FAR_BYTES / copy_bytes, 1), _MOST_COPIES))
    return [make() for _ in range(count)]


def _update(weights: torch.Tensor, gradient: torch.Tensor) -> Run:
    means, squares = torch.zeros_like(weights), torch.zeros_like(weights)
    step = torch.ones((), device=weights.device)
    kernels: Any = torch
    return lambda: kernels._fused_adamw_(
        [weights], [gradient], [means], [squares], [], [step], lr=0.0, beta1=0.9, beta2=0.99,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def measure_bandwidth(bench: Bench, array_bytes: int) -> tuple[float, float]:
    """Bytes per second of a sum of two arrays into a third (McCalpin's triad), and the spread."""
    numbers = array_bytes // 4
    a, b, c = (torch.ones(numbers, device=bench.device) for _ in range(3))
    best, spread = bench.time(lambda: torch.add(a, b, alpha=2.0, out=c))
    return 12 * numbers / best, spread


def _time_sizes(
    bench: Bench,
    kind: Kind,
    shapes: Sequence[Any],
    make: Callable[[Any], tuple[float, list[Run]]],
    *,
    precision: str = "fp32",
) -> KernelTiming:
    timings: list[tuple[float, float, float]] = []
    with with_threads(bench.threads):
        for shape in shapes:
            size, runs = make(shape)
            turns = cycle(runs)
            best, spread = bench.time(lambda turns=turns: next(turns)())
            timings.append((size, best, spread))
            if best > _LONG_S and len(timings) > _FEWEST_SIZES:
                break
    timings.sort()
    sizes, seconds, spreads = zip(*timings, strict=True)
    return KernelTiming(
        kind=kind,
        precision=precision,
        threads=bench.threads,
        sizes=sizes,
        # A larger size that seems faster was only disturbed less.
        seconds=tuple(min(seconds[i:]) for i in range(len(seconds))),
        spread=median(spread for spread in spreads if math.isfinite(spread)),
    )
