"""Microbenchmarks of operators by kind and size, and of small models: call overhead and slowdown."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from yunlu.planning.machine_profile import KernelTiming
from yunlu.planning.predict.local import (
    Operators,
    OperatorWork,
    Pass,
    enlarge,
    operators_s,
    update_operators,
)
from yunlu.planning.splitting import optimizer_state_bytes
from yunlu.training.device import synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from yunlu.planning.machine_profile import Kind, MachineProfile
    from yunlu.planning.plan import StepSettings
    from yunlu.spec.job import Job
    from yunlu.training.autotune.timer import ModelTimer
    from yunlu.training.tasks.task import TrainingInputs

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
        """Wait for pending work of the device."""
        synchronize(self.device)

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


_COUNTED_S = 0.01
"""Seconds of computation that counting may cost."""

_FUNCTIONS = frozenset(
    [
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "pow",
        "tanh",
        "sigmoid",
        "erf",
        "gelu",
        "silu",
        "mish",
        "softplus",
        "elu",
        "softmax",
        "log_softmax",
        "layer_norm",
        "group_norm",
        "batch_norm",
        "cos",
        "sin",
        "sigmoid_backward",
        "tanh_backward",
        "gelu_backward",
        "silu_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "_softmax",
        "_log_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
    ]
)
_RANDOM = frozenset(
    ["bernoulli", "native_dropout", "rand", "randn", "rand_like", "randn_like", "normal", "uniform"]
)
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_NOTHING_COMPUTED = frozenset(
    ["detach", "empty", "empty_like", "empty_strided", "alias", "lift_fresh"]
)


def count_operators(run: Callable[[], object]) -> tuple[Operators, ...]:
    """Count every operator that ``run`` calls; does not change results."""
    with _OperatorCounter() as counter:
        run()
    return tuple(
        Operators(kind=kind, size=size, calls=calls)
        for (kind, size), calls in counter.counts.items()
    )


class _OperatorCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[Kind, float]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping Dynamo would import it: a second and a half

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        arguments = kwargs or {}
        result = func(*args, **arguments)
        self.counts[_classify(func, args, arguments, result)] += 1
        return result


def _classify(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[Kind, float]:
    packet = func._overloadpacket
    name: str = packet.__name__
    if func.is_view or name in _NOTHING_COMPUTED:
        return "stream", 0.0
    if packet in flop_registry:
        kind: Kind = "product"
        if "conv" in name:
            kind = "convolution_back" if name.endswith("backward") else "convolution"
        return kind, float(flop_registry[packet](*args, **kwargs, out_val=result))
    if name.startswith(_ATTENTION):
        return "attention", _attention_size(args, is_backward=name.endswith("backward"))
    moved = float(sum(_bytes(args)) + sum(_bytes(kwargs.values())) + sum(_bytes([result])))
    bare = name.strip("_")
    if name.startswith("_fused_"):
        return "update", moved
    if bare in _RANDOM:
        return "random", moved
    return ("function" if name in _FUNCTIONS or bare in _FUNCTIONS else "stream"), moved


def _bytes(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, Tensor):
            if 0 not in value.stride():
                yield value.nbytes
            else:  # an expanded tensor was never written in full
                steps = zip(value.shape, value.stride(), strict=True)
                yield math.prod(size for size, step in steps if step) * value.element_size()
        elif isinstance(value, list | tuple):
            yield from _bytes(value)


def _attention_size(args: Any, *, is_backward: bool) -> float:
    """Two products forward, five backward (Dao 2023, section 3.1); masked positions are computed."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    query, key = tensors[1:3] if is_backward else tensors[0:2]
    return attention_size(query.shape, key.shape[-2], products=5 if is_backward else 2)


def count_step(
    job: Job, inputs: TrainingInputs, timer: ModelTimer, settings: StepSettings, *, sample_s: float
) -> OperatorWork:
    """Operators of a step, counted on the first samples of the run."""
    model = inputs.model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    trained = sum(weight.numel() for weight in weights)
    return OperatorWork(
        passed=_count_pass(model, timer, settings, sample_s=sample_s),
        update=update_operators(
            settings.kernel,
            gradient_bytes=4.0 * trained,
            state_bytes=optimizer_state_bytes(job, trained),
            tensors=len(weights),
        ),
        gradient_bytes=4.0 * trained,
        trained_tensors=len(weights),
    )


def _count_pass(
    model: nn.Module, timer: ModelTimer, settings: StepSettings, *, sample_s: float
) -> Pass:
    load_s, few = timer.load_s_per_sample, max(1, int(_COUNTED_S / max(sample_s, 1e-9)))
    counted = settings.model_copy(update={"micro_batch": min(settings.micro_batch, few)})
    batch = timer.micros(counted)[0]
    timer.load_s_per_sample = load_s  # small batches cost more per sample to fetch
    model.zero_grad(set_to_none=True)
    counts = count_operators(lambda: timer.backward(settings, batch))
    micros = timer.micros(settings)
    numbers = sum(micro.num_values for micro in micros) / len(micros)
    ratio = numbers / max(batch.num_values, 1)
    return Pass(samples=settings.micro_batch, operators=enlarge(counts, ratio))


_MOST_MIXED = 4.0
"""Larger ratios are measurement errors."""


def measure_call(bench: Bench) -> float:
    """Call overhead in seconds: mean time per operator of a tiny model."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)]
    run = _training_pass(
        nn.Sequential(*layers).to(bench.device), torch.randn(4, 8, device=bench.device)
    )
    operators = sum(operator.calls for operator in count_operators(run))
    best_s, spread = bench.time(run)
    # The median, not the best: disturbances occur in runs too.
    return best_s * (1 + spread) / operators


def measure_mixed(profile: MachineProfile, bench: Bench, *, trials: int = 15) -> MachineProfile:
    """The profile with the slowdown of operators inside a model: shared caches, fresh memory."""
    for make, factor in ((_perceptron, "mixed"), (_convolutional, "mixed_convolutions")):
        run = make(bench)
        counted = count_operators(run)
        # Time outside the factor: calls, and in the second model all but convolutions.
        rest_s = operators_s(
            counted, profile.model_copy(update={factor: 0.0}), threads=bench.threads
        )
        alone_s = operators_s(
            counted, profile.model_copy(update={factor: 1.0}), threads=bench.threads
        )
        spans: list[float] = []
        for _ in range(trials):
            started_at = bench.clock()
            run()
            bench.synchronize()
            spans.append(bench.clock() - started_at)
        ratio = (median(spans) - rest_s) / max(alone_s - rest_s, 1e-9)
        profile = profile.model_copy(update={factor: min(max(ratio, 1.0), _MOST_MIXED)})
    return profile


def _perceptron(bench: Bench) -> Callable[[], None]:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.LayerNorm(96), nn.Linear(96, 384), nn.GELU(), nn.Dropout(0.1)]
        layers += [nn.Linear(384, 96)]
    inputs = torch.randn(768, 96, device=bench.device)
    return _training_pass(nn.Sequential(*layers).to(bench.device), inputs)


def _convolutional(bench: Bench) -> Callable[[], None]:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    inputs = torch.randn(32, 1, 8, 8, device=bench.device)
    return _training_pass(nn.Sequential(*layers).to(bench.device), inputs)


def _training_pass(model: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(inputs).sum().backward()

    return run
