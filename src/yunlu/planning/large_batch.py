"""Large-batch rules and schedules: learning rate, warm-up and number of steps. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.spec.train import AdaptBatchSpec, GrowBatchSpec, ScheduleSpec, TrainSpec


Rule = Literal["none", "linear", "sqrt"]
AdaptedRule = Literal["none", "linear", "sqrt", "gain"]
WARMUP_SHARE = 0.05
WARMUP_STEPS = 500
LINEAR_WARMUP_EPOCHS = 5
LONGEST_WARMUP_SHARE = 0.2
LEAST_WORTH = 0.7
"""Least efficiency of a sample where the batch grows with the replicas."""

_REASONS = {
    "linear": "the rate grows with the batch (linear rule, Goyal et al. 2017)",
    "sqrt": "the rate grows with the root of the batch (Krizhevsky 2014; Malladi et al. 2022)",
}


def scale_rate(lr: float, *, batch: int, base_batch: int, rule: Rule) -> float:
    """The rate for ``batch``, from the rate that suits ``base_batch``.

    Linear keeps the noise of SGD's path the same (Goyal et al. 2017, section 2.1); the square root
    does so for Adam and its kin (Krizhevsky 2014, section 5; Malladi et al. 2022, section 4).
    """
    factor = batch / base_batch
    return lr * {"none": 1.0, "linear": factor, "sqrt": math.sqrt(factor)}[rule]


def scaling_reason(lr: float, *, batch: int, base_batch: int, rule: Rule) -> str:
    """Why the rate is what ``scale_rate`` says, for the plan; empty where nothing is scaled."""
    if rule == "none" or batch == base_batch:
        return ""
    return f"{lr:g} at batch {base_batch}, now {batch}: {_REASONS[rule]}"


def warmup_steps_for(
    *, steps: int, steps_per_epoch: int, batch: int, base_batch: int, rule: Rule
) -> tuple[int, str]:
    """Steps of warm-up and the reason: longer where the batch, and with it the rate, is scaled up.

    Linear: five epochs (Goyal et al. 2017, section 2.2). Square root: as many steps as the base
    batch would take, hence more epochs (You et al. 2020, section 4.1). Never most of a short run.
    """
    usual = min(WARMUP_STEPS, round(WARMUP_SHARE * steps))
    if rule == "none" or batch <= base_batch:
        return usual, f"{WARMUP_SHARE:.0%} of the run, at most {WARMUP_STEPS} steps"
    longest = round(LONGEST_WARMUP_SHARE * steps)
    if rule == "linear":
        wanted = LINEAR_WARMUP_EPOCHS * steps_per_epoch
        why = f"{LINEAR_WARMUP_EPOCHS} epochs, as the linear rule needs (Goyal et al. 2017)"
    else:
        wanted = min(WARMUP_STEPS, round(WARMUP_SHARE * steps * batch / base_batch))
        why = f"as many steps as batch {base_batch} would take (You et al. 2020)"
    if wanted > longest:
        return longest, f"{LONGEST_WARMUP_SHARE:.0%} of the run; {why}, were it longer"
    return max(wanted, usual), why


def efficiency(noise_scale: float, batch: int, base_batch: int) -> float:
    """Progress per sample at ``batch``, as a share of that at ``base_batch``.

    Qiao et al. 2021 (Pollux), section 3.1; times the samples per second it is the goodput.
    """
    return (noise_scale + base_batch) / (noise_scale + batch)


def gain_of(noise_scale: float, batch: int, base_batch: int) -> float:
    """How many steps of ``base_batch`` one step of ``batch`` is worth (Johnson et al. 2020, section 3)."""
    return batch / base_batch * efficiency(noise_scale, batch, base_batch)


def adapt_batch(noise_scale: float, base_batch: int, growth: float) -> int:
    """The batch for ``growth`` times the replicas, each with as many samples as before.

    Less where a sample would lose too much of its worth by it.
    """
    wanted = round(base_batch * growth)
    worth_it = math.floor((noise_scale + base_batch) / LEAST_WORTH - noise_scale)
    return max(min(wanted, worth_it), 1)


def batch_limits(spec: AdaptBatchSpec, batch: int, *, samples: int) -> tuple[int, int]:
    """The smallest and the largest batch that a run may take, of which it begins with ``batch``."""
    low = batch if spec.min is None else min(spec.min, batch)
    return low, min(max(spec.max, batch), samples)


def rate_rule(train: TrainSpec) -> AdaptedRule:
    """How the rate follows a batch that adapts: as the job says, or as suits its optimiser.

    The gain is what AdaScale takes (Johnson et al. 2020); it is for SGD and its kin.
    """
    spec, optimizer = train.adapt_batch, train.optimizer
    if spec is not None and spec.rate != "auto":
        return spec.rate
    if optimizer.scaling != "none":
        return optimizer.scaling
    return "gain" if optimizer.traits.scaling == "linear" else "sqrt"


def rate_factor(rule: AdaptedRule, batch: int, base_batch: int, *, gain: float) -> float:
    """The rate at ``batch``, over that at ``base_batch``."""
    if rule == "gain":
        return gain
    return scale_rate(1.0, batch=batch, base_batch=base_batch, rule=rule)


def phases_of(
    spec: GrowBatchSpec | None, batch: int, samples: int, epochs: float
) -> tuple[tuple[int, int], ...]:
    """Where the batch grows: (first epoch, batch) of each phase that ``epochs`` epochs reach.

    The batch grows where a rate would fall, and the rate stays (Smith et al. 2018, section 3).
    """
    phases = [(0, batch)]
    if spec is None:
        return tuple(phases)
    highest = max(batch, min(spec.limit or samples, samples))
    while True:
        first_epoch, now = phases[-1]
        grown = min(now * spec.factor, highest)
        if grown == now or first_epoch + spec.every >= epochs:
            return tuple(phases)
        phases.append((first_epoch + spec.every, grown))


def count_steps(spans: Iterable[tuple[int, int]], epochs: float) -> int:
    """Steps that ``epochs`` epochs take, from (first epoch, steps per epoch) of each phase."""
    ordered = list(spans)
    ends = [first for first, _ in ordered[1:]] + [math.inf]
    lengths = (
        max(min(end, epochs) - first, 0.0) * per_epoch
        for (first, per_epoch), end in zip(ordered, ends, strict=True)
    )
    return max(1, round(sum(lengths)))


def rate(spec: ScheduleSpec, step: float, *, steps: int, warmup_steps: int) -> float:
    """The share of the peak used by ``step`` (counted from 0) of ``steps``."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    span = max(steps - warmup_steps, 1)
    done = min((step - warmup_steps) / span, 1.0)
    match spec.name:
        case "constant" | "plateau":
            return 1.0
        case "linear":
            return 1 - (1 - spec.final) * done
        case "cosine":
            return spec.final + (1 - spec.final) * (1 + math.cos(math.pi * done)) / 2
        case "wsd":  # warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395): linear decay
            falling = max((done - (1 - spec.decay)) / spec.decay, 0.0)
            return 1 - (1 - spec.final) * falling
