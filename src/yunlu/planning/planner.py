"""The planner: decide everything a job leaves open, with reasons, before anyone pays and in the worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from yunlu.core.errors import DataError, JobError, did_you_mean
from yunlu.core.units import show_bytes, show_duration
from yunlu.planning.analytic_estimate import predict_from
from yunlu.planning.hyperparameter_transfer import TransferScale, advise
from yunlu.planning.large_batch import (
    batch_limits,
    phases_of,
    scale_rate,
    scaling_reason,
    warmup_steps_for,
)
from yunlu.planning.large_batch import count_steps as steps_of
from yunlu.planning.layouts import Layout, SplitConstraints, WorkerShare, peak_parts
from yunlu.planning.plan import Choice, Hardware, MeasuringTime, Plan, Prediction
from yunlu.planning.splitting import MEMORY_SHARE, optimizer_state_bytes, split_work, time_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yunlu.hardware.fleet import Machine
    from yunlu.planning.analytic_estimate import AnalyticEstimate
    from yunlu.planning.plan import Profile
    from yunlu.planning.splitting import Split
    from yunlu.spec.job import Job

DEFAULT_EPOCHS = 10.0
DEFAULT_BATCH = 32
SAVE_EVERY_S = 60.0
WORKERS_PAY_ABOVE_S = 5e-3


def choose_batch(job: Job, train_samples: int) -> int:
    """The global batch; refuses one that is larger than the data."""
    requested = job.train.batch
    if requested == "auto":
        return min(DEFAULT_BATCH, job.goal.max_batch or DEFAULT_BATCH, train_samples)
    if requested > train_samples:
        raise DataError(
            f"train.batch is {requested}, but there are only {train_samples} training samples.",
            hint=f"Set train.batch to {train_samples} or less, or bring more data.",
        )
    return requested


def count_steps(job: Job, *, samples: int, batch: int) -> int:
    """Optimiser steps of the whole run."""
    if job.train.steps is not None:
        return job.train.steps
    epochs = job.train.epochs or DEFAULT_EPOCHS
    phases = phases_of(job.train.grow_batch, batch, samples, epochs)
    return steps_of(((first, math.ceil(samples / size)) for first, size in phases), epochs)


def choose_micro_batch(job: Job, *, batch: int, room_bytes: float, bytes_per_sample: float) -> int:
    """The whole batch where its activations fit, else the largest power of two that fits."""
    if job.train.gradient_release:
        return batch  # a gradient that is freed at once cannot be added to
    if job.train.micro_batch != "auto":
        return min(job.train.micro_batch, batch)
    fitting = int(room_bytes // max(bytes_per_sample, 1.0))
    if fitting >= batch:
        return batch
    return max(1, 1 << max(fitting.bit_length() - 1, 0))


def make_plan(
    job: Job, machine: Machine, profile: Profile, guess: AnalyticEstimate | None = None
) -> Plan:
    """Plan a job on this machine from its profile: the worker's plan.

    ``guess`` holds the figures as they were to be expected before anything was timed.
    """
    device = machine.best_device
    split = split_work(job, machine, profile, batch=choose_batch(job, profile.train_samples))
    hardware = Hardware(
        instance=machine.hostname,
        device=device.name,
        devices_per_node=split.devices,
        dollars_per_hour=machine.dollars_per_hour,
        memory_bytes=device.memory_bytes,
    )
    return decide(
        job, profile, split, hardware,
        device=Choice(name="device", value=f"{device.kind} ({device.name})",
                      reason=_device_reason(machine)),
        kind=device.kind, cores=machine.cores,
        predict=lambda one, length: _predict(job, machine, one, split, length), guess=guess,
    )  # fmt: skip


def decide(
    job: Job,
    profile: Profile,
    split: Split,
    hardware: Hardware,
    *,
    device: Choice,
    kind: str,
    cores: int,
    predict: Callable[[Profile, RunLength], Prediction],
    guess: AnalyticEstimate | None = None,
) -> Plan:
    """Decide everything that is ``auto``, and predict memory, time and cost.

    The only place where it is decided: with a predicted profile before anyone pays, with a measured one
    in the worker.

    Args:
        job: What is asked.
        profile: The model and its data.
        split: The layout, and how each worker computes its share.
        hardware: Nodes that it is planned for.
        device: Choice of the device.
        kind: Of the device.
        cores: Of one node; 0 where unknown.
        predict: Predicts a run of some length from a profile.
        guess: Figures as they were to be expected before anything was timed.
    """
    choices: list[Choice] = [device]

    def choose(name: str, value: Any, reason: str, *, pinned: bool = False) -> Any:
        text = f"{value:g}" if isinstance(value, float) else str(value)
        why = "set in the job" if pinned else reason
        choices.append(Choice(name=name, value=text, reason=why, pinned=pinned))
        return value

    train, batch = job.train, split.batch
    layout, settings, share = split.layout, split.settings, split.share
    choose("layout", layout, split.reason, pinned=split.reason == "as asked")
    choose("batch", batch, split.reasons.get("batch", _batch_reason(profile)),
           pinned=train.batch != "auto")  # fmt: skip
    if train.adapt_batch is not None:
        low, high = batch_limits(train.adapt_batch, batch, samples=profile.train_samples)
        choose(
            "batch limits", f"{low} to {high}", "it follows the workers and the gradient's noise"
        )
    _add_settings(choose, job, profile, split, hardware)
    adapts = train.adapt_precision
    adapts = settings.precision == "fp16" and layout.is_single if adapts == "auto" else adapts
    steps_per_epoch = math.ceil(profile.train_samples / batch)
    steps = count_steps(job, samples=profile.train_samples, batch=batch)
    epochs = train.epochs or DEFAULT_EPOCHS
    lasting = f"{steps / steps_per_epoch:g} epochs of {steps_per_epoch}"
    if train.grow_batch is not None:
        lasting = f"{epochs:g} epochs of at first {steps_per_epoch}, then fewer and larger"
    choose("steps", steps, lasting, pinned=train.steps is not None)
    rate, reason = _choose_rate(job, profile, batch=batch, steps=steps)
    choose("learning rate", rate, reason, pinned=not reason)
    warmup, reason = _choose_warmup(job, steps, steps_per_epoch, batch)
    warnings = (
        [f"train.schedule.warmup: {reason}"] if train.schedule.warmup != "auto" and reason else []
    )
    choose("warm-up", warmup, reason or "set in the job")
    if train.schedule.warmup != "auto":
        choices[-1] = choices[-1].model_copy(update={"pinned": True})

    evaluate_every = {"epoch": steps_per_epoch, "never": 0}.get(str(train.evaluate), train.evaluate)
    evaluate_every = int(evaluate_every) if profile.validation_samples else 0
    # Where the batch grows, the work is that of as many samples in steps of the first size.
    grows = train.grow_batch is not None and train.steps is None
    alike = round(epochs * steps_per_epoch) if grows else steps
    length = RunLength(batch=batch, steps=alike, evaluate_every=evaluate_every)
    prediction = predict(profile, length)
    workers, reason = _choose_workers(
        job, profile, samples=share.samples, cores=cores // layout.world
    )
    if profile.basis == "measured" or train.workers != "auto":
        choose("data workers", workers, reason, pinned=train.workers != "auto")
    every, reason = _choose_checkpoints(job, steps_per_epoch, prediction.step_s)
    choose("checkpoint every", every, reason, pinned=train.checkpoint.every != "auto")
    best_metric = _choose_metric(train.checkpoint.metric, profile)
    if best_metric != "auto":
        choose("best by", best_metric, "the task's own figure",
               pinned=train.checkpoint.metric != "auto")  # fmt: skip
    if profile.measuring is not None:
        choose(
            "measuring",
            show_duration(profile.measuring.took_s),
            _describe_measuring(profile.measuring),
        )
    patience, scaling = train.early_stopping, train.optimizer.scaling
    return Plan(
        hardware=hardware,
        device=kind,
        devices=split.devices,
        layout=layout,
        **settings.model_dump(),
        alone=profile.settings,
        facts=split.facts,
        room_bytes=split.room_bytes,
        process_bytes=split.process_bytes,
        adapt_precision=adapts,
        batch=batch,
        accumulation=share.micros,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs if train.steps is None else steps / steps_per_epoch,
        warmup_steps=warmup,
        lr=rate,
        lr_scaling=scaling,
        lr_factor=scale_rate(1.0, batch=batch, base_batch=train.optimizer.base_batch, rule=scaling),
        weight_decay=_choose_weight_decay(job),
        evaluate_every=evaluate_every,
        checkpoint_every=every,
        best_metric=best_metric,
        stopping_metric=_choose_metric(patience.metric if patience else "auto", profile),
        workers=workers,
        choices=tuple(choices),
        trials=profile.trials,
        measuring=profile.measuring,
        warnings=tuple(warnings),
        prediction=prediction,
        estimate=None if guess is None else predict_from(guess, lambda one: predict(one, length)),
    )


def _describe_measuring(measuring: MeasuringTime) -> str:
    """What it could have taken, and what did not fit in."""
    limit, left_out = show_duration(measuring.limit_s), ", ".join(measuring.left_out)
    if not left_out:
        return f"at most {limit}, by train.trial_share {measuring.share:g}"
    return (
        f"at most {limit}, by train.trial_share {measuring.share:g}; "
        f"not measured but estimated: {left_out}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """Length of a run: steps, batch, evaluations."""

    batch: int
    steps: int
    evaluate_every: int


def _batch_reason(profile: Profile) -> str:
    return f"a safe start for most models, of {profile.train_samples} samples"


def _predict(
    job: Job, machine: Machine, profile: Profile, split: Split, length: RunLength
) -> Prediction:
    batch, price = length.batch, machine.dollars_per_hour
    is_cpu = machine.best_device.kind == "cpu"
    step = time_step(split, profile, cores=machine.cores, is_cpu=is_cpu)
    memory = _peak_parts(job, split, profile.peak_bytes if split.layout.is_single else None)
    step_s = step.total_s
    total = _predict_total(profile, length, step_s)
    total_s = sum(total.values())
    return Prediction(
        basis=profile.basis,
        memory_bytes=sum(memory.values()),
        step_s=step_s,
        samples_per_s=min(batch, profile.train_samples) / step_s,
        total_s=total_s,
        dollars=None if price is None else price * total_s / 3600,
        memory_parts=memory,
        step_parts=step.parts,
        total_parts=total,
    )


def _add_settings(
    choose: Callable[..., Any], job: Job, profile: Profile, split: Split, hardware: Hardware
) -> None:
    """Add the settings of a step with their reasons."""
    train, settings, reasons = job.train, split.settings, profile.reasons | split.reasons
    if split.layout.is_single and profile.basis == "measured":
        room = memory_room_bytes(job, hardware.memory_bytes, _fixed_bytes_of(job, profile))
        activations = show_bytes(settings.micro_batch * profile.activation_bytes_per_sample)
        fits = f"activations take {activations} of {show_bytes(room)} to spare"
        reasons = {"micro_batch": fits} | reasons
    choose("micro-batch", settings.micro_batch, reasons["micro_batch"],
           pinned=train.micro_batch != "auto")  # fmt: skip
    for field in ("precision", "padding", "recompute", "compile", "threads"):
        is_pinned = getattr(train, field) != "auto"
        if field in reasons or is_pinned:  # listed only where there was a choice
            choose(field, getattr(settings, field), reasons.get(field, ""), pinned=is_pinned)
    if profile.basis == "measured":
        choose("optimiser kernel", settings.kernel, reasons["kernel"],
               pinned=train.optimizer.kernel != "auto")  # fmt: skip


def fixed_bytes(job: Job, *, resident_bytes: float, parameters: int, trainable: int) -> float:
    """Memory that does not grow with the batch: the process, gradients, optimiser state, averages."""
    facts = SplitConstraints(
        parameters=parameters,
        trainable=trainable,
        state_bytes=optimizer_state_bytes(job, trainable),
        activation_bytes_per_sample=0.0,
        on_cpu=True,  # of a device that is not known yet: the one that takes more
    )
    parts = peak_parts(
        Layout(), facts, WorkerShare(micro_batch=1, micros=1),
        process_bytes=resident_bytes - facts.weight_bytes, averages=job.train.ema is not None,
        releases_gradients=job.train.gradient_release,
    )  # fmt: skip
    return sum(parts.values())


def _peak_parts(job: Job, split: Split, passes_bytes: float | None) -> dict[str, float]:
    return peak_parts(
        split.layout, split.facts, split.share, process_bytes=split.process_bytes,
        averages=job.train.ema is not None, releases_gradients=job.train.gradient_release,
        passes_bytes=passes_bytes,
    )  # fmt: skip


def _fixed_bytes_of(job: Job, profile: Profile) -> float:
    return fixed_bytes(
        job,
        resident_bytes=profile.resident_bytes,
        parameters=profile.parameters,
        trainable=profile.trainable,
    )


def cap_bytes(job: Job, machine: Machine) -> float | None:
    """Memory that a worker on a CPU may add before it is refused: beyond, the system would kill it."""
    device, limit = machine.best_device, job.train.memory_gb
    if device.kind != "cpu":
        return None
    return 0.9 * (device.memory_bytes if limit == "auto" else limit * 1e9)


def memory_room_bytes(job: Job, device_bytes: float, fixed: float) -> float:
    """Memory left for activations within the limits of job and device."""
    limit = job.train.memory_gb
    if limit != "auto" and limit * 1e9 < fixed:
        raise JobError(
            f"train.memory_gb is {limit:g}, but the process, the weights and what the optimiser "
            f"remembers take {fixed / 1e9:.2g} before the first sample.",
            hint="Raise it, or train a smaller model; train.optimizer.state: 8bit remembers less.",
        )
    allowed = device_bytes * MEMORY_SHARE if limit == "auto" else limit * 1e9
    return max(allowed - fixed, 0.0)


def _predict_total(profile: Profile, length: RunLength, step_s: float) -> dict[str, float]:
    """Seconds of the whole run, by component."""
    every = length.evaluate_every
    evaluations = length.steps // every if every else 0
    evaluated = evaluations * profile.validation_samples + profile.test_samples
    return {
        "start_up": profile.startup_s,
        "steps": length.steps * step_s,
        "evaluation": evaluated * profile.evaluate_s_per_sample,
    }


def _device_reason(machine: Machine) -> str:
    best = machine.best_device
    if best.kind == "cpu":
        return f"no accelerator found; {machine.cores} cores, {show_bytes(best.memory_bytes)} free"
    return f"the accelerator with {show_bytes(best.memory_bytes)} free"


def _choose_rate(job: Job, profile: Profile, *, batch: int, steps: int) -> tuple[float, str]:
    """Peak rate and its reason; no reason where the job sets it."""
    optimizer = job.train.optimizer
    if (
        optimizer.lr == "auto"
        and (result := _published_rate(job, profile, batch, steps)) is not None
    ):
        return result
    lr, reason = _usual_rate(job) if optimizer.lr == "auto" else (optimizer.lr, "")
    scaled = scale_rate(lr, batch=batch, base_batch=optimizer.base_batch, rule=optimizer.scaling)
    why = scaling_reason(lr, batch=batch, base_batch=optimizer.base_batch, rule=optimizer.scaling)
    return scaled, why or reason


def _published_rate(job: Job, profile: Profile, batch: int, steps: int) -> tuple[float, str] | None:
    """By a rule for language models; None where no rule covers model size or sequence length."""
    length = job.data.max_length
    if length == "auto":
        return None
    scale = TransferScale(parameters=profile.parameters, tokens=steps * batch * length)
    advice = advise(job, scale, batch_tokens=batch * length)
    return None if advice is None else (advice.setting.lr, advice.reason)


def _usual_rate(job: Job) -> tuple[float, str]:
    name, traits = job.train.optimizer.name, job.train.optimizer.traits
    scratch = traits.lr
    is_hf = job.model.name.startswith("hf:") and job.model.pretrained
    if not is_hf and job.model.weights is None:
        return scratch, f"usual for {name} from scratch"
    rate = (traits.fine_tuning_lr or scratch) if is_hf else 0.3 * scratch
    if job.model.adapter is not None:
        # About ten times that of full fine-tuning (Schulman et al. 2025, "LoRA Without Regret").
        return min(10 * rate, scratch), f"usual for {name} on a LoRA adapter"
    return rate, f"usual for {name} on trained weights"


def _choose_weight_decay(job: Job) -> float:
    decay = job.train.optimizer.weight_decay
    return job.train.optimizer.traits.weight_decay if decay == "auto" else decay


def _choose_warmup(job: Job, steps: int, steps_per_epoch: int, batch: int) -> tuple[int, str]:
    warmup, optimizer = job.train.schedule.warmup, job.train.optimizer
    if warmup == "auto":
        return warmup_steps_for(
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            batch=batch,
            base_batch=optimizer.base_batch,
            rule=optimizer.scaling,
        )
    requested = round(warmup * steps) if warmup < 1 else round(warmup)
    if requested <= steps:
        return requested, ""
    return steps, (
        f"{requested} steps were asked for, but the run has only {steps}: the learning rate rises to the "
        "last one. Shorten the warm-up (0.1 is a tenth of the run), or train longer"
    )


def _choose_workers(job: Job, profile: Profile, *, samples: int, cores: int) -> tuple[int, str]:
    if job.train.workers != "auto":
        return job.train.workers, ""
    load_s = samples * profile.load_s_per_sample
    share = load_s / max(profile.probe_s * samples / profile.probe_samples, 1e-9)
    # Handing a batch over from another process costs about a millisecond of its own.
    if share < 0.25 or load_s < WORKERS_PAY_ABOVE_S or cores < 2:
        return 0, f"fetching a batch takes {show_duration(load_s)}, {share:.0%} of computing it"
    return min(cores - 1, math.ceil(share)), f"fetching takes {share:.0%} of computing"


def _choose_metric(metric: str, profile: Profile) -> str:
    """The deciding metric; an unknown one is refused before training starts."""
    if profile.basis == "analytic":
        return metric  # the task is opened by a worker
    if metric == "auto":
        return profile.task_metric if profile.task_metric in profile.metrics else "loss"
    if metric not in profile.metrics:
        raise JobError(
            f"The job asks for the metric {metric!r}, which this task does not give.",
            hint=did_you_mean(metric, profile.metrics),
        )
    return metric


def _choose_checkpoints(job: Job, steps_per_epoch: int, step_s: float) -> tuple[int, str]:
    every = job.train.checkpoint.every
    if every == "auto":
        return max(1, round(SAVE_EVERY_S / step_s)), "at most a minute of work is ever lost"
    return (steps_per_epoch if every == "epoch" else every), ""


RecomputeMode: TypeAlias = Literal["none", "selective", "full"]

EXTRA_TIME: Mapping[RecomputeMode, float] = MappingProxyType(
    {"none": 0.0, "selective": 0.23, "full": 0.35}
)
"""Time that each mode adds to a pass, as a share of it: a small transformer on a CPU."""


def plan_recompute(
    kept_bytes: Mapping[RecomputeMode, float],
    room_bytes: float,
    *,
    extra_time: Mapping[RecomputeMode, float] = EXTRA_TIME,
) -> tuple[RecomputeMode, float]:
    """The mode and the share of the blocks with which activations fit at the least cost of time.

    Where nothing fits, the thriftiest there is: a smaller micro-batch must do the rest.

    Args:
        kept_bytes: What a pass holds with each mode applied to all blocks; ``none`` is always there.
        room_bytes: What it may hold.
        extra_time: What each mode adds to a pass, applied to all blocks.
    """
    everything = kept_bytes["none"]
    if everything <= room_bytes:
        return "none", 0.0
    # What is saved grows with each block; the memory to compute one block again is in the figure
    # for all of them, so a part of them never takes more than this line says.
    shares: dict[RecomputeMode, float] = {
        mode: (everything - room_bytes) / (everything - retained)
        for mode, retained in kept_bytes.items()
        if retained <= room_bytes
    }
    if shares:
        mode = min(shares, key=lambda mode: shares[mode] * extra_time[mode])
        return mode, shares[mode]
    thriftiest = min(kept_bytes, key=lambda mode: kept_bytes[mode])
    return thriftiest, 0.0 if thriftiest == "none" else 1.0
