"""Choice of step settings: from the cache, or by timing one knob after the other within a budget.

Cache of tuned settings by model shape.
Settings change the rounding of sums, so settings once chosen for a job on a machine stay: the same job
and seed then give the same losses. Of two runs that measure at the same time, the first to write wins.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
import xxhash
from pydantic import ValidationError
from torch.autograd.graph import saved_tensors_hooks

from yunlu.core.errors import ModelError, YunluError
from yunlu.core.files import make_directory, open_private
from yunlu.core.settings import read_settings
from yunlu.core.value import Value
from yunlu.planning.layouts import count_devices
from yunlu.planning.plan import AutotuneTrial, StepSettings
from yunlu.planning.planner import choose_micro_batch, count_steps, plan_recompute
from yunlu.training.autotune.budget import LEAST_S, SPEEDS_S
from yunlu.training.compiler import estimate_compile_s
from yunlu.training.data.batches import expected_padding, lengths_of
from yunlu.training.data.sample_order import make_order
from yunlu.training.memory.out_of_memory import is_out_of_memory, with_less_memory
from yunlu.training.memory.recompute import apply_recompute, find_blocks, recompute_savings
from yunlu.training.optim.build import kernels_for
from yunlu.training.probe import load_speeds, measured_speeds
from yunlu.training.tasks.task import check_padding, padding_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from yunlu.hardware.fleet import Device, Machine
    from yunlu.planning.plan import Compiler, PrecisionName
    from yunlu.spec.job import Job
    from yunlu.training.autotune.budget import MeasuringBudget
    from yunlu.training.autotune.timer import ModelTimer
    from yunlu.training.tasks.task import Batch, TrainingInputs

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
    saved_bytes, size = _first_pass(timer, first, model, most=min(_MEASURED_SAMPLES, batch))
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


def _first_pass(
    timer: ModelTimer, first: StepSettings, model: nn.Module, *, most: int
) -> tuple[float, int]:
    """Bytes of activations of as many samples as were measured, and their number."""
    if (known := timer.measured_figures.find("first")) is not None:
        saved_bytes, size, *spent = known
        timer.note_first(*spent)
        return saved_bytes, int(size)

    def run(samples: int) -> tuple[float, int]:
        return with_less_memory(
            lambda size: _measure_activations(
                timer, first.model_copy(update={"micro_batch": size}), model
            ),
            samples,
            undo=lambda: model.zero_grad(set_to_none=True),
            on_shrink=lambda _size, _message: None,
        )

    few = timer.first_samples(most)
    saved_bytes, size = run(few)
    seconds, samples, _ = timer.first
    if size == few < most and timer.budget.allows(
        most * seconds / samples, f"{most} samples at once"
    ):
        saved_bytes, size = run(most)  # a few more weigh less what a pass saves whatever its size
    timer.measured_figures.keep("first", saved_bytes, size, *timer.first)
    return saved_bytes, size


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


_TOO_SHORT = "the run is too short to try another"
_UNTRIED = {False: _TOO_SHORT, True: "no other option works here"}


class SettingsTimer(Protocol):
    """Times settings on the real model."""

    def compare(self, before: StepSettings, after: StepSettings) -> tuple[float, float] | None:
        """Seconds per sample with each, interleaved; None if the second fails."""
        ...

    def comparison_s(self, settings: StepSettings) -> float:
        """Estimated seconds of a comparison."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting with several options."""

    field: str
    """Field of ``StepSettings``."""
    options: Callable[[StepSettings], Sequence[StepSettings]]
    """Alternatives to the current settings."""
    worth: float = 1.05
    """Least speedup to adopt an option: below it is noise, or not worth the side effects."""
    extra_s: float = 0.0
    """Seconds of a trial besides timing: compilation."""
    always: bool = False
    """Try it in a short run too, within ``LEAST_S``: the wrong choice may cost many times the trial."""

    @property
    def name(self) -> str:
        """Display name."""
        return self.field.replace("_", "-")


class TunedSettings(Value):
    """Result of a search."""

    settings: StepSettings
    reasons: dict[str, str]
    """Reason for each setting with options, by field."""
    trials: tuple[AutotuneTrial, ...]


def search(
    timer: SettingsTimer,
    start: StepSettings,
    knobs: Sequence[Knob],
    budget_s: Callable[[StepSettings], float],
    *,
    least_s: float = LEAST_S,
) -> tuple[TunedSettings, float]:
    """Try each knob in turn; returns the result and the seconds it took.

    ``budget_s`` computes the total budget from the best settings so far: faster settings make a
    shorter run, with a smaller budget. ``least_s``: that of knobs that are always tried.
    """
    settings, trials, reasons = start, list[AutotuneTrial](), dict[str, str]()
    spent_s = 0.0
    for knob in knobs:
        options = knob.options(settings)
        began_at = perf_counter()
        tried: list[tuple[float, StepSettings, float]] = []
        failed = False
        for option in options:
            needed_s = timer.comparison_s(settings) + knob.extra_s
            most_s = budget_s(settings)
            if spent_s + needed_s > (max(most_s, least_s) if knob.always else most_s):
                break
            outcome = timer.compare(settings, option)
            spent_s += perf_counter() - began_at
            began_at = perf_counter()
            failed = failed or outcome is None
            if outcome is not None:
                before_s, after_s = outcome
                tried.append((before_s / max(after_s, 1e-12), option, after_s))
        winner = max(tried, key=lambda one: one[0], default=None)
        adopts = winner is not None and winner[0] >= knob.worth
        trials += [
            AutotuneTrial(
                name=knob.name,
                value=str(getattr(option, knob.field)),
                sample_s=seconds,
                speedup=speedup,
                is_adopted=adopts and winner is not None and option == winner[1],
            )
            for speedup, option, seconds in tried
        ]
        if tried:
            reasons[knob.field] = _reason(knob, settings, tried, is_adopted=adopts)
        elif options:
            reasons[knob.field] = _UNTRIED[failed]
        if adopts and winner is not None:
            settings = winner[1]
    return TunedSettings(settings=settings, reasons=reasons, trials=tuple(trials)), spent_s


def _reason(
    knob: Knob,
    before: StepSettings,
    tried: list[tuple[float, StepSettings, float]],
    *,
    is_adopted: bool,
) -> str:
    speedup, option, _ = max(tried, key=lambda one: one[0])
    now = getattr(before, knob.field)
    if is_adopted and speedup < 1:
        return f"{now} would be only {1 / speedup:.3g} × as fast here"
    if is_adopted:
        return f"{speedup:.3g} × as fast as {now} here"
    other = getattr(option, knob.field)
    return f"{other} is {speedup:.3g} × as fast: {'too little' if speedup > 1 else 'no'} gain"


def load_cached(shape: Sequence[Any]) -> TunedSettings | None:
    """Tuned settings of an earlier run of the same shape; None if not cached."""
    try:
        tuned = TunedSettings.model_validate_json(_path(shape).read_bytes())
    except (OSError, ValidationError):
        return None
    trials = tuple(trial.model_copy(update={"remembered": True}) for trial in tuned.trials)
    return tuned.model_copy(update={"trials": trials})


def save_cached(shape: Sequence[Any], tuned: TunedSettings) -> TunedSettings:
    """Store tuned settings; returns the stored entry: an earlier one stays."""
    path = _path(shape)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make_directory(path.parent)
        with open_private(aside, "w") as file:
            file.write(tuned.model_dump_json())
        os.link(aside, path)  # fails where there is one already
    except FileExistsError:
        return load_cached(shape) or tuned
    except OSError:
        return tuned  # without a cache the next run measures again
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    return tuned


def _path(shape: Sequence[Any]) -> Path:
    text = json.dumps(list(shape), sort_keys=True, default=str)
    return read_settings().cache / "settings" / f"{xxhash.xxh3_64_hexdigest(text.encode())}.json"


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
        fast = fast_precisions(device, timer.budget)
        knobs.append(_choices("precision", fast, worth=_PRECISION_WORTH))
    is_single = count_devices(job, gpus=machine.gpus) == 1
    if train.compile == "auto" and is_single:  # availability is checked only where it may pay
        extra_s = estimate_compile_s(inputs.model)
        knobs.append(Knob(field="compile", options=_compiled, extra_s=extra_s))
    return knobs


def fast_precisions(device: Device, budget: MeasuringBudget | None = None) -> list[PrecisionName]:
    """Precisions worth trying, by the speed of a matrix product; FP16 only without BF16.

    Where that was never measured and does not fit in the budget, those that the device says it has.
    """
    known = load_speeds(device)
    if known is None and (budget is None or budget.allows(SPEEDS_S, "the speed of precisions")):
        known = measured_speeds(device)
    worth: Sequence[str] = device.fast_precisions
    if known is not None:
        worth = [speed.precision for speed in known if speed.is_worth_using]
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


_TORCH_OPTIMIZERS_S = 2.0
"""Import time of torch's own optimisers: they load the compiler."""
# Reasons where there was nothing to try.
_PLAIN_REASONS = {
    "threads": "all available",
    "precision": "nothing is faster than fp32 on this device",
    "kernel": "the only one for this optimiser",
}


def tune(
    job: Job,
    inputs: TrainingInputs,
    machine: Machine,
    timer: ModelTimer,
    start: StepSettings,
    *,
    shape: Sequence[Any],
) -> tuple[TunedSettings, float]:
    """The settings to train with, and the seconds the search took."""
    samples = len(inputs.splits.train)
    steps = count_steps(job, samples=samples, batch=shape[-1])
    key = [
        *(machine.hostname, torch.get_num_threads(), torch.__version__),
        *(job.task, job.model.model_dump(mode="json"), start.model_dump(), job.train.trial_share),
        *(job.train.optimizer.model_dump(mode="json"), steps, samples, *shape),
        # The job's values too: a pinned value must not be taken for a tuned one.
        job.train.model_dump(mode="json", include={*StepSettings.model_fields}),
    ]
    tuned = load_cached(key)
    if tuned is not None:
        return tuned, 0.0
    began_at, budget = perf_counter(), timer.budget
    timer.sample_s(start)  # counts before anything is tried
    before_s = budget.spent_s

    def budget_s(settings: StepSettings) -> float:
        run_s = steps * shape[-1] * timer.sample_s(settings)
        budget.predict_run(run_s)
        return budget.share * run_s - before_s

    least_s = LEAST_S - before_s if budget.share else 0.0
    knobs = list_knobs(job, inputs, machine, timer)
    tuned, spent_s = search(timer, start, knobs, budget_s, least_s=least_s)
    names = {knob.field: f"another {knob.name}" for knob in knobs}
    names |= {
        "compile": "compiling the model",
        "threads": "one thread",
        "padding": "packing samples",
    }
    untried = [names[field] for field, why in tuned.reasons.items() if why == _TOO_SHORT]
    budget.leave_out(*untried)
    if job.train.optimizer.kernel == "auto":
        left_s = budget_s(tuned.settings) - spent_s
        tuned = _try_kernels(job, inputs, timer, tuned, budget_s=left_s)
    plain = {**_PLAIN_REASONS, "compile": _why_not_compiled(job, machine, tuned.settings)}
    tuned = tuned.model_copy(update={"reasons": {**plain, **tuned.reasons}})
    return save_cached(key, tuned), perf_counter() - began_at


def _why_not_compiled(job: Job, machine: Machine, settings: StepSettings) -> str:
    if settings.padding == "pack":
        return "packed batches would recompile again and again"
    if count_devices(job, gpus=machine.gpus) > 1:
        return "not tried for several workers: train.compile: true compiles on each"
    return _UNTRIED[True]


def _try_kernels(
    job: Job, inputs: TrainingInputs, timer: ModelTimer, tuned: TunedSettings, *, budget_s: float
) -> TunedSettings:
    """Time the optimiser kernels by the update alone: it does not depend on the passes."""
    first, *others = kernels_for(inputs.model, job.train.optimizer)
    if not others:
        return tuned
    first_s = timer.update_s(first)
    load_s = 0.0 if "torch._dynamo" in sys.modules else _TORCH_OPTIMIZERS_S
    if load_s + 6 * len(others) * first_s > budget_s:
        timer.budget.leave_out("another optimiser kernel")
        return _with_kernel(tuned, first, "usually the fastest", [])
    seconds = {kernel: timer.update_s(kernel) for kernel in others}
    best = min(seconds, key=lambda kernel: seconds[kernel])
    is_adopted = first_s / seconds[best] >= 1.05
    trials = [
        AutotuneTrial(
            name="kernel",
            value=kernel,
            sample_s=span,
            speedup=first_s / span,
            is_adopted=is_adopted and kernel == best,
        )
        for kernel, span in seconds.items()
    ]
    ratio = first_s / seconds[best]
    if is_adopted:
        return _with_kernel(tuned, best, f"{ratio:.3g} × as fast as {first} here", trials)
    return _with_kernel(tuned, first, f"{best} is {ratio:.3g} × as fast", trials)


def _with_kernel(
    tuned: TunedSettings, kernel: Any, reason: str, trials: list[AutotuneTrial]
) -> TunedSettings:
    return tuned.model_copy(
        update={
            "settings": tuned.settings.model_copy(update={"kernel": kernel}),
            "reasons": tuned.reasons | {"kernel": reason},
            "trials": (*tuned.trials, *trials),
        }
    )
