"""Tunable settings on this machine, for this model and its data."""

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
"""One thread is used unless all are this much faster: free cores are better left to other jobs."""
_PRECISION_WORTH = 1.1
_LITTLE_PADDING, _MUCH_PADDING = 0.05, 0.3
"""Shares of padding: below the first packing is not tried, above the second always."""
_SMALL_PASS_S = 0.02
"""Below this, call overhead dominates a pass: a smaller micro-batch can only be slower."""


def start_settings(
    job: Job, inputs: TrainingInputs, *, threads: int, micro_batch: int
) -> StepSettings:
    """Initial settings: what the job pins, and safe defaults for the rest."""
    train = job.train
    paddings = padding_options(inputs.task, inputs.model, inputs.splits)
    # Bucketing by length is never a default: where length and content correlate, a batch is no
    # longer a random sample (one example lost a tenth of its accuracy).
    padding = "pad" if train.padding == "auto" else train.padding
    check_padding(padding, paddings)
    return StepSettings(
        threads=threads if train.threads == "auto" else train.threads,
        micro_batch=micro_batch,
        precision="fp32" if train.precision == "auto" else train.precision,
        kernel=kernels_for(inputs.model, train.optimizer)[0]
        if train.optimizer.kernel == "auto"
        else train.optimizer.kernel,
        padding=padding,
        recompute="none" if train.recompute == "auto" else train.recompute,
        compile=_requested_compiler(job),
    )


def _requested_compiler(job: Job) -> Compiler:
    requested = job.train.compile
    if requested == "xla":
        return "xla"
    return "inductor" if requested is True else "none"


def _padding_knob(job: Job, inputs: TrainingInputs, batch: int) -> Knob | None:
    """The packing knob: the same samples in each step, without padding; None if there is little."""
    lengths = lengths_of(inputs.splits.train)
    if lengths is None or "pack" not in padding_options(inputs.task, inputs.model, inputs.splits):
        return None
    share = expected_padding(lengths, make_order(len(lengths), batch, job.train.seed))
    if share < _LITTLE_PADDING:
        return None
    return _choices("padding", ["pack"], always=share >= _MUCH_PADDING)


def list_knobs(job: Job, inputs: TrainingInputs, machine: Machine, timer: ModelTimer) -> list[Knob]:
    """Knobs that the job does not pin, cheapest and surest first."""
    train, device = job.train, machine.best_device
    knobs: list[Knob] = []
    if train.threads == "auto" and device.kind == "cpu":
        knobs.append(
            Knob(field="threads", options=_one_thread, worth=_ALL_THREADS_WORTH, always=True)
        )
    packing = _padding_knob(job, inputs, timer.batch) if train.padding == "auto" else None
    if packing is not None:
        knobs.append(packing)
    if train.micro_batch == "auto" and not train.gradient_release:
        knobs.append(Knob(field="micro_batch", options=lambda now: _smaller(now, timer)))
    if train.precision == "auto":
        knobs.append(_choices("precision", fast_precisions(device), worth=_PRECISION_WORTH))
    is_single = count_devices(job, gpus=machine.gpus) == 1
    if train.compile == "auto" and is_single:  # availability is checked only where it may pay
        extra_s = estimate_compile_s(inputs.model)
        knobs.append(Knob(field="compile", options=_compiled, extra_s=extra_s))
    return knobs


def fast_precisions(device: Device) -> list[PrecisionName]:
    """Precisions worth trying, by the speed of a matrix product; FP16 only without BF16."""
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
    """Not for packed batches: lengths are constants there, and nearly every batch would recompile."""
    return [] if now.padding == "pack" else [now.model_copy(update={"compile": "inductor"})]


def _one_thread(now: StepSettings) -> list[StepSettings]:
    return [now.model_copy(update={"threads": 1})] if now.threads > 1 else []


def _smaller(now: StepSettings, timer: ModelTimer) -> list[StepSettings]:
    """A half and a quarter: a micro-batch that fits the CPU cache may be faster."""
    if now.micro_batch * timer.sample_s(now) < _SMALL_PASS_S:
        return []
    sizes = {now.micro_batch // 2, now.micro_batch // 4} - {0}
    return [now.model_copy(update={"micro_batch": size}) for size in sorted(sizes, reverse=True)]
