"""How long a decision takes: a burst of jobs, all at once, on pools up to 2,048 devices."""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pool_parts.evidence import read_profiles
from benchmarks.pool_parts.figures import Figure
from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.profiles import load_workload
from yunlu.lab.simulation.simulator import SimulationRules, simulate
from yunlu.scheduler.policy.allocator import Allocator
from yunlu.scheduler.policy.fitting import Fitter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from yunlu.scheduler.policy.values import Decision, PoolState

SCALES = (1, 4, 16, 32)
_ROUNDS = 16
"""The first are the hardest: everybody starts, and grows with what it learns."""


class EnoughError(Exception):
    """So many decisions were measured."""


@dataclass
class Timed:
    """The policy, with a clock around it."""

    policy: Allocator = field(default_factory=Allocator)
    name: str = "yunlu"
    took_s: list[float] = field(default_factory=list[float])

    def decide(self, state: PoolState) -> Decision:
        """As the policy does; ``EnoughError`` after as many as are to be measured."""
        gc.collect()
        started = time.process_time()
        decision = self.policy.decide(state)
        self.took_s.append(time.process_time() - started)
        if len(self.took_s) >= _ROUNDS:
            raise EnoughError
        return decision


def measure(folder: Path, say: Callable[[str], None], *, scales: tuple[int, ...]) -> list[Figure]:
    """CPU time of a decision, the mean and the worst of the first rounds."""
    figures: list[Figure] = []
    for scale in scales:
        say(f"decision: {64 * scale} devices, {32 * scale} jobs")
        timed = Timed()
        with contextlib.suppress(EnoughError):
            simulate(
                load_workload(folder / "burst" / f"burst-{scale}.csv"),
                read_profiles(folder),
                parse_cluster(f"{16 * scale}x4"),
                timed,
                rules=SimulationRules(is_shared=True),
                estimator=Fitter(),
            )
        mean_ms = 1e3 * float(np.mean(timed.took_s))
        figures.append(
            Figure(
                name=f"decision, {64 * scale} devices, {32 * scale} jobs",
                value=mean_ms,
                unit="ms",
                target=100.0 if scale == max(SCALES) else None,
                compared=f"worst of {len(timed.took_s)}: {1e3 * max(timed.took_s):.0f} ms",
            )
        )
    return figures
