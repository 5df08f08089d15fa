"""Curves over the global step: thinning and smoothing of their points."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Point = tuple[int, float]
"""Step and value."""


def thin(points: Sequence[Point], limit: int = 1000) -> list[Point]:
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
