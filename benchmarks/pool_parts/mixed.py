"""Pools of several device types: our allocator beside Sia's, on its public workloads.

Both run in the same simulator with the same rules; Sia's own simulator gave 0.598 h on philly 6
and 0.583 h on saturn 1 (average time of completion), which the equivalent here should be near.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pool_parts.decisions import EnoughError, Timed
from benchmarks.pool_parts.figures import Figure
from yunlu.lab.simulate_command import make_type_aware_policy
from yunlu.lab.simulation.profiles import load_workload
from yunlu.lab.simulation.sia import (
    SLOWDOWN,
    apply_sia_rules,
    build_sia_cluster,
    load_typed_profiles,
)
from yunlu.lab.simulation.simulator import SimulationRules, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from yunlu.lab.simulation.profiles import Workload
    from yunlu.lab.simulation.simulator import SimulationResult

_LARGEST = 32
ANCHORS = {"philly/workload-6": (0.598, 8.36, 4.64), "saturn/workload-1": (0.583, 7.96, 4.11)}
"""Average and p99 in hours, restarts per job: measured in Sia's own simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """One workload under both."""

    workload: str
    ours: SimulationResult
    sia: SimulationResult


def find_workloads(evidence: Path) -> list[str]:
    """Names of all workloads of both families, as ``philly/workload-1``."""
    root = evidence / "sia" / "workloads"
    return [str(path.relative_to(root).with_suffix("")) for path in sorted(root.glob("*/*.csv"))]


def fight(evidence: Path, name: str) -> Duel:
    """Replay one workload with our policy, then with Sia's."""
    return Duel(workload=name, ours=replay_ours(evidence, name), sia=replay_sia(evidence, name))


def replay_ours(evidence: Path, name: str) -> SimulationResult:
    """With lengths declared and one store of timings per application."""
    return _replay(evidence, name, "yunlu")


def replay_sia(evidence: Path, name: str) -> SimulationResult:
    """With what Sia's scheduler knows."""
    return _replay(evidence, name, "sia")


def _replay(evidence: Path, name: str, policy: str) -> SimulationResult:
    workload = load_workload(evidence / "sia" / "workloads" / f"{name}.csv")
    return _simulate(evidence, workload, policy)


def measure(folder: Path, say: Callable[[str], None], *, quick: bool) -> list[Figure]:
    """Ours against Sia's on every workload, and how long a decision takes."""
    names = sorted(ANCHORS) if quick else find_workloads(folder)
    duels: list[Duel] = []
    for name in names:
        say(f"several types: {name}")
        duels.append(fight(folder, name))
    return [
        *compare(duels),
        *measure_decisions(folder, say, scales=(1, 32) if not quick else (32,)),
    ]


def compare(duels: Sequence[Duel]) -> list[Figure]:
    """One line for each workload, and one for all of them."""
    figures = [
        Figure(
            name=f"{duel.workload}: average, ours / Sia",
            value=duel.ours.average_s / duel.sia.average_s,
            unit="",
            compared=_describe(duel),
        )
        for duel in duels
    ]
    ours, sia = [duel.ours for duel in duels], [duel.sia for duel in duels]
    means = [float(np.mean([each.average_s for each in side])) for side in (ours, sia)]
    tails = [float(np.mean([each.percentile_s(99) for each in side])) for side in (ours, sia)]
    return [
        *figures,
        Figure(
            name="all: average, ours / Sia",
            value=means[0] / means[1],
            unit="",
            target=0.92,
            compared=f"{means[0] / 3600:.3f} h / {means[1] / 3600:.3f} h",
        ),
        Figure(
            name="all: p99, ours / Sia",
            value=tails[0] / tails[1],
            unit="",
            target=1.0,
            compared=f"{tails[0] / 3600:.2f} h / {tails[1] / 3600:.2f} h",
        ),
    ]


def _describe(duel: Duel) -> str:
    ours, sia = duel.ours, duel.sia
    words = (
        f"{ours.average_s / 3600:.3f} / {sia.average_s / 3600:.3f} h, "
        f"p99 {ours.percentile_s(99) / 3600:.2f} / {sia.percentile_s(99) / 3600:.2f} h, "
        f"restarts {ours.restarts_per_job:.2f} / {sia.restarts_per_job:.2f}"
    )
    anchor = ANCHORS.get(duel.workload)
    return f"{words}; Sia's own simulator: {anchor[0]} h, p99 {anchor[1]} h" if anchor else words


def measure_decisions(
    folder: Path, say: Callable[[str], None], *, scales: Sequence[int]
) -> list[Figure]:
    """CPU time of a decision over three types, the mean and the worst of the first rounds."""
    figures: list[Figure] = []
    for scale in scales:
        say(f"decision: {64 * scale} devices of three types, {32 * scale} jobs")
        workload = load_workload(folder / "burst" / f"burst-{scale}.csv")
        timed = Timed()
        with contextlib.suppress(EnoughError):
            _simulate(folder, workload, "yunlu", scale=scale, timed=timed)
        figures.append(
            Figure(
                name=f"decision, {64 * scale} devices of three types, {32 * scale} jobs",
                value=1e3 * float(np.mean(timed.took_s)),
                unit="ms",
                target=300.0 if scale == _LARGEST else None,
                compared=f"worst of {len(timed.took_s)}: {1e3 * max(timed.took_s):.0f} ms; "
                "Sia 1,419 ms at 2,048 devices",
            )
        )
    return figures


def _simulate(
    evidence: Path,
    workload: Workload,
    name: str,
    *,
    scale: int = 1,
    timed: Timed | None = None,
) -> SimulationResult:
    names = {job.application for job in workload.jobs}
    folder, nodes = evidence / "sia" / "profiles", build_sia_cluster(scale)
    contestant = make_type_aware_policy(name, folder, names, nodes, SLOWDOWN)
    return simulate(
        workload,
        load_typed_profiles(folder, names),
        nodes,
        timed or contestant.policy,
        rules=contestant.adapt_rules(apply_sia_rules(SimulationRules())),
        estimator=contestant.estimator,
    )
