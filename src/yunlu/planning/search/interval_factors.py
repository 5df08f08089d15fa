"""Interval factors: 10 % and 90 % quantiles relative to the expected value. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from yunlu.planning.calibration import NOISE, Z_80
from yunlu.planning.predict.intervals import spread_factors
from yunlu.planning.predict.query_batch import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.planning.predict.memory import PeakMemory
    from yunlu.planning.predict.query_batch import Column, QueryBatch
    from yunlu.planning.search.layout_search import HardwareConfig


def time_factors(points: QueryBatch, configs: Sequence[HardwareConfig]) -> tuple[Column, Column]:
    """Of the step time of each point; of a measured point, only the difference between two runs."""
    slow, fast = spread_factors(points)
    noise = math.exp(Z_80 * NOISE["step_s"])
    is_timed = _is_same(
        points,
        configs,
        [config.measured is not None and config.measured.time for config in configs],
    )
    return np.where(is_timed, 1.0 / noise, 1.0 / fast), np.where(is_timed, noise, 1.0 / slow)


def memory_factors(
    points: QueryBatch, memory: PeakMemory, configs: Sequence[HardwareConfig]
) -> tuple[Column, Column]:
    """Of peak memory, likewise."""
    noise = math.exp(Z_80 * NOISE["memory_bytes"])
    is_held = _is_same(
        points,
        configs,
        [config.measured is not None and config.measured.memory for config in configs],
    )
    return (
        np.where(is_held, 1.0 / noise, memory.low_factor),
        np.where(is_held, noise, memory.high_factor),
    )


def _is_same(points: QueryBatch, configs: Sequence[HardwareConfig], is_known: list[bool]) -> Column:
    """Whether a point was measured: on one device, in the same precision and batches."""
    is_same = (points.devices == 1) & np.array(is_known, dtype=bool)
    runs = [config.measured for config in configs]
    code = np.array([-1 if run is None else PRECISIONS.index(run.precision) for run in runs])
    is_same &= points.precision == code
    for name in ("batch", "micro_batch", "recompute"):
        is_same &= getattr(points, name) == np.array([getattr(run, name, -1.0) for run in runs])
    return is_same
