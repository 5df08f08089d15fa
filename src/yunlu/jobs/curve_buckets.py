"""Curves of any length in bounded memory: of each bucket of points the lowest, the highest, the broken."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

FloatArray = NDArray[np.float64]

Point = tuple[int, float]
"""Step and value."""

MOST_POINTS = 1000
MOST_BUCKETS = 1024

_LOW, _HIGH, _BROKEN = 0, 1, 2
_PLACE, _STEP, _VALUE = 0, 1, 2


class CurveBuckets:
    """Points in order, in at most 1024 buckets of equally many.

    Each bucket has one point at first; whenever all are in use, neighbours merge and buckets grow to twice as
    many points. So a curve of up to 1024 points is exact, and of a longer one no extreme is lost.
    """

    def __init__(self) -> None:
        self.width = 1
        self.count = 0
        """Points so far."""
        self.used_buckets = 0
        # By bucket: the lowest, highest and first not finite point; place -1 where there is none.
        self._points = np.empty((MOST_BUCKETS, 3, 3))
        self._sums = np.empty((MOST_BUCKETS, 3))
        """By bucket: sum of the finite values, how many, and the step in the middle."""
        self._rest = np.empty((0, 3))
        """Points that do not fill a bucket."""
        self._first: Point | None = None
        self._last: Point | None = None

    def add(self, steps: FloatArray, values: FloatArray) -> None:
        """Take in the next points."""
        if not len(steps):
            return
        places = np.arange(self.count, self.count + len(steps), dtype=np.float64)
        self.count += len(steps)
        self._first = self._first or (int(steps[0]), float(values[0]))
        self._last = int(steps[-1]), float(values[-1])
        points = np.column_stack((places, steps, values))
        self._rest = np.concatenate((self._rest, points)) if len(self._rest) else points
        while len(self._rest) >= self.width:
            taken = min(len(self._rest) // self.width, MOST_BUCKETS - self.used_buckets)
            cut = taken * self.width
            full = self._rest[:cut].reshape(taken, self.width, 3)
            end = self.used_buckets + taken
            self._points[self.used_buckets : end], self._sums[self.used_buckets : end] = _summarise(
                full
            )
            self.used_buckets, self._rest = end, self._rest[cut:].copy()
            if self.used_buckets == MOST_BUCKETS:
                self._halve()

    def points(self, most: int = MOST_POINTS) -> list[Point]:
        """At most so many points; all of them if they are as few."""
        points, _ = self._all()
        if self.width == 1:
            values = points[:, _LOW]
            values = np.where(values[:, :1] < 0, points[:, _BROKEN], values)
            return thin([(int(step), float(value)) for _, step, value in values], most)
        assert self._first is not None
        assert self._last is not None
        is_broken = bool((points[:, _BROKEN, _PLACE] >= 0).any())
        groups = min((most - 2) // (3 if is_broken else 2), len(points))
        edges = [round(i * len(points) / groups) for i in range(groups + 1)]
        retained: dict[int, Point] = {0: self._first, self.count - 1: self._last}
        for start, end in pairwise(edges):
            for position, step, value in _outstanding(points[start:end]):
                retained[int(position)] = int(step), float(value)
        return [point for _, point in sorted(retained.items())]

    def smoothed(self) -> list[Point]:
        """An exponential mean of the points, or of the means of their buckets."""
        _, sums = self._all()
        sums = sums[sums[:, 1] > 0]
        return smooth([(int(step), float(total / many)) for total, many, step in sums])

    def _all(self) -> tuple[FloatArray, FloatArray]:
        """Every bucket, with the last one that is not full."""
        points, sums = self._points[: self.used_buckets], self._sums[: self.used_buckets]
        if not len(self._rest):
            return points, sums
        rest, rest_sums = _summarise(self._rest[None])
        return np.concatenate((points, rest)), np.concatenate((sums, rest_sums))

    def _halve(self) -> None:
        half = MOST_BUCKETS // 2
        self._points[:half] = _merge(self._points.reshape(half, 2, 3, 3))
        even, odd = self._sums[0::2].copy(), self._sums[1::2]
        self._sums[:half, :2] = (even + odd)[:, :2]
        self._sums[:half, 2] = odd[:, 2]
        self.used_buckets, self.width = half, self.width * 2


def _summarise(points: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Outstanding points and sums of buckets, given as ``(bucket, point, place and step and value)``."""
    buckets, width = points.shape[:2]
    values = points[:, :, _VALUE]
    is_finite = np.isfinite(values)
    extremes = np.full((buckets, 3, 3), -1.0)
    rows = np.arange(buckets)
    for kind, key, mask in (
        (_LOW, np.where(is_finite, values, np.inf), is_finite),
        (_HIGH, np.where(is_finite, -values, np.inf), is_finite),
        (_BROKEN, is_finite.astype(np.float64), ~is_finite),
    ):
        has = mask.any(axis=1)
        extremes[has, kind] = points[rows[has], key[has].argmin(axis=1)]
    sums = np.column_stack(
        (
            np.where(is_finite, values, 0.0).sum(axis=1),
            is_finite.sum(axis=1),
            points[:, width // 2, _STEP],
        )
    )
    return extremes, sums


def _merge(pairs: FloatArray) -> FloatArray:
    """Outstanding points of pairs of buckets: ``(pair, which of two, kind, place and step and value)``."""
    one, other = pairs[:, 0], pairs[:, 1]
    one_value, other_value = one[:, :, _VALUE], other[:, :, _VALUE]
    takes_other = np.empty(one_value.shape, dtype=bool)
    takes_other[:, _LOW] = other_value[:, _LOW] < one_value[:, _LOW]
    takes_other[:, _HIGH] = other_value[:, _HIGH] > one_value[:, _HIGH]
    takes_other[:, _BROKEN] = False
    has_one, has_other = one[:, :, _PLACE] >= 0, other[:, :, _PLACE] >= 0
    return np.where(((takes_other & has_other) | ~has_one)[:, :, None], other, one)


def _outstanding(buckets: FloatArray) -> FloatArray:
    """Lowest, highest and first not finite point of some buckets together."""
    extremes: list[FloatArray] = []
    for kind, sign, column in ((_LOW, 1, _VALUE), (_HIGH, -1, _VALUE), (_BROKEN, 1, _PLACE)):
        points = buckets[:, kind]
        points = points[points[:, _PLACE] >= 0]
        if len(points):
            extremes.append(points[(sign * points[:, column]).argmin()])
    return np.array(extremes).reshape(-1, 3)


def thin(points: Sequence[Point], limit: int = MOST_POINTS) -> list[Point]:
    """At most ``limit`` points: of each bucket the lowest, the highest and any that is not finite.

    Averaging would hide exactly what people look for: a spike, or the step that broke.
    """
    if len(points) <= limit:
        return list(points)
    broken = any(not math.isfinite(value) for _, value in points)
    buckets = (limit - 2) // (3 if broken else 2)
    inner = points[1:-1]
    edges = [round(i * len(inner) / buckets) for i in range(buckets + 1)]
    retained = [points[0]]
    for start, end in pairwise(edges):
        retained += _extremes(inner[start:end])
    return [*retained, points[-1]]


def smooth(points: Sequence[Point]) -> list[Point]:
    """An exponential mean over about a sixtieth of the curve, looking back and ahead alike.

    A mean that only looks back would trail a falling loss. Values that are not finite are left
    out: one NaN would swallow all that follow.
    """
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    keep = 1 - 2 / (max(5.0, len(finite) / 60) + 1)
    values = [value for _, value in finite]
    behind, ahead = _trailing_mean(values, keep), _trailing_mean(values[::-1], keep)[::-1]
    return [
        (step, back / 2 + forth / 2)
        for (step, _), back, forth in zip(finite, behind, ahead, strict=True)
    ]


def _trailing_mean(values: Sequence[float], keep: float) -> list[float]:
    mean = weight = 0.0
    means: list[float] = []
    for value in values:
        weight = keep * weight + 1
        # The weights so far add up to ``weight``: no pull towards the zero it started from.
        mean += (value - mean) / weight
        means.append(mean)
    return means


def _extremes(bucket: Sequence[Point]) -> list[Point]:
    finite = [i for i, (_, value) in enumerate(bucket) if math.isfinite(value)]
    retained = {next((i for i, (_, value) in enumerate(bucket) if not math.isfinite(value)), None)}
    if finite:
        retained |= {
            min(finite, key=lambda i: bucket[i][1]),
            max(finite, key=lambda i: bucket[i][1]),
        }
    return [bucket[i] for i in sorted(i for i in retained if i is not None)]
