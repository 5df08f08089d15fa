"""Memory fit: the largest micro-batch, and recomputation if not even one sample fits."""

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

_MEASURED_SAMPLES = 8
_TEMPORARY = 1.15
"""Peak memory over saved activations: operators hold temporary results (3.0 GB measured for 2.6 GB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Settings that fit into memory, and the measured activations."""

    settings: StepSettings
    bytes_per_sample: float
    """Activations saved per sample for the backward pass."""
    reasons: dict[str, str]


def fit_memory(
    job: Job,
    model: nn.Module,
    timer: ModelTimer,
    first: StepSettings,
    *,
    batch: int,
    room_bytes: float,
) -> MemoryFit:
    """The largest micro-batch that fits; recomputes activations if not even one sample fits."""
    apply_recompute(model, first.recompute)
    saved_bytes, size = with_less_memory(
        lambda size: _measure_activations(
            timer, first.model_copy(update={"micro_batch": size}), model
        ),
        min(_MEASURED_SAMPLES, batch),
        undo=lambda: model.zero_grad(set_to_none=True),
        on_shrink=lambda _size, _message: None,
    )
    settings, per_sample, reasons = first, _TEMPORARY * saved_bytes / size, dict[str, str]()
    requested = job.train.micro_batch
    fewest = 1 if requested == "auto" else min(requested, batch)
    is_tight = fewest * per_sample > room_bytes
    if is_tight and job.train.recompute == "auto" and find_blocks(model):
        one = timer.longest(first.model_copy(update={"micro_batch": 1}))
        peak_bytes = recompute_savings(model, lambda: timer.backward(first, one))
        mode, share = plan_recompute(peak_bytes, room_bytes / fewest)
        apply_recompute(model, mode, share=share)
        settings = first.model_copy(update={"recompute": mode, "recompute_share": share})
        without = peak_bytes["none"]
        per_sample *= (without + share * (peak_bytes[mode] - without)) / without
        reasons["recompute"] = (
            f"{share:.0%} of the blocks: otherwise a micro-batch of {fewest} does not fit"
        )
    micro = choose_micro_batch(job, batch=batch, room_bytes=room_bytes, bytes_per_sample=per_sample)
    return MemoryFit(
        settings=settings.model_copy(update={"micro_batch": micro}),
        bytes_per_sample=per_sample,
        reasons=reasons,
    )


def _measure_activations(timer: ModelTimer, settings: StepSettings, model: nn.Module) -> float:
    """Bytes of activations saved in one pass; also the model's first pass over the data."""
    batch = timer.longest(settings)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with saved_tensors_hooks(record, lambda tensor: tensor):
            timer.run_first(settings, batch)
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
    return float(sum(saved.values()))


def _shapes(batch: Batch) -> str:
    inputs = batch.inputs
    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return ", ".join(f"{name}: {tuple(value.shape)} {value.dtype}" for name, value in named)
