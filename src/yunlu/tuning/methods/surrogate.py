"""A Gaussian process over settings and rungs: predicts how every learning curve continues.

A curve has a level and wanders from it over the logarithm of time (Ornstein-Uhlenbeck): what lies
flat is expected to stay so, and the farther ahead, the less is known. Both vary smoothly with the
setting (Matérn 5/2, one length for each dimension), and each trial differs from what its setting
promises by a little of both: only so can a trial be better than its neighbours. The family: Swersky,
Snoek and Adams, "Freeze-thaw Bayesian optimization", 2014; Wistuba, Kadra and Grabocka,
"Supervising the multi-fidelity race of hyperparameter configurations", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize
from scipy.special import ndtri

from yunlu.tuning.methods.trial_table import TrialTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.tuning.encoding import Encoder
    from yunlu.tuning.values import Params, Trial

    Array = NDArray[np.float64]
    Indices = NDArray[np.intp]

ROOT5 = np.sqrt(5.0)
JITTER = 1e-6
COMMON = 1.0
"""The variance of what all curves have in common."""

# In the order of KernelParams.vector, after the lengths: means and deviations of the logarithms' priors.
_PRIORS = np.array(
    [
        [-0.5, 1.0],  # level, by setting
        [-1.0, 1.0],  # wandering, by setting
        [-2.0, 1.0],  # level, by trial
        [-2.0, 1.0],  # wandering, by trial
        [-5.0, 1.5],  # noise
        [1.0, 0.7],  # how far (in log rungs) a curve remembers
    ]
)
_NOISE = 4
_LENGTH_SPREAD = 0.7


@dataclass(frozen=True, slots=True)
class CurveObservations:
    """Observations (or queries): settings, how far trained, which trial."""

    features: Array
    times: Array
    """Logarithms of rungs."""
    trials: Indices
    values: Array
    noise: Array
    """Extra noise variance of each: larger for less trusted ones."""

    def join(self, other: CurveObservations) -> CurveObservations:
        """These and others."""
        return CurveObservations(
            np.concatenate([self.features, other.features]),
            np.concatenate([self.times, other.times]),
            np.concatenate([self.trials, other.trials]),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.noise, other.noise]),
        )

    def take(self, rows: Indices) -> CurveObservations:
        """Some of them."""
        return CurveObservations(
            self.features[rows],
            self.times[rows],
            self.trials[rows],
            self.values[rows],
            self.noise[rows],
        )


@dataclass(frozen=True, slots=True)
class KernelParams:
    """Kernel parameters; their logarithms are fitted."""

    vector: Array
    """Lengths of the dimensions, then as in the priors above."""
    owners: Indices
    """Which dimension each column of the features belongs to."""

    @property
    def lengths(self) -> Array:
        """For each column."""
        return np.exp(self.vector[: -len(_PRIORS)])[self.owners]

    @property
    def scales(self) -> Array:
        """As in the priors."""
        return np.exp(self.vector[-len(_PRIORS) :])


def default_kernel(owners: Indices) -> KernelParams:
    """Parameters before any observation."""
    dimensions = int(owners.max()) + 1 if len(owners) else 0
    return KernelParams(np.concatenate([_usual_lengths(dimensions), _PRIORS[:, 0]]), owners)


def _usual_lengths(dimensions: int) -> Array:
    # Distances grow with the root of the dimensions, so lengths do too
    # (Hvarfner, Hellsten and Nardi, "Vanilla Bayesian optimization performs great in high
    # dimensions", 2024).
    return np.full(dimensions, np.log(0.35 * np.sqrt(max(dimensions, 1))))


def fit_kernel(seen: CurveObservations, owners: Indices, *, steps: int = 20) -> KernelParams:
    """The most probable parameters (maximum a posteriori)."""
    start = default_kernel(owners).vector
    dimensions = len(start) - len(_PRIORS)
    spread = np.concatenate([np.full(dimensions, _LENGTH_SPREAD), _PRIORS[:, 1]])
    slope = LikelihoodGradient(seen, owners, dimensions)

    def lose(vector: Array) -> tuple[float, Array]:
        loss, gradient = slope.at(vector)
        far = (vector - start) / spread
        return loss + 0.5 * float(far @ far), gradient + far / spread

    result = minimize(
        lose,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=list(zip(start - 3 * spread, start + 3 * spread, strict=True)),
        options={"maxiter": steps, "maxfun": steps + 5},
    )
    return KernelParams(np.asarray(result.x, dtype=np.float64), owners)


class LikelihoodGradient:
    """Negative log likelihood and its gradient."""

    def __init__(self, seen: CurveObservations, owners: Indices, dimensions: int) -> None:
        """Of these observations."""
        self._seen = seen
        self._n = len(seen.values)
        self._apart = np.zeros((dimensions, self._n, self._n))
        for column, owner in enumerate(owners):
            values = seen.features[:, column]
            self._apart[owner] += (values[:, None] - values[None, :]) ** 2
        self._same = (seen.trials[:, None] == seen.trials[None, :]).astype(np.float64)
        self._between = np.abs(seen.times[:, None] - seen.times[None, :])

    def at(self, vector: Array) -> tuple[float, Array]:
        """For the logarithms of the parameters."""
        lengths, scales = np.exp(vector[: -len(_PRIORS)]), np.exp(vector[-len(_PRIORS) :])
        level, change, own_level, own_change, noise, span = scales
        root = ROOT5 * np.sqrt(np.tensordot(lengths**-2.0, self._apart, axes=1))
        fading = np.exp(-root)
        near = (1.0 + root + root * root / 3.0) * fading
        ago = self._between / span
        linked = np.exp(-ago)
        curving = level + change * linked
        covariance = near * curving + self._same * (own_level + own_change * linked) + COMMON
        covariance.flat[:: self._n + 1] += noise + self._seen.noise + JITTER
        try:
            lower = cholesky(covariance, lower=True, check_finite=False, overwrite_a=True)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(vector)
        weights = cho_solve((lower, True), self._seen.values, check_finite=False)
        loss = 0.5 * float(self._seen.values @ weights) + float(np.log(np.diag(lower)).sum())
        inverse = cho_solve((lower, True), np.eye(self._n), check_finite=False)

        outer = inverse - np.outer(weights, weights)
        # d near / d log length = 5/3 (1 + root) exp(-root) * apart / length^2
        pull = outer * curving * (1.0 + root) * fading
        by_length = (5.0 / 3.0) * np.tensordot(self._apart, pull, axes=2) / lengths**2
        by_scale = np.array(
            [
                level * np.vdot(outer, near),
                change * np.vdot(outer, near * linked),
                own_level * np.vdot(outer, self._same),
                own_change * np.vdot(outer, self._same * linked),
                noise * np.trace(outer),
                np.vdot(outer, (near * change + self._same * own_change) * linked * ago),
            ]
        )
        return loss, 0.5 * np.concatenate([by_length, by_scale]).astype(np.float64)


class Posterior:
    """Posterior of the curves given the observations."""

    def __init__(self, seen: CurveObservations, kernel: KernelParams) -> None:
        """Of these parameters and observations."""
        self._seen, self._kernel = seen, kernel
        covariance = _covary(seen, seen, kernel)
        covariance.flat[:: len(seen.values) + 1] += kernel.scales[_NOISE] + seen.noise + JITTER
        self._lower = cholesky(covariance, lower=True, check_finite=False, overwrite_a=True)
        self._weights = cho_solve((self._lower, True), seen.values, check_finite=False)

    def add_pending(self, request: CurveObservations) -> Array:
        """Condition on pending points at their mean (the "kriging believer").

        Means do not change; only the gain of evaluating the same point again shrinks.
        """
        mean, _ = self.predict(request)
        across = _covary(request, self._seen, self._kernel)
        below = solve_triangular(self._lower, across.T, lower=True, check_finite=False).T
        corner = _covary(request, request, self._kernel) - below @ below.T
        corner.flat[:: len(mean) + 1] += self._kernel.scales[_NOISE] + JITTER
        n, m = len(self._seen.values), len(mean)
        lower = np.zeros((n + m, n + m))
        lower[:n, :n] = self._lower
        lower[n:, :n] = below
        lower[n:, n:] = cholesky(corner, lower=True, check_finite=False)
        self._lower = lower
        self._seen = self._seen.join(request)
        self._weights = np.concatenate([self._weights, np.zeros(m)])
        return mean

    def predict(self, request: CurveObservations) -> tuple[Array, Array]:
        """Mean and deviation of each queried value, without noise."""
        across = _covary(request, self._seen, self._kernel)
        mean = across @ self._weights
        known = solve_triangular(self._lower, across.T, lower=True, check_finite=False)
        # The deviation of a trial from its setting's mean is no reason to start one.
        own = float(self._kernel.scales[2:_NOISE].sum())
        prior = float(self._kernel.scales[:2].sum()) + COMMON + own * (request.trials >= 0)
        variance = prior - np.einsum("ij,ij->j", known, known)
        return mean, np.sqrt(np.maximum(variance, 1e-10))


def make_query(features: Array, times: Array, trials: Indices) -> CurveObservations:
    """Points to predict; a trial that has not started is -1."""
    nothing = np.zeros(len(times))
    return CurveObservations(features, times, trials, nothing, nothing)


def _covary(one: CurveObservations, other: CurveObservations, kernel: KernelParams) -> Array:
    level, change, own_level, own_change, _, span = kernel.scales
    a, b = one.features / kernel.lengths, other.features / kernel.lengths
    squares = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2.0 * (a @ b.T)
    root = ROOT5 * np.sqrt(np.maximum(squares, 0.0))
    near = (1.0 + root + root * root / 3.0) * np.exp(-root)
    linked = np.exp(-np.abs(one.times[:, None] - other.times[None, :]) / span)
    same = (one.trials[:, None] == other.trials[None, :]) & (one.trials[:, None] >= 0)
    covariance = near * (level + change * linked) + COMMON
    return covariance + same * (own_level + own_change * linked)


_DISTRUST = 0.5
"""Noise variance of values of earlier studies, relative to ours (1)."""
_REMEMBERED = 30
"""Number of best trials of an earlier study, and of others, that are used."""


@dataclass(frozen=True, slots=True)
class RankScale:
    """Values by their rank among those of the trials, as a normal distribution would have it.

    Diverged runs and the metric's own unit then make no difference.
    """

    knots: Array
    heights: Array
    mean: float = 0.0
    deviation: float = 1.0

    def rate(self, values: Array) -> Array:
        """Smaller is better; infinite values rank as the worst."""
        return (np.interp(values, self.knots, self.heights) - self.mean) / self.deviation


def make_scale(values: Array) -> RankScale:
    """From the values of trials; only finite ones count."""
    knots = np.unique(values[np.isfinite(values)])
    knots = knots if len(knots) else np.zeros(1)
    return RankScale(knots, ndtri((np.arange(len(knots)) + 0.5) / len(knots)))


def observe(
    table: TrialTable, rows: Indices, rungs: Indices, scale: RankScale
) -> tuple[CurveObservations, RankScale]:
    """Each of these trials at a rung and at half of it, and the scale on which they vary by 1.

    Two points tell whether a curve still falls.
    """
    matches: list[tuple[int, int, float]] = []
    for row, rung in zip(rows.tolist(), rungs.tolist(), strict=True):
        last = table.best_at(row, rung)
        earlier = table.best_at(row, max(rung // 2, 1))
        matches.append((row, *last))
        if earlier[0] != last[0]:
            matches.append((row, *earlier))
    trials = np.array([item[0] for item in matches], dtype=np.intp)
    raw = scale.rate(np.array([item[2] for item in matches]))
    scale = replace(scale, mean=float(raw.mean()), deviation=float(raw.std()) or 1.0)
    seen = CurveObservations(
        table.features[trials],
        np.log([item[1] for item in matches]),
        trials,
        (raw - scale.mean) / scale.deviation,
        np.zeros(len(matches)),
    )
    return seen, scale


def add_failures(table: TrialTable, seen: CurveObservations, rungs: int) -> CurveObservations:
    """Trials that failed without a value, as bad as the worst seen."""
    rows = np.flatnonzero(table.failed)[-_REMEMBERED:]
    if not len(rows):
        return seen
    return seen.join(
        CurveObservations(
            table.features[rows],
            np.full(len(rows), np.log(rungs)),
            rows,
            np.full(len(rows), seen.values.max()),
            np.full(len(rows), _DISTRUST),
        )
    )


class PastTrials:
    """Trials of earlier studies: less trusted than our own."""

    def __init__(self, trials: Sequence[Trial], encoder: Encoder, *, seed: int) -> None:
        """Those with a value."""
        table = TrialTable(encoder, seed=seed).update(trials, [1])
        rows = np.flatnonzero(np.isfinite(table.bests))
        order = rows[np.argsort(table.bests[rows], kind="stable")]
        rest = order[_REMEMBERED:]
        rest = rest[np.argsort(table.lots[rest])[:_REMEMBERED]]
        rows = np.concatenate([order[:_REMEMBERED], rest])
        self.best: list[Params] = [encoder.to_params(units) for units in table.units[order[:3]]]
        """A few, the best first, within the bounds of our dimensions."""
        self._features = table.features[rows]
        self._share = table.rungs[rows] / max(int(table.rungs.max(initial=1)), 1)
        self._heights = make_scale(table.bests[rows]).rate(table.bests[rows])

    def join(self, seen: CurveObservations, scale: RankScale, rungs: int) -> CurveObservations:
        """Observations and these, on the scale of the others."""
        if not self.best:
            return seen
        strangers = np.full(len(self._heights), -1, dtype=np.intp)
        return seen.join(
            CurveObservations(
                self._features,
                np.log(np.maximum(self._share * rungs, 1.0)),
                strangers,
                (self._heights - scale.mean) / scale.deviation,
                np.full(len(strangers), _DISTRUST),
            )
        )
