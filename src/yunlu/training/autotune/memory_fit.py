"""What fits into memory: how many samples at a time, and what has to be computed again for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.autograd.graph import saved_tensors_hooks

from yunlu.core.errors import ModelError, YunluError
from yunlu.planning.planner import choose_micro_batch
from yunlu.planning.recompute import plan_recompute
from yunlu.training.memory.out_of_memory import is_out_of_memory, with_less_memory
from yunlu.training.memory.recompute import apply_recompute, find_blocks, recompute_savings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from yunlu.planning.plan import StepSettings
    from yunlu.spec.job import Job
    from yunlu.training.autotune.timer import ModelTimer
    from yunlu.training.tasks.task import Batch

_LOOK_SAMPLES = 8
_TEMPORARY = 1.15
"""Besides what is kept for the backward pass, operators hold temporary results: 3.0 where 2.6 were kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Settings that fit, and what was counted to find them."""

    settings: StepSettings
    bytes_per_sample: float
    """Activations that a sample keeps until its backward pass."""
    reasons: dict[str, str]


def fit_memory(
    job: Job,
    model: nn.Module,
    meter: ModelTimer,
    first: StepSettings,
    *,
    batch: int,
    room_bytes: float,
) -> MemoryFit:
    """The largest micro-batch that fits; activations are computed again where not even one does."""
    apply_recompute(model, first.recompute)
    kept_bytes, size = with_less_memory(
        lambda size: _look(meter, first.model_copy(update={"micro_batch": size}), model),
        min(_LOOK_SAMPLES, batch),
        undo=lambda: model.zero_grad(set_to_none=True),
        told=lambda _size, _message: None,
    )
    settings, per_sample, reasons = first, _TEMPORARY * kept_bytes / size, dict[str, str]()
    asked = job.train.micro_batch
    fewest = 1 if asked == "auto" else min(asked, batch)
    is_tight = fewest * per_sample > room_bytes
    if is_tight and job.train.recompute == "auto" and find_blocks(model):
        one = meter.longest(first.model_copy(update={"micro_batch": 1}))
        kept = recompute_savings(model, lambda: meter.backward(first, one))
        mode, share = plan_recompute(kept, room_bytes / fewest)
        apply_recompute(model, mode, share=share)
        settings = first.model_copy(update={"recompute": mode, "recompute_share": share})
        whole = kept["none"]
        per_sample *= (whole + share * (kept[mode] - whole)) / whole
        reasons["recompute"] = f"{share:.0%} of the blocks: else {fewest} at a time would not fit"
    micro = choose_micro_batch(job, batch=batch, room_bytes=room_bytes, bytes_per_sample=per_sample)
    return MemoryFit(
        settings=settings.model_copy(update={"micro_batch": micro}),
        bytes_per_sample=per_sample,
        reasons=reasons,
    )


def _look(meter: ModelTimer, settings: StepSettings, model: nn.Module) -> float:
    """Activation memory of one pass; the first time the model meets the data."""
    batch = meter.longest(settings)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            meter.look(settings, batch)
    except YunluError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"The model failed on its first batch: {type(error).__name__}: {error}",
            hint=f"It was given {_shapes(batch)}. Check that the model fits the task and the data "
            "(`--debug` shows where it failed).",
        ) from error
    return float(sum(kept.values()))


def _shapes(batch: Batch) -> str:
    inputs = batch.inputs
    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return ", ".join(f"{name}: {tuple(value.shape)} {value.dtype}" for name, value in named)
