"""Dimensions as Optuna's distributions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from yunlu.core.errors import missing_part

try:
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

    from yunlu.tuning.methods.optuna_samplers import distribution_of
except ImportError as error:
    raise missing_part("optuna", "tune", "A study") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.values import Dimension, Params, ParamValue


def make_distributions(
    params: Params, dimensions: Sequence[Dimension]
) -> tuple[dict[str, BaseDistribution], bool]:
    """Optuna's distribution of each parameter, and whether its values come back unchanged."""
    known = {dimension.name: dimension for dimension in dimensions}
    result: dict[str, BaseDistribution] = {}
    is_exact = True
    for name, value in params.items():
        distribution = _distribution(known[name], value) if name in known else None
        if distribution is None:
            is_exact = False
            continue
        result[name] = distribution
        back = distribution.to_external_repr(distribution.to_internal_repr(value))
        is_exact = is_exact and back == value and type(back) is type(value)
    return result, is_exact


def _distribution(dimension: Dimension, value: ParamValue) -> BaseDistribution | None:
    """None for a value that Optuna's dimension of this kind cannot hold."""
    if dimension.choices:
        return distribution_of(dimension) if value in dimension.choices else None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    if (dimension.is_int and value != int(value)) or (dimension.log and value <= 0):
        return None
    usual = distribution_of(dimension)
    if usual._contains(value):  # pyright: ignore[reportPrivateUsage] - as its own trials ask
        return usual
    # A value beyond the bounds or between the steps (a perturbed copy) widens them.
    low, high = min(dimension.low, value), max(dimension.high, value)
    if dimension.is_int:
        return IntDistribution(int(low), int(high), dimension.log)
    return FloatDistribution(low, high, dimension.log)
