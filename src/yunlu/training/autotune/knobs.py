"""What may be set in several ways on this machine, for this model and this data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.planning.layouts import count_devices
from yunlu.planning.plan import StepSettings
from yunlu.training.autotune.search import Knob
from yunlu.training.compiler import estimate_compile_s
from yunlu.training.data.lengths import expected_padding, lengths_of
from yunlu.training.data.sample_order import make_order
from yunlu.training.optim.build import kernels_for
from yunlu.training.probe import measured_speeds
from yunlu.training.tasks.task import check_padding, padding_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.hardware.machine import Device, Machine
    from yunlu.planning.plan import Compiler, PrecisionName
    from yunlu.spec.job import Job
    from yunlu.training.autotune.timer import ModelTimer
    from yunlu.training.training_inputs import TrainingInputs

_ALL_THREADS_WORTH = 1 / 1.2
"""One thread is taken unless all are this much faster: the others are better left to others."""
_PRECISION_WORTH = 1.1
_LITTLE_PADDING, _MUCH_PADDING = 0.05, 0.3
"""Shares of what is computed: below the one nothing is tried, above the other always."""
_SMALL_PASS_S = 0.02
"""Below this, a pass is mostly the calls themselves: fewer samples in it can only be slower."""


def start_settings(
    job: Job, parts: TrainingInputs, *, threads: int, micro_batch: int
) -> StepSettings:
    """What the job pins, and for the rest what is never a bad choice."""
    train = job.train
    paddings = padding_options(parts.task, parts.model, parts.splits)
    # Batching by length is never chosen for anyone: where length and content go together, a batch is
    # no longer a fair sample (an example lost a tenth of its answers by it).
    padding = "pad" if train.padding == "auto" else train.padding
    check_padding(padding, paddings)
    return StepSettings(
        threads=threads if train.threads == "auto" else train.threads,
        micro_batch=micro_batch,
        precision="fp32" if train.precision == "auto" else train.precision,
        kernel=kernels_for(parts.model, train.optimizer)[0]
        if train.optimizer.kernel == "auto"
        else train.optimizer.kernel,
        padding=padding,
        recompute="none" if train.recompute == "auto" else train.recompute,
        compile=_asked_compiler(job),
    )


def _asked_compiler(job: Job) -> Compiler:
    asked = job.train.compile
    if asked == "xla":
        return "xla"
    return "inductor" if asked is True else "none"


def _padding_knob(job: Job, parts: TrainingInputs, batch: int) -> Knob | None:
    """Packing: the same samples in each step, without the padding. How much there is can be counted."""
    lengths = lengths_of(parts.splits.train)
    if lengths is None or "pack" not in padding_options(parts.task, parts.model, parts.splits):
        return None
    share = expected_padding(lengths, make_order(len(lengths), batch, job.train.seed))
    if share < _LITTLE_PADDING:
        return None
    return _choices("padding", ["pack"], always=share >= _MUCH_PADDING)


def list_knobs(job: Job, parts: TrainingInputs, machine: Machine, meter: ModelTimer) -> list[Knob]:
    """The levers that the job leaves to us, cheapest and surest first."""
    train, device = job.train, machine.best_device
    levers: list[Knob] = []
    if train.threads == "auto" and device.kind == "cpu":
        levers.append(
            Knob(field="threads", options=_one_thread, worth=_ALL_THREADS_WORTH, always=True)
        )
    packing = _padding_knob(job, parts, meter.batch) if train.padding == "auto" else None
    if packing is not None:
        levers.append(packing)
    if train.micro_batch == "auto" and not train.gradient_release:
        levers.append(Knob(field="micro_batch", options=lambda now: _smaller(now, meter)))
    if train.precision == "auto":
        levers.append(_choices("precision", fast_precisions(device), worth=_PRECISION_WORTH))
    is_alone = count_devices(job, gpus=machine.gpus) == 1
    if train.compile == "auto" and is_alone:  # whether it works is found out only where it may pay
        extra_s = estimate_compile_s(parts.model)
        levers.append(Knob(field="compile", options=_compiled, extra_s=extra_s))
    return levers


def fast_precisions(device: Device) -> list[PrecisionName]:
    """Those worth trying by a matrix product on this device; FP16 only for want of BF16."""
    worth = [speed.precision for speed in measured_speeds(device) if speed.is_worth_using]
    return [name for name in ("tf32", "bf16") if name in worth] or [
        name for name in ("fp16",) if name in worth
    ]


def _choices(
    field: str, values: Sequence[str], *, worth: float = 1.05, always: bool = False
) -> Knob:
    def options(now: StepSettings) -> list[StepSettings]:
        return [
            now.model_copy(update={field: value})
            for value in values
            if value != getattr(now, field)
        ]

    return Knob(field=field, options=options, worth=worth, always=always)


def _compiled(now: StepSettings) -> list[StepSettings]:
    """Packed batches have lengths as numbers in the program: nearly every one would be another."""
    return [] if now.padding == "pack" else [now.model_copy(update={"compile": "inductor"})]


def _one_thread(now: StepSettings) -> list[StepSettings]:
    return [now.model_copy(update={"threads": 1})] if now.threads > 1 else []


def _smaller(now: StepSettings, meter: ModelTimer) -> list[StepSettings]:
    """A half and a quarter: what fits a cache may be faster than what fits the memory."""
    if now.micro_batch * meter.sample_s(now) < _SMALL_PASS_S:
        return []
    sizes = {now.micro_batch // 2, now.micro_batch // 4} - {0}
    return [now.model_copy(update={"micro_batch": size}) for size in sorted(sizes, reverse=True)]
