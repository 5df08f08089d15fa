"""Which operators a model runs, and how large each is: counted while it computes, not timed."""

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
"""What may be computed once more only to count it."""

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
    """Every operator that ``run`` calls; works on real tensors and leaves them be."""
    with _Count() as count:
        run()
    return tuple(
        Operators(kind=kind, size=size, calls=calls) for (kind, size), calls in count.found.items()
    )


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[Kind, float]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip the compiler torch would load it: a second and a half for nothing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        result = func(*args, **given)
        self.found[_weigh(func, args, given, result)] += 1
        return result


def _weigh(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[Kind, float]:
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
            else:  # what is spread from one number (an expanded gradient) was never written
                steps = zip(value.shape, value.stride(), strict=True)
                yield math.prod(size for size, step in steps if step) * value.element_size()
        elif isinstance(value, list | tuple):
            yield from _bytes(value)


def _attention_size(args: Any, *, is_backward: bool) -> float:
    """Two products forward, five backward (Dao 2023, section 3.1); what a mask hides is computed."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    query, key = tensors[1:3] if is_backward else tensors[0:2]
    return attention_size(query.shape, key.shape[-2], products=5 if is_backward else 2)


def count_step(
    job: Job, parts: TrainingInputs, meter: ModelTimer, settings: StepSettings, *, sample_s: float
) -> OperatorWork:
    """A step's operators, as the run's own first samples give them."""
    model = parts.model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    trained = sum(weight.numel() for weight in weights)
    return OperatorWork(
        passed=_count_pass(model, meter, settings, sample_s=sample_s),
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
    model: nn.Module, meter: ModelTimer, settings: StepSettings, *, sample_s: float
) -> Pass:
    load_s, few = meter.load_s_per_sample, max(1, int(_COUNTED_S / max(sample_s, 1e-9)))
    counted = settings.model_copy(update={"micro_batch": min(settings.micro_batch, few)})
    batch = meter.micros(counted)[0]
    meter.load_s_per_sample = load_s  # small batches cost more per sample to fetch
    model.zero_grad(set_to_none=True)
    found = count_operators(lambda: meter.backward(settings, batch))
    whole = meter.micros(settings)
    numbers = sum(map(_numbers, whole)) / len(whole)
    ratio = numbers / max(_numbers(batch), 1)
    return Pass(samples=settings.micro_batch, operators=enlarge(found, ratio))


def _numbers(batch: Batch) -> int:
    """How much goes in: a batch of few is padded less than one of many."""
    inputs = batch.inputs
    return sum(each.numel() for each in (inputs.values() if isinstance(inputs, dict) else inputs))
