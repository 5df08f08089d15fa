"""``make_plan``: from what was asked and what was measured to what will be done, with reasons."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.errors import DataError, JobError, did_you_mean
from yunlu.core.units import show_bytes, show_duration
from yunlu.planning.plan import Choice, Plan, Prediction

if TYPE_CHECKING:
    from yunlu.catalog.machine import Device, Machine
    from yunlu.planning.plan import PrecisionName, Profile
    from yunlu.spec.job import Job

DEFAULT_EPOCHS = 10.0
DEFAULT_BATCH = 32
MEMORY_SHARE = 0.6
"""How much of the free memory a plan may fill: activations vary from batch to batch."""
SAVE_EVERY_S = 60.0
COMPILE_PAYS_AFTER_S = 600.0
WORKERS_PAY_ABOVE_S = 5e-3
BF16_PAYS_ABOVE_FLOPS = 2e9
"""Below this much work per micro-batch, the casts of autocast cost more than bf16 saves on a CPU."""

# Peak learning rates that train most models from scratch; pretrained weights move less.
_RATES = {"sgd": 0.1, "momentum": 0.05, "adam": 1e-3, "adamw": 1e-3, "lamb": 2e-3, "lars": 1.0}
_FINE_TUNING_RATES = {"adam": 5e-5, "adamw": 5e-5, "lamb": 1e-4}
# Bytes of optimiser state per trained weight, in fp32.
_STATE_BYTES = {"sgd": 0, "momentum": 4, "adam": 8, "adamw": 8, "lamb": 8, "lars": 4}


def choose_batch(job: Job, train_samples: int) -> int:
    """The global batch; refuses one that is larger than the data."""
    asked = job.train.batch
    if asked == "auto":
        return min(DEFAULT_BATCH, train_samples)
    if asked > train_samples:
        raise DataError(
            f"train.batch is {asked}, but there are only {train_samples} training samples.",
            hint=f"Set train.batch to {train_samples} or less, or bring more data.",
        )
    return asked


def choose_micro_batch(job: Job, *, batch: int, room_bytes: float, bytes_per_sample: float) -> int:
    """The whole batch where its activations fit, else the largest power of two that fits."""
    if job.train.micro_batch != "auto":
        return min(job.train.micro_batch, batch)
    fitting = int(room_bytes // max(bytes_per_sample, 1.0))
    if fitting >= batch:
        return batch
    return max(1, 1 << max(fitting.bit_length() - 1, 0))


def make_plan(job: Job, machine: Machine, profile: Profile) -> Plan:
    """Decide everything that is ``auto``, and foretell memory, time and cost."""
    choices: list[Choice] = []

    def choose(name: str, value: Any, reason: str, *, pinned: bool = False) -> Any:
        text = f"{value:g}" if isinstance(value, float) else str(value)
        why = "set in the job" if pinned else reason
        choices.append(Choice(name=name, value=text, reason=why, pinned=pinned))
        return value

    train, device = job.train, machine.best_device
    choose("device", f"{device.kind} ({device.name})", _device_reason(machine))
    choose("layout", "single", "one worker holds the whole model")

    batch = choose_batch(job, profile.train_samples)
    choose("batch", batch, f"a safe start for most models, of {profile.train_samples} samples",
           pinned=train.batch != "auto")  # fmt: skip
    fixed = fixed_bytes(job, profile)
    room = max(device.memory_bytes * MEMORY_SHARE - fixed, 0.0)
    micro = choose_micro_batch(
        job, batch=batch, room_bytes=room, bytes_per_sample=profile.activation_bytes_per_sample
    )
    activations = micro * profile.activation_bytes_per_sample
    choose("micro-batch", micro,
           f"activations take {show_bytes(activations)} of {show_bytes(room)} to spare",
           pinned=train.micro_batch != "auto")  # fmt: skip
    accumulation = math.ceil(batch / micro)

    precision = _choose_precision(job, device, profile, micro)
    choose("precision", *precision, pinned=train.precision != "auto")
    steps_per_epoch = math.ceil(profile.train_samples / batch)
    steps = train.steps or max(1, round((train.epochs or DEFAULT_EPOCHS) * steps_per_epoch))
    choose("steps", steps, f"{steps / steps_per_epoch:g} epochs of {steps_per_epoch}",
           pinned=train.steps is not None)  # fmt: skip
    rate, reason = _choose_rate(job)
    choose("learning rate", rate, reason, pinned=train.optimizer.lr != "auto")
    warmup = _choose_warmup(job, steps)
    choose("warm-up", warmup, "5 % of the run, at most 500 steps",
           pinned=train.schedule.warmup != "auto")  # fmt: skip

    step_s = predict_step_s(profile, batch=batch, micro_batch=micro)
    evaluate_every = {"epoch": steps_per_epoch, "never": 0}.get(str(train.evaluate), train.evaluate)
    evaluate_every = int(evaluate_every) if profile.validation_samples else 0
    total_s = _predict_total(profile, steps=steps, step_s=step_s, evaluate_every=evaluate_every)
    choose("compile", *_choose_compile(job, device, total_s), pinned=train.compile != "auto")
    choose("threads", profile.threads, _threads_reason(profile), pinned=train.threads != "auto")
    workers, reason = _choose_workers(job, machine, profile, batch=batch)
    choose("data workers", workers, reason, pinned=train.workers != "auto")
    every, reason = _choose_checkpoints(job, steps_per_epoch, step_s)
    choose("checkpoint every", every, reason, pinned=train.checkpoint.every != "auto")
    best_metric = _choose_metric(train.checkpoint.metric, profile)
    choose("best by", best_metric, "the task's own figure",
           pinned=train.checkpoint.metric != "auto")  # fmt: skip
    patience = train.early_stopping

    price = machine.dollars_per_hour
    return Plan(
        device=device.kind,
        precision=precision[0],
        batch=batch,
        micro_batch=micro,
        accumulation=accumulation,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=warmup,
        lr=rate,
        weight_decay=_choose_weight_decay(job),
        evaluate_every=evaluate_every,
        checkpoint_every=every,
        best_metric=best_metric,
        stopping_metric=_choose_metric(patience.metric if patience else "auto", profile),
        compile=_choose_compile(job, device, total_s)[0],
        workers=workers,
        threads=profile.threads,
        choices=tuple(choices),
        prediction=Prediction(
            memory_bytes=fixed + activations,
            step_s=step_s,
            samples_per_s=min(batch, profile.train_samples) / step_s,
            total_s=total_s,
            dollars=None if price is None else price * total_s / 3600,
        ),
    )


def fixed_bytes(job: Job, profile: Profile) -> float:
    """Memory that does not grow with the batch: the process, gradients, optimiser state, averages."""
    per_trained = 4 + _STATE_BYTES[job.train.optimizer.name]
    averages = 4 * profile.parameters if job.train.ema else 0
    # While a checkpoint is written, a copy of weights and optimiser state is alive.
    snapshot = 4 * profile.parameters + _STATE_BYTES[job.train.optimizer.name] * profile.trainable
    return profile.resident_bytes + per_trained * profile.trainable + averages + snapshot


def predict_step_s(profile: Profile, *, batch: int, micro_batch: int) -> float:
    """One optimiser step: the micro-batches, the update, the fetching of its samples."""
    micros = math.ceil(batch / micro_batch)
    # Small micro-batches cost more per sample than the probe's share; that is seen by probing the
    # planned size, so this only interpolates when the user re-plans.
    micro_s = profile.probe_s * micro_batch / profile.probe_samples
    return micros * micro_s + profile.update_s + batch * profile.load_s_per_sample


def _predict_total(profile: Profile, *, steps: int, step_s: float, evaluate_every: int) -> float:
    evaluations = steps // evaluate_every if evaluate_every else 0
    evaluated = evaluations * profile.validation_samples + profile.test_samples
    return profile.startup_s + steps * step_s + evaluated * profile.evaluate_s_per_sample


def _device_reason(machine: Machine) -> str:
    best = machine.best_device
    if best.kind == "cpu":
        return f"no accelerator found; {machine.cores} cores, {show_bytes(best.memory_bytes)} free"
    return f"the accelerator with {show_bytes(best.memory_bytes)} free"


def _choose_precision(
    job: Job, device: Device, profile: Profile, micro: int
) -> tuple[PrecisionName, str]:
    asked = job.train.precision
    if asked != "auto":
        return asked, ""
    if "bf16" not in device.fast_precisions:
        return "fp32", "no native bf16 arithmetic on this device"
    work = (profile.flops_per_sample or 0.0) * micro
    if device.kind == "cpu" and work < BF16_PAYS_ABOVE_FLOPS:
        return "fp32", f"{work / 1e9:.2f} GFLOP a pass: too little for bf16 to pay for its casts"
    return "bf16", "native bf16 arithmetic, and enough of it to pay"


def _choose_rate(job: Job) -> tuple[float, str]:
    optimizer = job.train.optimizer
    if optimizer.lr != "auto":
        return optimizer.lr, ""
    tuned = job.model.name.startswith("hf:") and job.model.pretrained
    if tuned and optimizer.name in _FINE_TUNING_RATES:
        return _FINE_TUNING_RATES[optimizer.name], f"usual for {optimizer.name} on trained weights"
    return _RATES[optimizer.name], f"usual for {optimizer.name} from scratch"


def _choose_weight_decay(job: Job) -> float:
    decay = job.train.optimizer.weight_decay
    if decay != "auto":
        return decay
    return {"adamw": 0.01, "lamb": 0.01, "lars": 1e-4}.get(job.train.optimizer.name, 0.0)


def _choose_warmup(job: Job, steps: int) -> int:
    warmup = job.train.schedule.warmup
    if warmup == "auto":
        return min(500, round(0.05 * steps))
    return min(steps, round(warmup * steps) if warmup < 1 else round(warmup))


def _choose_compile(
    job: Job, device: Device, total_s: float
) -> tuple[Literal["none", "inductor", "xla"], str]:
    asked = job.train.compile
    if asked != "auto":
        return "xla" if asked == "xla" else "inductor" if asked else "none", ""
    if total_s < COMPILE_PAYS_AFTER_S:
        return "none", f"compiling would not pay back within {show_duration(total_s)}"
    if device.kind == "cpu":
        return "none", "compiling gains little on a CPU"
    return "inductor", f"pays back within {show_duration(total_s)}"


def _threads_reason(profile: Profile) -> str:
    if profile.threads_gain is None:
        return "all that there are"
    if profile.threads_gain < 1:
        return f"one is {1 / profile.threads_gain:.2g} × as fast as all for this model, here"
    return f"all are {profile.threads_gain:.2g} × as fast as one for this model, here"


def _choose_workers(job: Job, machine: Machine, profile: Profile, *, batch: int) -> tuple[int, str]:
    if job.train.workers != "auto":
        return job.train.workers, ""
    load_s = batch * profile.load_s_per_sample
    share = load_s / max(profile.probe_s * batch / profile.probe_samples, 1e-9)
    # Handing a batch over from another process costs about a millisecond of its own.
    if share < 0.25 or load_s < WORKERS_PAY_ABOVE_S or machine.cores < 2:
        return 0, f"fetching a batch takes {show_duration(load_s)}, {share:.0%} of computing it"
    return min(machine.cores - 1, math.ceil(share)), f"fetching takes {share:.0%} of computing"


def _choose_metric(asked: str, profile: Profile) -> str:
    """The metric that decides; an unknown one is refused before training starts."""
    if asked == "auto":
        return profile.task_metric if profile.task_metric in profile.metrics else "loss"
    if asked not in profile.metrics:
        raise JobError(
            f"The job asks for the metric {asked!r}, which this task does not give.",
            hint=did_you_mean(asked, profile.metrics),
        )
    return asked


def _choose_checkpoints(job: Job, steps_per_epoch: int, step_s: float) -> tuple[int, str]:
    every = job.train.checkpoint.every
    if every == "auto":
        return max(1, round(SAVE_EVERY_S / step_s)), "at most a minute of work is ever lost"
    return (steps_per_epoch if every == "epoch" else every), ""
