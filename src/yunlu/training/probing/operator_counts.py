"""Counts of a model's operators by kind and size, recorded while it runs."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from yunlu.planning.predict.local import (
    Operators,
    OperatorWork,
    Pass,
    enlarge,
    update_operators,
)
from yunlu.planning.splitting import optimizer_state_bytes
from yunlu.training.probing.microbenchmarks import attention_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from yunlu.planning.machine_profile import Kind
    from yunlu.planning.plan import StepSettings
    from yunlu.spec.job import Job
    from yunlu.training.autotune.timer import ModelTimer
    from yunlu.training.tasks.task import Batch
    from yunlu.training.training_inputs import TrainingInputs

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
    numbers = sum(map(_input_size, micros)) / len(micros)
    ratio = numbers / max(_input_size(batch), 1)
    return Pass(samples=settings.micro_batch, operators=enlarge(counts, ratio))


def _input_size(batch: Batch) -> int:
    """Number of input values: a small batch has less padding than a large one."""
    tensors = batch.inputs
    return sum(
        value.numel() for value in (tensors.values() if isinstance(tensors, dict) else tensors)
    )
