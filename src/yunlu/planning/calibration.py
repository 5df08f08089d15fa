"""Calibration: correction of predictions from the ratios measured / predicted of finished runs.

The logarithm of measured over predicted is a sum of what a device, its software, the precision and the
work have in common, each drawn around zero with a spread that is known beforehand, and of a run's own
noise. Given some runs, the expectation of each is a weighted mean that ends at the prior where there is
no run (Gelman et al. 2013, chapter 5); it is the estimate with the least expected squared error, so no
run makes predictions worse on average over what there may be. No run is believed further than is
plausible from what all others say (Huber 1964): a disturbed one moves little, many alike move everything.
Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import ValidationError

from yunlu.planning.machine_profile import FiniteFigures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Column = NDArray[np.float64]

Quantity = Literal["step_s", "memory_bytes"]

FILE = "calibration.json"
"""Below the settings' cache."""
VERSION = 1
"""Raised with every change of the calibrated formulas: earlier measurements are then invalid."""
MOST_RUNS = 200
"""The oldest are dropped: software changes."""
Z_80 = 1.2815515655446004
"""Of a normal distribution, 80 % lie within so many standard deviations."""

SPREADS: Mapping[Quantity, tuple[float, ...]] = {
    "step_s": (0.20, 0.12, 0.08, 0.15),
    "memory_bytes": (0.08, 0.05, 0.03, 0.08),
}
"""Prior standard deviations of the log ratio of devices, stacks, precisions and workloads."""
NOISE: Mapping[Quantity, float] = {"step_s": 0.08, "memory_bytes": 0.03}
"""Standard deviation between two identical runs."""
_DOUBT = 3.0
"""Extra variance of the noise while a device has few runs."""
_PLAUSIBLE = 1.25
"""Largest deviation of a run from the others, in standard deviations; beyond, it is clipped."""
_ROUNDS = 500
_SETTLED = 1e-10


class RunMeasurement(FiniteFigures):
    """Predicted (without calibration) and measured value of one quantity of one run."""

    run: str
    """Identifies the run without its path; a run counts once."""
    at: float
    """Seconds since the epoch, when it ended."""
    quantity: Quantity = "step_s"
    device: str
    stack: str
    precision: str
    work: str
    """Identifies the computation: runs of the same work are correlated."""
    predicted: float
    measured: float
    busy: float = 1.0
    """Assumed slowdown by other processes; part of ``predicted``."""

    @property
    def log_ratio(self) -> float:
        """Above zero where it took more than predicted."""
        return math.log(self.measured / self.predicted)

    @property
    def path(self) -> tuple[str, ...]:
        """From the most to the least common level."""
        return self.device, self.stack, self.precision, self.work


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioEstimate:
    """Posterior of the log ratio measured / predicted."""

    mean: float
    sd: float
    """Standard deviation of the mean, without the noise of a single run."""
    runs: int
    """Number of runs it is based on."""

    @property
    def factor(self) -> float:
        """Correction factor of a prediction."""
        return math.exp(self.mean)

    @property
    def variance(self) -> float:
        """Variance of the mean."""
        return self.sd**2


class Calibration(FiniteFigures):
    """Measurements of all runs; frozen, and stored as a readable file."""

    version: Literal[1] = VERSION
    figures: tuple[RunMeasurement, ...] = ()

    def belief(
        self,
        device: str,
        stack: str = "yunlu",
        precision: str | None = None,
        work: str | None = None,
        *,
        quantity: Quantity = "step_s",
    ) -> RatioEstimate:
        """Posterior for this key; for a key without runs, from the levels above."""
        requested = [device, stack, precision, work]
        return self._beliefs[quantity].at([item for item in requested if item is not None])

    @cached_property
    def _beliefs(self) -> dict[Quantity, _Beliefs]:
        return {
            quantity: _Beliefs(
                [figure for figure in self.figures if figure.quantity == quantity],
                spreads=SPREADS[quantity],
                noise=NOISE[quantity],
            )
            for quantity in SPREADS
        }


def parse_calibration(text: bytes | str) -> Calibration:
    """Content of a file without invalid rows; empty if it is damaged or of another version."""
    try:
        result = Calibration.model_validate_json(text)
    except ValidationError:
        return Calibration()
    return Calibration(figures=tuple(figure for figure in result.figures if _is_sound(figure)))


def learn(calibration: Calibration, figures: Sequence[RunMeasurement]) -> Calibration:
    """With more runs; a run that was there is replaced, the oldest beyond the limit are dropped."""
    result = [figure for figure in figures if _is_sound(figure)]
    new = {(item.run, item.quantity) for item in result}
    retained = [
        figure for figure in calibration.figures if (figure.run, figure.quantity) not in new
    ]
    merged = sorted([*retained, *result], key=lambda item: item.at)
    newest = [
        item
        for quantity in SPREADS
        for item in [one for one in merged if one.quantity == quantity][-MOST_RUNS:]
    ]
    return Calibration(figures=tuple(newest))


def forget(calibration: Calibration, runs: set[str]) -> Calibration:
    """Without these runs."""
    return Calibration(figures=tuple(e for e in calibration.figures if e.run not in runs))


def _is_sound(figure: RunMeasurement) -> bool:
    values = figure.predicted, figure.measured, figure.busy
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
    """Corrected predictions and the factors of their 10 to 90 % interval.

    ``keys`` are the distinct (device, stack, precision), ``index`` says which one each point has.
    What runs have made sure narrows the interval; where there is no run, nothing changes.
    """
    prior = sum(spread**2 for spread in SPREADS[quantity][:3])
    beliefs = [calibration.belief(*key, quantity=quantity) for key in keys]
    means = np.array([belief.mean for belief in beliefs])[index]
    known = np.array([max(prior - belief.variance, 0.0) for belief in beliefs])[index]
    least = np.array([belief.sd if belief.runs else 0.0 for belief in beliefs])[index]
    below, above = (_narrow(np.log(item), known, least) for item in (low, high))
    return values * np.exp(means), np.exp(-below), np.exp(above)


def _narrow(edge: Column, known: Column, least: Column) -> Column:
    """Distance of an edge with reduced variance; never below that of the posterior itself."""
    spread = np.abs(edge) / Z_80
    floor = np.minimum(spread, least)
    return Z_80 * np.sqrt(np.maximum(spread**2 - known, floor**2))


class _Beliefs:
    """Joint normal posterior of all levels, one row for each run."""

    def __init__(
        self, figures: Sequence[RunMeasurement], *, spreads: tuple[float, ...], noise: float
    ) -> None:
        self._variances = np.square(spreads)
        names = [figure.path[: depth + 1] for figure in figures for depth in range(len(spreads))]
        self._numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self._paths = np.array([self._numbers[name] for name in names]).reshape(-1, len(spreads))
        if not figures:
            return
        seen = np.array([figure.log_ratio for figure in figures])
        shared = (self._paths[:, None] == self._paths) @ self._variances
        own = _own_variance(figures, noise)
        believed = _damp(seen, shared, own)
        self._pull = np.linalg.solve(shared + np.diag(own), believed)
        # What was clipped adds to the variance of the run.
        self._sure = np.linalg.inv(shared + np.diag(own + (seen - believed) ** 2))

    def at(self, path: Sequence[str]) -> RatioEstimate:
        unknown = float(self._variances[: len(path)].sum())
        requested = [self._numbers.get(tuple(path[: depth + 1]), -1) for depth in range(len(path))]
        met = self._paths[:, : len(path)] == requested
        # Shared levels make two runs correlated: this is their covariance.
        shared = met @ self._variances[: len(path)]
        if not shared.any():
            return RatioEstimate(mean=0.0, sd=math.sqrt(unknown), runs=0)
        variance = unknown - float(shared @ self._sure @ shared)
        depths = met.sum(axis=1)
        return RatioEstimate(
            mean=float(shared @ self._pull),
            sd=math.sqrt(max(variance, 0.0)),
            runs=int((depths == depths.max()).sum()),
        )


def _own_variance(figures: Sequence[RunMeasurement], noise: float) -> Column:
    """Noise variance of each run: larger while a device has few runs, or when others used the machine."""
    runs = Counter(figure.device for figure in figures)
    # Whether the assumed load persisted is unknown: the whole factor is uncertain.
    loads = [math.log(max(figure.busy, 1.0)) ** 2 for figure in figures]
    counts = np.array([runs[figure.device] for figure in figures])
    return noise**2 * (1 + _DOUBT / counts) + np.array(loads)


def _damp(seen: Column, shared: Column, own: Column) -> Column:
    """Clip each run to a plausible distance from the others' prediction; a single run, from no correction.

    Expectations that leave one run out are Rasmussen and Williams 2006, equations 5.10 to 5.12. The map
    is a contraction (others never count for more than one in all), so it has one fixed point; it never
    falls where a run rises, so neither does any belief.
    """
    inverse = np.linalg.inv(shared + np.diag(own))
    precision = np.diag(inverse)
    reach = _PLAUSIBLE / np.sqrt(precision)
    believed = np.clip(seen, -reach, reach)
    for _ in range(_ROUNDS):
        others = believed - (inverse @ believed) / precision
        new = others + np.clip(seen - others, -reach, reach)
        if float(np.max(np.abs(new - believed))) < _SETTLED:
            return new
        believed = new
    return believed
