"""Analytic estimate of step time and memory before any pass is timed. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from yunlu.hardware.fleet import Link
from yunlu.planning.calibration import NOISE, VERSION, Z_80, Calibration
from yunlu.planning.plan import AnalyticPrediction
from yunlu.planning.predict.local import own_s, pass_s, per_sample_s, update_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.planning.calibration import RatioEstimate
    from yunlu.planning.machine_profile import MachineProfile
    from yunlu.planning.plan import Prediction, Profile, StepSettings
    from yunlu.planning.predict.local import OperatorWork
    from yunlu.spec.job import Job

_EVALUATED = 1 / 3
"""Cost of a forward pass alone, as a share of forward and backward."""
_TIMES = ("probe_s", "update_s", "own_s", "load_s_per_sample", "evaluate_s_per_sample")
_LOAD_SPREAD = 0.35
"""Standard deviation of the change of a machine's load, as a share of its logarithm."""
_START_SPREAD = 0.3
"""Standard deviation of the logarithm of the start-up time: disk caches, data and models differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticEstimate:
    """Estimated profile of a model, and its uncertainty."""

    raw: Profile
    """From FLOP counts and the machine profile."""
    profile: Profile
    """With the corrections learned from earlier runs."""
    step: RatioEstimate
    memory: RatioEstimate
    device: str
    stack: str
    work: str
    busy: float
    start_s: float | None
    """Start-up time of the probe; None where unknown, and then no total is predicted."""


def make_estimate(
    profile: Profile,
    work: OperatorWork,
    probed: MachineProfile,
    calibration: Calibration,
    *,
    name: str,
    busy: float = 1.0,
    workers: int = 1,
) -> AnalyticEstimate:
    """From counts and settings in ``profile``; none of its times are used.

    ``busy`` is by how much others slow this machine down now. Runs on one worker teach of ``workers``
    how far steps are off, with no more certainty than before any run; of their memory, nothing.
    """
    settings = profile.settings
    start_s = None
    if probed.start is not None and workers == 1:
        start_s = max(probed.start.worker_s, probed.start.cpu_s * busy)
    raw = _slowed(_arithmetic(profile, work, probed, start_s=start_s), busy)
    stack = stack_of(settings)
    path = probed.name, stack, settings.precision, name
    step = calibration.belief(*path)
    memory = calibration.belief(*path, quantity="memory_bytes")
    if workers > 1:
        step = replace(step, sd=Calibration().belief(*path).sd)
        memory = Calibration().belief(*path, quantity="memory_bytes")
    return AnalyticEstimate(
        raw=raw,
        profile=_slowed(raw, step.factor),
        step=step,
        memory=memory,
        device=probed.name,
        stack=stack,
        work=name,
        busy=busy,
        start_s=start_s,
    )


def contention(load: float, *, cores: int, threads: int) -> float:
    """Slowdown by other processes on the same cores, if their load persists."""
    return max(1.0, (load + threads) / cores)


def measured_with(profile: Profile, work: OperatorWork | None, probed: MachineProfile) -> Profile:
    """The measured profile, with estimates of what was not timed: engine overhead and link."""
    threads = profile.settings.threads
    rest_s = 0.0 if work is None else own_s(work, probed, threads=threads)
    return profile.model_copy(update={"own_s": rest_s, "link": link_of(probed)})


def _slowed(profile: Profile, factor: float) -> Profile:
    return profile.model_copy(update={item: getattr(profile, item) * factor for item in _TIMES})


_COMPUTING = {"micro_batch", "recompute", "gradient_release", "quantize", "ema", "memory_gb"}
"""Further job keys that step time and memory depend on, besides model, data, batch, precision and optimiser."""


def name_work(job: Job) -> str:
    """Identifies the computation of a job: model, batch and data, independent of its length."""
    model = job.model.model_dump(mode="json", exclude_defaults=True)
    data = job.data.model_dump(mode="json", exclude={"samples", "tokens"})
    how = job.train.model_dump(mode="json", include=_COMPUTING, exclude_defaults=True)
    optimizer = job.train.optimizer
    what = [job.task, model, data, job.train.batch, how, optimizer.name, optimizer.state]
    digest = hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{job.task} {job.model.name} {digest}"


def stack_of(settings: StepSettings) -> str:
    """Software stack; a compiled model is another stack."""
    return "yunlu" if settings.compile == "none" else f"yunlu-{settings.compile}"


def link_of(probed: MachineProfile) -> Link | None:
    """Measured link between two workers; one direction, as plans count sent bytes."""
    if probed.link is None:
        return None
    result = probed.link.all_reduce
    return Link(
        name=f"probed {probed.link.backend}",
        bytes_per_s=result.bytes_per_s,
        message_s=result.message_s,
    )


def _arithmetic(
    profile: Profile, work: OperatorWork, probed: MachineProfile, *, start_s: float | None
) -> Profile:
    threads, precision = profile.settings.threads, profile.settings.precision
    probe_s = pass_s(work.passed, probed, threads=threads, precision=precision)
    samples = work.passed.samples
    changes: dict[str, float | None] = {
        "probe_samples": samples,
        "probe_s": probe_s,
        "update_s": update_s(work, probed, threads=threads),
        "own_s": own_s(work, probed, threads=threads),
        "load_s_per_sample": per_sample_s(probed),
        "evaluate_s_per_sample": _EVALUATED * probe_s / samples,
    }
    changes["peak_bytes"] = (
        None  # measured in passes: only the memory of the process before counts here
    )
    if start_s is not None:
        changes["startup_s"] = start_s
    return profile.model_copy(update=changes)


def predict_from(
    guess: AnalyticEstimate, predict: Callable[[Profile], Prediction]
) -> AnalyticPrediction:
    """The estimate through the planner's arithmetic, with intervals."""
    raw, result = predict(guess.raw), predict(guess.profile)
    load_sd = _LOAD_SPREAD * math.log(guess.busy)
    step_sd = math.hypot(guess.step.sd, NOISE["step_s"], load_sd)
    memory_sd = math.hypot(guess.memory.sd, NOISE["memory_bytes"])
    wide = math.exp(Z_80 * step_sd)
    memory = result.memory_bytes * guess.memory.factor
    intervals = {
        "memory_bytes": _around(memory, math.exp(Z_80 * memory_sd)),
        "step_s": _around(result.step_s, wide),
        "samples_per_s": _around(result.samples_per_s, wide),
    }
    if guess.start_s is not None:
        start_wide = math.exp(Z_80 * math.hypot(_START_SPREAD, load_sd))
        intervals["total_s"] = _both(
            guess.start_s, start_wide, result.total_s - guess.start_s, wide
        )
        if result.dollars is not None and result.total_s > 0:
            price, (low, high) = result.dollars / result.total_s, intervals["total_s"]
            intervals["dollars"] = (price * low, price * high)
    return AnalyticPrediction(
        **result.model_copy(update={"memory_bytes": memory}).model_dump(
            exclude={"basis", "intervals"}
        ),
        intervals=intervals,
        raw={"step_s": raw.step_s, "memory_bytes": raw.memory_bytes},
        version=VERSION,
        device=guess.device,
        stack=guess.stack,
        work=guess.work,
        runs=guess.step.runs,
        busy=guess.busy,
    )


def _around(value: float, factor: float) -> tuple[float, float]:
    return value / factor, value * factor


def _both(one: float, factor: float, other: float, other_factor: float) -> tuple[float, float]:
    """Of the sum of two independent quantities: distances add in quadrature."""
    low = math.hypot(one - one / factor, other - other / other_factor)
    high = math.hypot(one * factor - one, other * other_factor - other)
    return one + other - low, one + other + high
