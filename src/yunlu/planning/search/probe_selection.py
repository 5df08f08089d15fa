"""Probe selection: which layout to measure next, by a Gaussian process over errors. Pure.

Each candidate has a predicted speed and a chance to run at all. A probe that is faster or slower than
predicted says the same of layouts like it (a Gaussian process over the log errors, Rasmussen and
Williams 2006), and one that fails says that those which need as much memory will fail too. The next
to try is the one that is expected to improve most on the best so far (Jones et al. 1998).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.planning.predict.query_batch import Column, QueryBatch

    Matrix = np.ndarray[Any, np.dtype[np.float64]]

SHARED = 0.3
"""Spread of log errors that all candidates have in common: the machine is faster or slower."""
NOISE = 0.1
"""Spread between two runs of the same layout."""
REACH = 1.0
"""Distance, in doublings, over which an error carries to other layouts."""
ODD_FAILURE = 0.05
"""Chance that a run fails for a reason that says nothing of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Predictions of each candidate, before any is tried."""

    speed: Column
    """If it runs, in any unit; measurements use the same."""
    spread: Column
    """Of the log error of ``speed``."""
    room: Column
    """Log of usable memory over the predicted peak: above 0 it should fit."""
    room_spread: Column
    """Of the log error of the peak."""
    runs: Column
    """Chance to run apart from memory: 0 where it is known not to."""


def next_probe(
    points: QueryBatch, predictions: Predictions, tried: Sequence[int], measured: Sequence[float]
) -> int:
    """The candidate to try next.

    Args:
        points: The candidates.
        predictions: What is predicted of them.
        tried: Those tried so far, in any order.
        measured: The speed of each of these; 0 where it failed.
    """
    speed, spread = expected_speed(points, predictions, tried, measured)
    chance = chance_to_run(points, predictions, tried, measured)
    best = max(measured, default=0.0)
    value = chance * _improvement(np.log(speed), spread, best)
    value[list(tried)] = -1.0
    return int(np.argmax(value))


def expected_speed(
    points: QueryBatch, predictions: Predictions, tried: Sequence[int], measured: Sequence[float]
) -> tuple[Column, Column]:
    """The median speed of each candidate if it runs, and the spread of its log, after the probes."""
    ran = np.array(
        [i for i, speed in zip(tried, measured, strict=True) if speed > 0], dtype=np.intp
    )
    if len(ran) == 0:
        return predictions.speed, predictions.spread
    seen = np.array([speed for speed in measured if speed > 0])
    error = np.log(seen / predictions.speed[ran])
    places = _places(points)
    own = predictions.spread

    def alike(a: Any, b: Any) -> Matrix:
        gap = ((places[a][:, None, :] - places[b][None, :, :]) / REACH) ** 2
        return SHARED**2 + own[a][:, None] * own[b][None, :] * np.exp(-0.5 * gap.sum(axis=2))

    every = np.arange(len(points))
    known = alike(ran, ran) + NOISE**2 * np.eye(len(ran))
    across = alike(every, ran)
    weights = np.linalg.solve(known, across.T).T
    left = SHARED**2 + own**2 - np.einsum("ij,ij->i", weights, across)
    return predictions.speed * np.exp(weights @ error), np.sqrt(np.maximum(left, 1e-6))


def chance_to_run(
    points: QueryBatch, predictions: Predictions, tried: Sequence[int], measured: Sequence[float]
) -> Column:
    """How likely each candidate runs, after the probes."""
    # The error of the predicted peaks is taken as common to all: a grid of it, weighed by what was seen.
    steps = np.linspace(-3.0, 3.0, 61)
    weight = np.exp(-0.5 * steps**2)
    for index, speed in zip(tried, measured, strict=True):
        fits = _fits(predictions, np.array([index]), steps)[0] * (1 - ODD_FAILURE)
        weight *= fits if speed > 0 else 1.0 - fits
    weight /= weight.sum()
    return predictions.runs * (_fits(predictions, np.arange(len(points)), steps) @ weight)


def _fits(predictions: Predictions, index: Any, steps: Column) -> Matrix:
    """For candidates and common errors, the chance to fit: individual errors blur the edge."""
    room, spread = predictions.room[index], predictions.room_spread[index]
    common, own = sqrt(0.5), sqrt(0.5)
    z = (room[:, None] / spread[:, None] - common * steps[None, :]) / own
    return 1.0 / (1.0 + np.exp(np.clip(-1.702 * z, -50, 50)))


def _improvement(log_speed: Column, spread: Column, best: float) -> Column:
    """Expected improvement of a log-normal speed over the best."""
    mean = np.exp(log_speed)
    if best <= 0:
        return mean
    z = (log_speed - np.log(best)) / spread
    raised = np.exp(log_speed + 0.5 * spread**2)
    return raised * _normal(z + spread) - best * _normal(z)


def _normal(z: Column) -> Column:
    return 1.0 / (1.0 + np.exp(np.clip(-1.5976 * z - 0.070566 * z**3, -50, 50)))


def _places(points: QueryBatch) -> Matrix:
    """Coordinates of a layout, in doublings of what it splits."""
    columns = (
        np.log2(points.tp),
        np.log2(points.pp),
        np.log2(points.fsdp),
        np.log2(points.micro_batch),
        1.0 * points.recompute,
        2.0 * (points.zero > 0),
    )
    return np.stack(columns, axis=1).astype(np.float64)
