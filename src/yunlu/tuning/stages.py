"""How far the trials of a study train, by method, and the resulting makespan. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

from yunlu.tuning.methods.samplers import list_settings
from yunlu.tuning.space import list_values, make_dimensions
from yunlu.tuning.study_runner.device_shares import USUAL_POWER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.spec.search import SearchSpec

_MEDIAN = (0.5, 0.35)
"""Share of a whole training that a trial takes, and the deviation of its logarithm: stopping what is
below the median halved the work of Golovin et al. (Vizier, KDD 2017)."""
_PATIENCE = (0.7, 0.3)
_FRONTIER = ((1.0, 0.1), (0.6, 0.25))
"""Shares of the trials, and of a whole training that they take in one go: as on recorded curves, where a
trial took 0.2 to 0.37 of one in all, and six in ten went on once they were held."""
_FRONTIER_SPREAD = 0.4
_HALVING = 0.2
"""Standard deviation of the log where the method fixes the counts: promotions vary in time."""

_FEW = 20_000
"""Number of settings that can be enumerated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """So many trials train so many rungs further."""

    trials: int
    rungs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """Rungs that a study of so many trials trains."""

    stages: tuple[Stage, ...]
    spread: float
    """Standard deviation of the log of all rungs together."""
    waits: bool
    """Whether a stage begins only when the one before is over."""

    @property
    def rungs(self) -> float:
        """Of all trials together."""
        return sum(stage.trials * stage.rungs for stage in self.stages)


def expect_stages(search: SearchSpec, *, trials: int, rungs: int) -> StageCounts:
    """Expected stages of a study under its method."""
    stop = find_stop(search)
    if stop in {"asha", "hyperband"}:
        eta, first = search.stop.eta, min(search.stop.first, rungs)
        brackets = [(trials, first)]
        if stop == "hyperband":
            brackets = _split(trials, first, rungs, eta)
        stages = [s for count, begin in brackets for s in _halve(count, begin, rungs, eta)]
        return StageCounts(stages=tuple(stages), spread=_HALVING, waits=False)
    if stop == "pbt":
        return StageCounts(
            stages=_train_together(search, trials, rungs), spread=_HALVING, waits=True
        )
    if stop == "frontier":
        return StageCounts(stages=_explore(trials, rungs), spread=_FRONTIER_SPREAD, waits=False)
    share, spread = {"median": _MEDIAN, "patience": _PATIENCE}.get(stop, (1.0, 0.0))
    stage = Stage(trials=trials, rungs=max(1.0, share * rungs))
    return StageCounts(stages=(stage,), spread=spread, waits=False)


def find_stop(search: SearchSpec) -> str:
    """Early-stopping rule, with ``auto`` resolved."""
    name = search.stop.name
    if name != "auto":
        return name
    if len(search.aims) > 1:
        return "none"
    if search.method in {"auto", "frontier"}:
        return "frontier"
    return "asha" if search.method in {"random", "sobol", "tpe"} else "none"


def count_population(search: SearchSpec, rungs: int) -> int | None:
    """Size of a population and the copies at its comparisons; None where there is none."""
    stop = search.stop
    if stop.name != "pbt":
        return None
    copies = max(int(stop.share * stop.population), 1)
    return stop.population + copies * ((rungs - 1) // stop.every)


def _train_together(search: SearchSpec, trials: int, rungs: int) -> tuple[Stage, ...]:
    """The same number of trials at every comparison: a copy replaces another."""
    members, every = min(trials, search.stop.population), search.stop.every
    return tuple(
        Stage(trials=members, rungs=float(min(every, rungs - before)))
        for before in range(0, rungs, every)
    )


def count_space(search: SearchSpec) -> int | None:
    """Most settings of a space; None for a continuous field."""
    points = {name: item.count for name, item in search.space.items() if item.count}
    points = points if search.method == "grid" else {}
    dimensions = make_dimensions(search)
    counts = [
        len(list_values(dimension, points=points.get(dimension.name))) for dimension in dimensions
    ]
    whole = prod(counts)
    if 0 < whole <= _FEW and any(dimension.when for dimension in dimensions):
        return sum(1 for _ in list_settings(dimensions, points))
    return whole or None


def makespan_s(
    counts: StageCounts,
    *,
    rung_s: float,
    devices: int,
    parallel: int,
    start_s: float = 0.0,
    power: float = USUAL_POWER,
    elastic: bool = True,
) -> float:
    """Time from the first trial's start to the last one's end.

    Args:
        counts: What is trained.
        rung_s: From one rung to the next, on one device.
        devices: How many there are.
        parallel: How many trials may train at once.
        start_s: Start-up time of a trial, new or continued.
        power: Speed on k devices is k to this power.
        elastic: Whether devices that nobody needs go to the trials that are left.
    """
    slots = max(1, min(parallel, devices))
    speed = (max(1, devices // slots)) ** power if elastic else 1.0
    if counts.waits or elastic:
        return sum(
            _stage_s(
                stage,
                stage.rungs * rung_s,
                devices if elastic else 0,
                slots=slots,
                start_s=start_s,
                power=power,
            )
            for stage in counts.stages
        )
    starts = sum(stage.trials for stage in counts.stages)
    work_s = counts.rungs * rung_s / speed + starts * start_s
    longest_s = _longest(counts.stages) * rung_s / speed + start_s
    # Between what no schedule can beat and what no list schedule exceeds (Graham 1969).
    best_s = max(work_s / slots, longest_s)
    worst_s = (work_s + (slots - 1) * longest_s) / slots
    return (best_s + worst_s) / 2


def _stage_s(
    stage: Stage, one_s: float, devices: int, *, slots: int, start_s: float, power: float
) -> float:
    """All of its trials, of ``one_s`` on one device each; ``devices`` is 0 where sizes do not change."""
    if not devices:
        return ceil(stage.trials / slots) * (one_s + start_s)
    full, rest = divmod(stage.trials, slots)
    spans_s = full * (one_s / max(1, devices // slots) ** power + start_s)
    if rest:
        spans_s += one_s / (devices / rest) ** power + start_s
    return spans_s


def _explore(trials: int, rungs: int) -> tuple[Stage, ...]:
    stages, left = list[Stage](), float(rungs)
    for part, share in _FRONTIER:
        far = min(max(1.0, rungs * share), left)
        if far > 0:
            stages.append(Stage(trials=max(1, round(trials * part)), rungs=far))
        left -= far
    return tuple(stages)


def _halve(trials: int, first: int, rungs: int, eta: int) -> list[Stage]:
    stages: list[Stage] = []
    reached, until, left = 0, first, trials
    while left and reached < rungs:
        until = min(until, rungs)
        stages.append(Stage(trials=left, rungs=until - reached))
        reached, until, left = until, until * eta, left // eta
    return stages


def _split(trials: int, first: int, rungs: int, eta: int) -> list[tuple[int, int]]:
    """Hyperband's brackets: how many of the trials each has, and how far they first train."""
    starts = [first]
    while starts[-1] * eta <= rungs:
        starts.append(starts[-1] * eta)
    most = len(starts) - 1
    weights = [eta ** (most - s) / (most - s + 1) for s in range(len(starts))]
    whole = sum(weights)
    counts = [max(1, round(trials * weight / whole)) for weight in weights]
    return [(count, start) for count, start in zip(counts, starts, strict=True) if count]


def _longest(stages: Sequence[Stage]) -> float:
    """Rungs of the trial that trains longest."""
    runs, longest = 0.0, 0.0
    before = 0
    for stage in stages:
        runs = runs + stage.rungs if stage.trials <= before else stage.rungs
        before = stage.trials
        longest = max(longest, runs)
    return longest
