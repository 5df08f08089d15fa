"""Between what factors of the expected figures the true ones will lie, four times in five. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from yunlu.planning.calibration import NOISE, Z_80
from yunlu.planning.foretell.intervals import spread_factors

if TYPE_CHECKING:
    from yunlu.planning.foretell.memory import PeakMemory
    from yunlu.planning.foretell.points import Column, Points


def time_factors(points: Points, is_measured: Column) -> tuple[Column, Column]:
    """Of a step's time; of hardware where the same job was measured, only two runs' difference."""
    slow, fast = spread_factors(points)
    noise = math.exp(Z_80 * NOISE["step_s"])
    return np.where(is_measured, 1.0 / noise, 1.0 / fast), np.where(is_measured, noise, 1.0 / slow)


def memory_factors(memory: PeakMemory, is_measured: Column) -> tuple[Column, Column]:
    """Of peak memory; likewise."""
    noise = math.exp(Z_80 * NOISE["memory_bytes"])
    return (
        np.where(is_measured, 1.0 / noise, memory.low_factor),
        np.where(is_measured, noise, memory.high_factor),
    )
