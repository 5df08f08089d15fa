"""Rules of a simulated pool, and its faults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRules:
    """Timing rules. The defaults are those of Pollux's own simulator."""

    interval_s: float = 60
    """A decision is made this often."""
    is_event_driven: bool = False
    """Decide also whenever a job comes or ends."""
    restart_s: float = 30
    """A job whose devices change holds the new ones this long without progress."""
    restart_s_by_application: Mapping[str, float] = field(default_factory=dict[str, float])
    slowdown_by_application: Mapping[str, float] = field(default_factory=dict[str, float])
    """Factor on step times: the measured system against the profiled one."""
    restarts_on_move: bool = True
    """Whether a move to other nodes of the same type and shape is a restart too."""
    declares_length: bool = True
    """Whether policies know the remaining length of a job."""
    is_shared: bool = False
    """Whether jobs of one application share timings and noise."""
    limit_s: float = 120 * 86400
    """The simulation fails if a policy has not ended all jobs by then."""
    idle_limit_s: float = 86400
    """The simulation fails if a policy gives out nothing for this long while jobs wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Random faults; the same for the same seed."""

    seed: int = 0
    length_error: float = 1.0
    """Declared lengths are wrong by a factor between 1/this and this, log-uniform."""
    crash_share: float = 0.0
    """Share of jobs that crash once, at a random point."""
    retry_s: float = 30.0
    """Seconds before a crashed job is queued again."""
    checkpoint_s: float = 300.0
    """A crash loses what was trained since the last checkpoint, made this often."""
    step_noise: float = 0.0
    """Standard deviation of the logarithm of step times, drawn anew with each measurement."""
    interference: float = 0.0
    """Share of its speed that a job on several nodes loses where it meets another such job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFaults:
    """Faults of one job."""

    declared_factor: float = 1.0
    crashes_at: float = math.inf
    """Share of its progress at which it crashes."""
    noise_seed: tuple[int, int] = (0, 0)


def draw_faults(faults: Faults, count: int) -> Sequence[JobFaults]:
    """Faults of each job, in the order of the workload; each kind has its own random stream."""
    lengths, crashes = (np.random.default_rng((faults.seed, kind)) for kind in range(2))
    spread = math.log(faults.length_error)
    factors = np.exp(lengths.uniform(-spread, spread, count)) if spread > 0 else np.ones(count)
    crash = crashes.uniform(size=count) < faults.crash_share
    places = crashes.uniform(size=count)
    return [
        JobFaults(
            declared_factor=float(factors[item]),
            crashes_at=float(places[item]) if crash[item] else math.inf,
            noise_seed=(faults.seed, 2 + item),
        )
        for item in range(count)
    ]
