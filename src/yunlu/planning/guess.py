"""What could be said of a run before a pass was timed: operators, the machine's probe, earlier runs. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from yunlu.catalog.links import Link
from yunlu.planning.calibration import NOISE, VERSION, Z_80
from yunlu.planning.foretell.local import own_s, pass_s, per_sample_s, update_s
from yunlu.planning.plan import Foretold

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.planning.calibration import Belief, Calibration
    from yunlu.planning.foretell.local import Work
    from yunlu.planning.plan import Prediction, Profile, Settings
    from yunlu.planning.probed import Probed
    from yunlu.spec.job import Job

_EVALUATED = 1 / 3
"""A forward pass alone, of both."""
_TIMES = ("probe_s", "update_s", "own_s", "load_s_per_sample", "evaluate_s_per_sample")
_LOAD_SPREAD = 0.35
"""Standard deviation of what a busy machine's load becomes, as a share of its logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A profile that nobody measured, and how far to trust it."""

    raw: Profile
    """By arithmetic and the probe."""
    profile: Profile
    """As earlier runs teach to correct it."""
    step: Belief
    memory: Belief
    device: str
    stack: str
    work: str
    busy: float


def make_guess(
    profile: Profile,
    work: Work,
    probed: Probed,
    calibration: Calibration,
    *,
    name: str,
    busy: float = 1.0,
) -> Guess:
    """From what is known of the model (``profile`` gives counts and settings, none of its times).

    ``busy`` is by how much others slow this machine down now.
    """
    settings = profile.settings
    raw = _slowed(_arithmetic(profile, work, probed, busy=busy), busy)
    stack = stack_of(settings)
    path = probed.name, stack, settings.precision, name
    step = calibration.belief(*path)
    memory = calibration.belief(*path, quantity="memory_bytes")
    return Guess(
        raw=raw,
        profile=_slowed(raw, step.factor),
        step=step,
        memory=memory,
        device=probed.name,
        stack=stack,
        work=name,
        busy=busy,
    )


def crowding(load: float, *, cores: int, threads: int) -> float:
    """By how much others slow a run down that share its cores, as far as their load goes on."""
    return max(1.0, (load + threads) / cores)


def measured_with(profile: Profile, work: Work | None, probed: Probed) -> Profile:
    """What was timed, with what nobody timed: the engine's own part of a step, and the link."""
    threads = profile.settings.threads
    rest_s = 0.0 if work is None else own_s(work, probed, threads=threads)
    return profile.model_copy(update={"own_s": rest_s, "link": link_of(probed)})


def _slowed(profile: Profile, factor: float) -> Profile:
    return profile.model_copy(update={each: getattr(profile, each) * factor for each in _TIMES})


def name_work(job: Job) -> str:
    """Names what a job computes: the same model and batch on the same data, however long."""
    model = job.model.model_dump(mode="json", exclude_defaults=True)
    what = [job.task, model, job.data.model_dump(mode="json"), job.train.batch]
    digest = hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{job.task} {job.model.name} {digest}"


def stack_of(settings: Settings) -> str:
    """Whose software computes: a compiled model is another stack."""
    return "yunlu" if settings.compile == "none" else f"yunlu-{settings.compile}"


def link_of(probed: Probed) -> Link | None:
    """What the probe found between two workers; one way, as plans count what is sent."""
    if probed.link is None:
        return None
    found = probed.link.all_reduce
    return Link(
        name=f"probed {probed.link.backend}",
        bytes_per_s=found.bytes_per_s,
        message_s=found.message_s,
    )


def _arithmetic(profile: Profile, work: Work, probed: Probed, *, busy: float) -> Profile:
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
    if probed.start is not None:
        changes["startup_s"] = max(probed.start.worker_s, probed.start.cpu_s * busy)
    return profile.model_copy(update=changes)


def foretell(guess: Guess, predict: Callable[[Profile], Prediction]) -> Foretold:
    """The guess through the planner's own arithmetic, with intervals."""
    raw, found = predict(guess.raw), predict(guess.profile)
    step_sd = math.hypot(guess.step.sd, NOISE["step_s"], _LOAD_SPREAD * math.log(guess.busy))
    memory_sd = math.hypot(guess.memory.sd, NOISE["memory_bytes"])
    wide = math.exp(Z_80 * step_sd)
    memory = found.memory_bytes * guess.memory.factor
    start_s = guess.profile.startup_s
    total = tuple(start_s + (found.total_s - start_s) * each for each in (1 / wide, wide))
    intervals = {
        "memory_bytes": _around(memory, math.exp(Z_80 * memory_sd)),
        "step_s": _around(found.step_s, wide),
        "samples_per_s": _around(found.samples_per_s, wide),
        "total_s": (total[0], total[1]),
    }
    if found.dollars is not None and found.total_s > 0:
        price = found.dollars / found.total_s
        intervals["dollars"] = (price * total[0], price * total[1])
    return Foretold(
        **found.model_copy(update={"memory_bytes": memory}).model_dump(),
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
