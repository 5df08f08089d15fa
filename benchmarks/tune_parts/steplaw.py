"""Rate and batch of a language model from runs of a smaller one, on the trainings behind Step Law.

Data: Li et al. 2025, https://arxiv.org/abs/2503.04715: the loss of each model size and number of tokens
over a grid of rates and batches. Each size with each number of tokens is a target in turn. A small
training, chosen so that the budget buys a handful of its runs, is searched from what the rule says;
its runs move the rule's intercepts, and the target is trained once, at the grid's point next to what
the moved rule says. The runs of the target, and of all that costs as much, are never looked at. Where the
budget buys less than ``_FEWEST`` runs of the cheapest, the rule stands as it was published.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.tune_parts.figures import Figure
from yunlu.planning.hyperparameter_transfer import (
    STEP_LAW,
    Observed,
    RateAndBatch,
    Shift,
    TransferScale,
    fit_shift,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

FILES = {"dense": "dense_lr_bs_loss.csv", "MoE": "moe_lr_bs_loss.csv"}
BUDGET = 0.83
"""Of one training of the target, for all small runs together."""
_SEQUENCE = 2048
_FEWEST, _ENOUGH, _MOST = 3, 9, 16
_BETTER = 0.0005
"""Of the loss: less is noise, and no reason to move."""
_DRAWS = 300
_WRONG = ((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0))

Place = tuple[float, float]
"""Octaves: of the rate, of the batch in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One model size trained on one number of tokens, at many rates and batches."""

    scale: TransferScale
    flops: float
    losses: dict[Place, float]

    @property
    def best(self) -> float:
        """The lowest loss anybody saw."""
        return min(self.losses.values())

    def nearest(self, place: Place) -> Place:
        """The point that was trained, next to a place."""
        return min(self.losses, key=lambda point: math.dist(point, place))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one target."""

    excess: float
    """Per cent above the best loss of the grid."""
    cost: float
    """Of all small runs, as a share of one run of the target."""
    runs: int
    shift: Shift = field(default_factory=Shift)


def measure(folder: Path, say: Callable[[str], None], *, quick: bool) -> list[Figure]:
    """The figures of dense models and of mixtures of experts."""
    figures: list[Figure] = []
    for kind, name in FILES.items():
        grids = load(folder / "steplaw" / name)
        outcomes = [transfer(target, grids) for target in grids]
        helped = [each for each in outcomes if each.runs]
        off = [transfer(target, grids, wrong=w) for target in grids for w in _WRONG]
        one, eight = _random_runs(grids, draws=_DRAWS // (10 if quick else 1))
        costs = [each.cost for each in helped]
        say(
            f"{kind}: {len(grids)} targets, {len(helped)} with small runs "
            f"({np.mean([each.runs for each in helped]):.0f} each in the mean, costing "
            f"{np.mean(costs):.2f}, at most {max(costs):.2f}, of one run of the target); excess mean "
            f"{_mean(outcomes):.3f} %, worst {max(each.excess for each in outcomes):.2f} %; "
            f"as published {_mean([published(grid) for grid in grids]):.3f} %; "
            f"searched from twice or half the rate and batch {_mean([o for o in off if o.runs]):.2f} %"
        )
        compared = f"one random run {one:.1f} %, best of eight {eight:.2f} %"
        title = f"rate and batch from small runs, {kind}"
        figures += [
            Figure(name=f"{title}: excess loss", value=_mean(outcomes), unit="%", at_most=0.3,
                   compared=compared),
            Figure(name=f"{title}: excess loss where there were some", value=_mean(helped),
                   unit="%", at_most=0.3),
            Figure(name=f"{title}: their cost, in runs of the target", value=max(costs),
                   at_most=BUDGET),
        ]  # fmt: skip
    return figures


def load(path: Path) -> list[Grid]:
    """All grids of a table."""
    losses: dict[tuple[float, float, float], dict[Place, float]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            size, tokens = float(row["N"]), float(row["D"])
            active = float(row.get("Na") or size)
            # The grid's own steps are half octaves; the table has them rounded in several ways.
            rate = round(2 * math.log2(float(row["lr"]))) / 2
            place = rate, math.log2(float(row["bs"]) * _SEQUENCE)
            losses.setdefault((size, tokens, active), {})[place] = float(row["smooth loss"])
    return [
        Grid(
            scale=TransferScale(parameters=size, tokens=tokens),
            flops=6 * active * tokens,
            losses=points,
        )
        for (size, tokens, active), points in sorted(losses.items())
    ]


def transfer(target: Grid, grids: Sequence[Grid], *, wrong: Place = (0.0, 0.0)) -> Outcome:
    """Search a small training, move the rule, train the target; ``wrong`` moves where the search starts."""
    small, room = choose_small(target, grids)
    if small is None:
        return Outcome(excess=_excess(target, Shift()), cost=0.0, runs=0)
    x, y = _place(STEP_LAW.at(small.scale))
    tried = list(search(small, (x + wrong[0], y + wrong[1]), most=min(room, _MOST)))
    shift = fit_shift(
        Observed(scale=small.scale, setting=_setting(place), loss=small.losses[place])
        for place in tried
    )
    cost = len(tried) * small.flops / target.flops
    return Outcome(excess=_excess(target, shift), cost=cost, runs=len(tried), shift=shift)


def published(target: Grid) -> Outcome:
    """The rule as it is, without any run."""
    return Outcome(excess=_excess(target, Shift()), cost=0.0, runs=0)


def choose_small(target: Grid, grids: Sequence[Grid]) -> tuple[Grid | None, int]:
    """The largest training of which the budget buys enough runs, else the cheapest; and how many."""
    cheaper = sorted((grid for grid in grids if grid.flops < target.flops), key=lambda g: -g.flops)
    counts = [(grid, int(BUDGET * target.flops // grid.flops)) for grid in cheaper]
    for grid, count in counts:
        if count >= _ENOUGH:
            return grid, count
    if counts and counts[-1][1] >= _FEWEST:
        return counts[-1]
    return None, 0


def search(grid: Grid, start: Place, *, most: int) -> Iterator[Place]:
    """Steps of an octave along the axes, then across, then of half one; moves to what is better."""
    here = grid.nearest(start)
    seen = {here}
    yield here
    for moves in (_along(1.0), _across(1.0), _along(0.5)):
        is_better = True
        while is_better:
            is_better = False
            for dx, dy in moves:
                place = grid.nearest((here[0] + dx, here[1] + dy))
                if place in seen or len(seen) >= most:
                    continue
                seen.add(place)
                yield place
                if grid.losses[place] < grid.losses[here] * (1 - _BETTER):
                    here, is_better = place, True


def _along(step: float) -> list[Place]:
    return [(step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step)]


def _across(step: float) -> list[Place]:
    return [(step, step), (-step, -step), (step, -step), (-step, step)]


def _place(setting: RateAndBatch) -> Place:
    return math.log2(setting.lr), math.log2(setting.batch_tokens)


def _setting(place: Place) -> RateAndBatch:
    return RateAndBatch(lr=2.0 ** place[0], batch_tokens=2.0 ** place[1])


def _excess(target: Grid, shift: Shift) -> float:
    place = target.nearest(_place(STEP_LAW.at(target.scale, shift)))
    return 100 * (target.losses[place] / target.best - 1)


def _random_runs(grids: Sequence[Grid], *, draws: int) -> tuple[float, float]:
    """Per cent above the best: the median of one run of the target, the mean of the best of eight."""
    random = np.random.default_rng(0)
    ones: list[float] = []
    eights: list[float] = []
    for grid in grids:
        excess = 100 * (np.array(list(grid.losses.values())) / grid.best - 1)
        ones.append(float(np.median(excess)))
        best = [random.choice(excess, 8, replace=False).min() for _ in range(draws)]
        eights.append(float(np.mean(best)))
    return float(np.mean(ones)), float(np.mean(eights))


def _mean(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([each.excess for each in outcomes]))
