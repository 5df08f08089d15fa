"""Time operators of each kind over their sizes: the best of short trials, and how far they spread."""

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
"""From what the nearest cache holds to what none does."""
CONVOLUTIONS = ((8, 8, 4), (16, 8, 32), (32, 8, 32), (32, 16, 32), (64, 16, 32))
"""Channels, pixels of a side, samples."""
ATTENTIONS = ((4, 2, 8, 16), (32, 4, 16, 16), (16, 4, 64, 24), (16, 4, 128, 32))
"""Samples, heads, tokens, width of a head."""
ROW_FLOPS = 5000
_FAR_BYTES = 16 << 20
_MOST_COPIES = 64
_LONG_S = 0.1
"""Where the best trial is this long it says enough of its kind: larger ones are left out."""
_FEWEST_TRIALS = 3
"""One may be disturbed, two may be by the same."""
_FEWEST_SIZES = 3
"""Without some sizes there is no curve, however slow the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how to time."""

    kind: str = "cpu"
    budget_s: float = 0.1
    """For the trials of one size."""
    trials: int = 40
    threads: int = 1
    clock: Callable[[], float] = field(default=time.perf_counter)

    @property
    def device(self) -> torch.device:
        """Where the operators run."""
        return torch.device(self.kind)

    def settle(self) -> None:
        """Wait for what a GPU still has to do."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        elif self.kind == "mps":
            torch.mps.synchronize()

    def time(self, run: Callable[[], object]) -> tuple[float, float]:
        """The best trial, and by which share the median one is slower."""
        self._once(run)  # kernels are chosen, memory is allocated
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
        self.settle()
        return self.clock() - started_at


def bench_for(kind: str, threads: int, *, budget_s: float = 0.1) -> Bench:
    """One thread is timed by its own clock: what others do to it does not count. More are by the wall."""
    own = kind == "cpu" and threads == 1
    clock = time.thread_time if own else time.perf_counter
    return Bench(kind=kind, budget_s=budget_s, threads=threads, clock=clock)


@contextmanager
def with_threads(count: int) -> Generator[None]:
    """Compute with so many threads meanwhile."""
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

        return 2.0 * side**3, _several(one, 8 * side * side)

    with tf32_products() if precision == "tf32" else nullcontext():
        return _pace(bench, "product", sides, make, precision=precision)


def measure_convolutions(
    bench: Bench, shapes: Sequence[tuple[int, int, int]]
) -> tuple[KernelTiming, KernelTiming]:
    """Three by three, as images have them: forward, and the gradients of both sides."""

    def parts(shape: tuple[int, int, int]) -> tuple[float, torch.Tensor, torch.Tensor]:
        channels, side, samples = shape
        images = torch.randn(samples, channels, side, side, device=bench.device)
        weights = torch.randn(channels, channels, 3, 3, device=bench.device)
        return 2.0 * samples * (channels * side * 3) ** 2, images, weights

    def forward(shape: tuple[int, int, int]) -> tuple[float, list[Run]]:
        flops, images, weights = parts(shape)
        return flops, [lambda: functional.conv2d(images, weights, padding=1)]

    def backward(shape: tuple[int, int, int]) -> tuple[float, list[Run]]:
        flops, images, weights = parts(shape)
        both = [True, True, False]
        run = lambda: torch.ops.aten.convolution_backward(
            images, images, weights, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, both
        )
        return 2 * flops, [run]

    return (
        _pace(bench, "convolution", shapes, forward),
        _pace(bench, "convolution_back", shapes, backward),
    )


def measure_attention(bench: Bench, shapes: Sequence[tuple[int, int, int, int]]) -> KernelTiming:
    """Torch's own kernel, forward; sized as ``attention_size`` says."""

    def make(shape: tuple[int, int, int, int]) -> tuple[float, list[Run]]:
        query = torch.randn(shape, device=bench.device)
        run = lambda: functional.scaled_dot_product_attention(query, query, query)
        return attention_size(shape, shape[2], products=2), [run]

    return _pace(bench, "attention", shapes, make)


def attention_size(query: Sequence[int], keys: int, *, products: int) -> float:
    """FLOPs of attention, and what each row costs besides: softmax, and loops too short to be fast."""
    rows = math.prod(query[:-1])
    return float(products * rows * (2 * keys * query[-1] + ROW_FLOPS))


def measure_moves(bench: Bench, kind: Kind, moved_bytes: Sequence[int]) -> KernelTiming:
    """Operators on numbers side by side: a sum, a function, drawn numbers, an update."""
    each = {"stream": 12, "function": 8, "random": 8, "update": 28}[kind]

    def make(size: int) -> tuple[float, list[Run]]:
        numbers = max(size // each, 1)

        def one() -> Run:
            a, b = (torch.rand(numbers, device=bench.device) for _ in range(2))
            if kind == "function":
                return lambda: functional.gelu(a)
            if kind == "random":
                return lambda: a.bernoulli_(0.9)
            return _update(a, b) if kind == "update" else lambda: a + b

        return float(each * numbers), _several(one, size)

    return _pace(bench, kind, moved_bytes, make)


def _several(make: Callable[[], Run], own_bytes: float) -> list[Run]:
    """As many as no near cache holds: an operator in a model finds little of what it needs there."""
    count = int(min(max(_FAR_BYTES / own_bytes, 1), _MOST_COPIES))
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


def _pace(
    bench: Bench,
    kind: Kind,
    shapes: Sequence[Any],
    make: Callable[[Any], tuple[float, list[Run]]],
    *,
    precision: str = "fp32",
) -> KernelTiming:
    found: list[tuple[float, float, float]] = []
    with with_threads(bench.threads):
        for shape in shapes:
            size, runs = make(shape)
            turns = cycle(runs)
            best, spread = bench.time(lambda turns=turns: next(turns)())
            found.append((size, best, spread))
            if best > _LONG_S and len(found) > _FEWEST_SIZES:
                break
    found.sort()
    sizes, seconds, spreads = zip(*found, strict=True)
    return KernelTiming(
        kind=kind,
        precision=precision,
        threads=bench.threads,
        sizes=sizes,
        # A larger one that seems faster was only disturbed less.
        seconds=tuple(min(seconds[i:]) for i in range(len(seconds))),
        spread=median(each for each in spreads if math.isfinite(each)),
    )
