"""What runs teach about predictions: how far measured is from predicted, shrunk to what is plausible.

The logarithm of measured over predicted is a sum of what a device, its software, the precision and the
work have in common, each drawn around zero with a spread that is known beforehand, and of a run's own
noise. Given some runs, the expectation of each is a weighted mean that ends at the prior where there is
no run (Gelman et al. 2013, chapter 5); it is the estimate with the least expected squared error, so no
run makes predictions worse on average over what there may be. Runs far off are damped as under
Student's t (Lange et al. 1989): one disturbed run moves next to nothing, many alike move everything. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import ValidationError

from yunlu.planning.probed import Figures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Column = NDArray[np.float64]

Quantity = Literal["step_s", "memory_bytes"]

FILE = "calibration.json"
"""Below the settings' cache."""
VERSION = 1
"""To be raised with every change of the arithmetic that is calibrated: old lessons are then void."""
MOST_RUNS = 200
"""The oldest are forgotten: software changes."""
Z_80 = 1.2815515655446004
"""Of a normal distribution, 80 % lie within so many standard deviations."""

SPREADS: Mapping[Quantity, tuple[float, ...]] = {
    "step_s": (0.20, 0.12, 0.08, 0.15),
    "memory_bytes": (0.08, 0.05, 0.03, 0.08),
}
"""Standard deviations of the log ratio that devices, stacks, precisions and works have of their own."""
NOISE: Mapping[Quantity, float] = {"step_s": 0.08, "memory_bytes": 0.03}
"""Of two runs of the very same."""
_FREEDOM = 4.0
"""Degrees of freedom of the noise: fewer damp more."""
_ROUNDS = 25


class RunFigure(Figures):
    """One quantity of one run, foretold without calibration, beside what was measured."""

    run: str
    """Where it lies; a run counts once."""
    at: float
    """Seconds since the epoch, when it ended."""
    quantity: Quantity = "step_s"
    device: str
    stack: str
    precision: str
    work: str
    """Names what was computed: runs of one work tell less about others than about it."""
    predicted: float
    measured: float

    @property
    def log_ratio(self) -> float:
        """Above zero where it took more than was foretold."""
        return math.log(self.measured / self.predicted)

    @property
    def path(self) -> tuple[str, ...]:
        """From what is most to what is least common."""
        return self.device, self.stack, self.precision, self.work


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """About the log of measured over predicted."""

    mean: float
    sd: float
    """Of what is still unknown, a run's own noise not included."""
    runs: int
    """From how many."""

    @property
    def factor(self) -> float:
        """What to multiply a prediction with."""
        return math.exp(self.mean)

    @property
    def variance(self) -> float:
        """Of the mean."""
        return self.sd**2


@dataclass(slots=True)
class _Node:
    """One device, stack, precision or work, and what lies below it."""

    children: dict[str, _Node] = field(default_factory=dict)
    observed: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    mean: float = 0.0
    variance: float = 0.0
    runs: int = 0


class Calibration(Figures):
    """All that runs have taught; frozen, and small enough for a file that people can read."""

    version: Literal[1] = VERSION
    figures: tuple[RunFigure, ...] = ()

    def belief(
        self,
        device: str,
        stack: str = "yunlu",
        precision: str | None = None,
        work: str | None = None,
        *,
        quantity: Quantity = "step_s",
    ) -> Belief:
        """What is to be expected of this; of what no run has met, what is known of its like."""
        asked = [device, stack, precision, work]
        return self._beliefs[quantity].at([each for each in asked if each is not None])

    @cached_property
    def _beliefs(self) -> dict[Quantity, _Beliefs]:
        return {
            quantity: _Beliefs(
                [each for each in self.figures if each.quantity == quantity],
                spreads=SPREADS[quantity],
                noise=NOISE[quantity],
            )
            for quantity in SPREADS
        }


def parse_calibration(text: bytes | str) -> Calibration:
    """What a file holds; nothing learnt where it is torn or of another version."""
    try:
        return Calibration.model_validate_json(text)
    except ValidationError:
        return Calibration()


def learn(calibration: Calibration, figures: Sequence[RunFigure]) -> Calibration:
    """With some more runs; one that was there is replaced, the oldest beyond the limit forgotten."""
    told = [each for each in figures if _is_sound(each)]
    new = {(each.run, each.quantity) for each in told}
    kept = [each for each in calibration.figures if (each.run, each.quantity) not in new]
    merged = sorted([*kept, *told], key=lambda each: each.at)
    newest = [
        each
        for quantity in SPREADS
        for each in [one for one in merged if one.quantity == quantity][-MOST_RUNS:]
    ]
    return Calibration(figures=tuple(newest))


def forget(calibration: Calibration, runs: set[str]) -> Calibration:
    """Without what these runs taught."""
    return Calibration(figures=tuple(e for e in calibration.figures if e.run not in runs))


def _is_sound(figure: RunFigure) -> bool:
    values = figure.predicted, figure.measured
    return all(math.isfinite(value) and value > 0 for value in values)


def apply(
    calibration: Calibration,
    values: Column,
    low: Column,
    high: Column,
    *,
    keys: Sequence[tuple[str, str, str]],
    index: NDArray[np.intp],
    quantity: Quantity = "step_s",
) -> tuple[Column, Column, Column]:
    """Predictions and the factors of their 10 to 90 % interval, as runs have taught.

    ``keys`` are the distinct (device, stack, precision), ``index`` says which one each point has.
    What runs have made sure narrows the interval; where there is no run, nothing changes.
    """
    prior = sum(spread**2 for spread in SPREADS[quantity][:3])
    beliefs = [calibration.belief(*key, quantity=quantity) for key in keys]
    means = np.array([each.mean for each in beliefs])[index]
    known = np.array([max(prior - each.variance, 0.0) for each in beliefs])[index]
    least = np.array([each.sd if each.runs else 0.0 for each in beliefs])[index]
    below, above = (_narrow(np.log(each), known, least) for each in (low, high))
    return values * np.exp(means), np.exp(-below), np.exp(above)


def _narrow(edge: Column, known: Column, least: Column) -> Column:
    """The distance of an edge with so much less variance; never surer than the belief itself."""
    spread = np.abs(edge) / Z_80
    floor = np.minimum(spread, least)
    return Z_80 * np.sqrt(np.maximum(spread**2 - known, floor**2))


class _Beliefs:
    """The expectations of all that runs share, found together."""

    def __init__(
        self, figures: Sequence[RunFigure], *, spreads: tuple[float, ...], noise: float
    ) -> None:
        self._spreads, self._noise = spreads, noise
        self._root = _Node()
        for figure in figures:
            node = self._root
            for name in figure.path:
                node.runs += 1
                node = node.children.setdefault(name, _Node())
            node.runs += 1
            node.observed.append(figure.log_ratio)
            node.weights.append(1.0)
        # From what is plausible towards what was seen: a lone run far off stays damped.
        for _ in range(_ROUNDS if figures else 0):
            self._weigh(self._root, 0.0)
            self._solve()

    def at(self, path: Sequence[str]) -> Belief:
        node, depth = self._root, 0
        for name in path:
            if name not in node.children:
                break
            node, depth = node.children[name], depth + 1
        unknown = sum(spread**2 for spread in self._spreads[depth : len(path)])
        sd = math.sqrt(node.variance + unknown)
        return Belief(mean=node.mean, sd=sd, runs=node.runs if depth else 0)

    def _weigh(self, node: _Node, mean: float) -> None:
        for i, seen in enumerate(node.observed):
            off = ((seen - mean) / self._noise) ** 2
            node.weights[i] = (_FREEDOM + 1) / (_FREEDOM + off)
        for child in node.children.values():
            self._weigh(child, child.mean)

    def _solve(self) -> None:
        """Exact for given weights: messages up the tree, then beliefs down."""
        for child in self._root.children.values():
            precision, total = self._gather(child, 0)
            whole = 1 / self._spreads[0] ** 2 + precision
            self._spread(child, 0, mean=total / whole, variance=1 / whole)

    def _gather(self, node: _Node, depth: int) -> tuple[float, float]:
        """What lies below says about this node: precision, and precision times mean."""
        precision = sum(node.weights) / self._noise**2
        total = sum(w * seen for w, seen in zip(node.weights, node.observed, strict=True))
        total /= self._noise**2
        for child in node.children.values():
            below, told = self._gather(child, depth + 1)
            if below > 0:
                through = 1 / (1 / below + self._spreads[depth + 1] ** 2)
                precision += through
                total += through * told / below
        return precision, total

    def _spread(self, node: _Node, depth: int, *, mean: float, variance: float) -> None:
        node.mean, node.variance = mean, variance
        for child in node.children.values():
            own, told = self._gather(child, depth + 1)
            tau = self._spreads[depth + 1] ** 2
            # Given the parent, the child is between it and what it was told; the parent is not sure.
            share = own / (own + 1 / tau)
            found = share * (told / own if own else 0.0) + (1 - share) * mean
            spread = 1 / (own + 1 / tau) + (1 - share) ** 2 * variance
            self._spread(child, depth + 1, mean=found, variance=spread)
