"""Analytic estimate of step time and memory before any pass is timed. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from yunlu.hardware.links import Link
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
"""A forward pass alone, of both."""
_TIMES = ("probe_s", "update_s", "own_s", "load_s_per_sample", "evaluate_s_per_sample")
_LOAD_SPREAD = 0.35
"""Standard deviation of what a busy machine's load becomes, as a share of its logarithm."""
_START_SPREAD = 0.3
"""Standard deviation of the logarithm of start-up: disks have caches, data and models differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticEstimate:
    """A profile that nobody measured, and how far to trust it."""

    raw: Profile
    """By arithmetic and the probe."""
    profile: Profile
    """As earlier runs teach to correct it."""
    step: RatioEstimate
    memory: RatioEstimate
    device: str
    stack: str
    work: str
    busy: float
    start_s: float | None
    """Start-up as the probe knows it; None where it does not, and then no total is predicted."""


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
    """From what is known of the model (``profile`` gives counts and settings, none of its times).

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
    """By how much others slow a run down that share its cores, as far as their load goes on."""
    return max(1.0, (load + threads) / cores)


def measured_with(profile: Profile, work: OperatorWork | None, probed: MachineProfile) -> Profile:
    """What was timed, with what nobody timed: the engine's own part of a step, and the link."""
    threads = profile.settings.threads
    rest_s = 0.0 if work is None else own_s(work, probed, threads=threads)
    return profile.model_copy(update={"own_s": rest_s, "link": link_of(probed)})


def _slowed(profile: Profile, factor: float) -> Profile:
    return profile.model_copy(update={item: getattr(profile, item) * factor for item in _TIMES})


_COMPUTING = {"micro_batch", "recompute", "gradient_release", "quantize", "ema", "memory_gb"}
"""Besides model, data, batch, precision and optimiser: what a step's time and memory depend on."""


def name_work(job: Job) -> str:
    """Names what a job computes: the same model and batch on the same data, however long."""
    model = job.model.model_dump(mode="json", exclude_defaults=True)
    data = job.data.model_dump(mode="json", exclude={"samples", "tokens"})
    how = job.train.model_dump(mode="json", include=_COMPUTING, exclude_defaults=True)
    optimizer = job.train.optimizer
    what = [job.task, model, data, job.train.batch, how, optimizer.name, optimizer.state]
    digest = hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{job.task} {job.model.name} {digest}"


def stack_of(settings: StepSettings) -> str:
    """Whose software computes: a compiled model is another stack."""
    return "yunlu" if settings.compile == "none" else f"yunlu-{settings.compile}"


def link_of(probed: MachineProfile) -> Link | None:
    """What the probe found between two workers; one way, as plans count what is sent."""
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
    changes["peak_bytes"] = None  # seen in passes: only what the process held before counts here
    if start_s is not None:
        changes["startup_s"] = start_s
    return profile.model_copy(update=changes)


def predict_from(
    guess: AnalyticEstimate, predict: Callable[[Profile], Prediction]
) -> AnalyticPrediction:
    """The guess through the planner's own arithmetic, with intervals."""
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
        **result.model_copy(update={"memory_bytes": memory}).model_dump(exclude={"basis"}),
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
    """Of the sum of two that know nothing of each other: distances add as their squares do."""
    low = math.hypot(one - one / factor, other - other / other_factor)
    high = math.hypot(one * factor - one, other * other_factor - other)
    return one + other - low, one + other + high
