"""Held-out shares and limits: pure functions of counts and a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from yunlu.core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Each use of the seed draws from a stream of its own.
_SPLIT_STREAM, _LIMIT_STREAM = 1, 2


def split_indices(count: int, shares: Mapping[str, float], *, seed: int) -> dict[str, np.ndarray]:
    """Indices of ``train`` and of each held-out part; every part has at least one sample.

    A part's samples depend on the count, its share and the seed alone, and keep their order.
    """
    sizes = {part: max(1, round(share * count)) for part, share in shares.items() if share > 0}
    if sum(sizes.values()) >= count:
        requested = " and ".join(f"{size} for {part}" for part, size in sizes.items())
        raise DataError(
            f"{count} sample{'s' * (count != 1)} cannot be split: {requested or 'nothing held out'} "
            f"would leave none to train on",
            hint="give more data, name data.validation and data.test, or set their split to 0",
        )
    order = np.random.default_rng((seed, _SPLIT_STREAM)).permutation(count)
    parts: dict[str, np.ndarray] = {}
    taken = 0
    for part, size in sizes.items():
        parts[part] = np.sort(order[taken : taken + size])
        taken += size
    parts["train"] = np.sort(order[taken:])
    return parts


def limit_indices(count: int, limit: int, *, seed: int) -> np.ndarray:
    """At most ``limit`` random indices: data is often sorted by label."""
    order = np.random.default_rng((seed, _LIMIT_STREAM)).permutation(count)
    return np.sort(order[:limit])
