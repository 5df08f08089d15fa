"""64 devices of one type: does the simulator tell the truth, and how does our policy fare?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pool_parts.evidence import (
    CLUSTER,
    read_profiles,
    read_published,
    read_workload,
)
from benchmarks.pool_parts.figures import Figure
from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.simulator import Faults, SimulationRules, simulate
from yunlu.scheduler.policies import open_policy
from yunlu.scheduler.policy.allocator import Allocator, AllocatorOptions
from yunlu.scheduler.policy.fitting import Fitter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from yunlu.lab.simulation.simulator import SimulationResult

    Say = Callable[[str], None]

TIRESIAS = {1: 2473.7, 2: 5145.0, 4: 3280.3, 6: 3469.7, 8: 5079.7}
OPTIMUS_6 = 5301.9
LESS = {1.0: 0.15, 0.5: 0.12, 1.5: 0.12, 2.0: 0.12}
"""How far below Pollux the average is meant to be, by load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What the policy is told."""

    name: str
    declares_length: bool = True
    is_shared: bool = True
    """Whether jobs of a program learn their speed from each other."""
    learns_lengths: bool = False
    """Whether the lengths of ended jobs of a program tell those of the next."""


FULL = Knowledge(name="declared lengths")
BLIND = (
    Knowledge(name="no lengths, nothing of other jobs", declares_length=False, is_shared=False),
    Knowledge(name="no lengths, speeds of the same program", declares_length=False),
    Knowledge(
        name="no lengths, speeds and lengths of the same program",
        declares_length=False,
        learns_lengths=True,
    ),
)


def run_ours(
    folder: Path,
    number: int,
    load: float = 1.0,
    knowledge: Knowledge = FULL,
    faults: Faults | None = None,
) -> SimulationResult:
    """One workload under the policy ``yunlu``, with its own defaults."""
    options = AllocatorOptions(learns_from_programs=knowledge.learns_lengths)
    return simulate(
        read_workload(folder, number, load),
        read_profiles(folder),
        parse_cluster(CLUSTER),
        Allocator(options),
        rules=SimulationRules(
            is_shared=knowledge.is_shared, declares_length=knowledge.declares_length
        ),
        estimator=Fitter(),
        faults=faults or Faults(),
    )


def check_simulator(folder: Path, workloads: Sequence[int], say: Say) -> list[Figure]:
    """Published averages of other policies, to the tenth of a second."""
    found: list[Figure] = []
    for name, number, average_s in [
        *(("tiresias", number, TIRESIAS[number]) for number in workloads),
        *(("optimus", 6, OPTIMUS_6) for number in workloads if number == 6),
    ]:
        say(f"self-test: {name} on workload {number}")
        outcome = simulate(
            read_workload(folder, number),
            read_profiles(folder),
            parse_cluster(CLUSTER),
            open_policy(name),
        )
        published = read_published(folder, name, number)
        same = sum(published[job] == jct_s for job, jct_s in outcome.jct_s.items())
        found.append(
            Figure(
                name=f"{name}, workload {number}, average JCT",
                value=outcome.average_s,
                exact=average_s,
                compared=f"published; {same} of {len(published)} jobs equal to the second",
            )
        )
    return found


def compare(folder: Path, workloads: Sequence[int], load: float, say: Say) -> list[Figure]:
    """Our policy against what was published of Pollux, at one load."""
    ours: list[SimulationResult] = []
    theirs = [read_published(folder, "pollux", number, load) for number in workloads]
    for number in workloads:
        say(f"load {load}: yunlu on workload {number}")
        ours.append(run_ours(folder, number, load))
    pollux_s = _average(theirs)
    figures = [
        Figure(
            name=f"load {load}, average JCT",
            value=_mean(outcome.average_s for outcome in ours),
            target=(1 - LESS[load]) * pollux_s,
            compared=_versus(_mean(outcome.average_s for outcome in ours), pollux_s),
        )
    ]
    if load == 1.0:
        figures += _compare_tails(folder, workloads, ours, theirs)
    return figures


def compare_blind(folder: Path, workloads: Sequence[int], say: Say) -> list[Figure]:
    """Without declared lengths: what Pollux knew, and a little more in two steps."""
    pollux_s = _average([read_published(folder, "pollux", number) for number in workloads])
    figures: list[Figure] = []
    for knowledge in BLIND:
        averages: list[float] = []
        for number in workloads:
            say(f"{knowledge.name}: yunlu on workload {number}")
            averages.append(run_ours(folder, number, knowledge=knowledge).average_s)
        value = _mean(averages)
        figures.append(
            Figure(
                name=f"average JCT, {knowledge.name}",
                value=value,
                target=0.92 * pollux_s,
                compared=_versus(value, pollux_s),
            )
        )
    return figures


TROUBLES = {
    "declared lengths wrong by 0.5 to 2 times": Faults(length_error=2.0),
    "10 % of jobs crash once": Faults(crash_share=0.1),
    "step times with 10 % noise": Faults(step_noise=0.1),
    "interference of 25 % between wide jobs": Faults(interference=0.25),
}


def compare_robust(folder: Path, workloads: Sequence[int], say: Say) -> list[Figure]:
    """What goes wrong in life, one thing at a time."""
    pollux_s = _average([read_published(folder, "pollux", number) for number in workloads])
    figures: list[Figure] = []
    for name, faults in TROUBLES.items():
        averages: list[float] = []
        for number in workloads:
            say(f"{name}: yunlu on workload {number}")
            averages.append(run_ours(folder, number, faults=faults).average_s)
        value = _mean(averages)
        figures.append(
            Figure(name=f"average JCT, {name}", value=value, compared=_versus(value, pollux_s))
        )
    return figures


def _compare_tails(
    folder: Path,
    workloads: Sequence[int],
    ours: Sequence[SimulationResult],
    theirs: Sequence[dict[str, float]],
) -> list[Figure]:
    tails = _mean(float(np.percentile(list(jcts.values()), 99)) for jcts in theirs)
    spans = _mean(
        max(job.submitted_at + jcts[job.name] for job in read_workload(folder, number).jobs)
        for number, jcts in zip(workloads, theirs, strict=True)
    )
    p99 = _mean(outcome.percentile_s(99) for outcome in ours)
    makespan = _mean(outcome.makespan_s for outcome in ours)
    rows = [
        Figure(name="load 1.0, p99 JCT", value=p99, target=tails, compared=_versus(p99, tails)),
        Figure(
            name="load 1.0, makespan",
            value=makespan,
            target=spans,
            compared=_versus(makespan, spans),
        ),
        Figure(
            name="load 1.0, restarts per job",
            value=_mean(outcome.restarts_per_job for outcome in ours),
            unit="",
            target=2.5,
        ),
        Figure(
            name="load 1.0, device-hours",
            value=_mean(outcome.device_hours for outcome in ours),
            unit="h",
        ),
    ]
    rows += [
        Figure(
            name=f"load 1.0, workload {number}, average JCT",
            value=outcome.average_s,
            compared=_versus(outcome.average_s, _average([jcts])),
        )
        for number, outcome, jcts in zip(workloads, ours, theirs, strict=True)
    ]
    return rows


def _versus(value: float, pollux_s: float) -> str:
    return f"Pollux, published: {pollux_s:,.1f} s ({100 * (value / pollux_s - 1):+.1f} %)"


def _average(jcts: Sequence[dict[str, float]]) -> float:
    return _mean(_mean(each.values()) for each in jcts)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
