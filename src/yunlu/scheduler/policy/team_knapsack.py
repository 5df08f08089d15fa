"""The knapsack under several capacities with limits for teams.

A team above its limit pays a toll per device, a team below its quota receives one. Tolls are found by
bisection; what a team still holds beyond its limit is taken from the jobs that lose least.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.priced_knapsack import IDLE, DeviceOptions, PricedSolution, solve_priced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.knapsack import TeamLimits

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_TRIES = 24


def solve_priced_with_teams(
    worth: Floats,
    options: DeviceOptions,
    *,
    groups: Sequence[TeamLimits],
    must_run: NDArray[np.bool_],
    prices: Floats | None = None,
    gap: float = 1e-4,
) -> PricedSolution:
    """As :func:`~...mixed_choice.choose`, with limits for groups of jobs.

    No group gets more than its most; it gets its least as far as its jobs can use it.
    """
    choice = solve_priced(worth, options, must_run=must_run, prices=prices, gap=gap)
    finite = np.where(np.isfinite(worth), np.abs(worth), 0.0)
    dearest = float((finite / options.sizes).max(initial=0.0))
    if dearest <= 0:
        return choice
    low, high = np.full(len(groups), -dearest), np.full(len(groups), dearest)
    tolls = np.zeros(len(groups))
    best = choice
    for _ in range(_TRIES):
        over, under = _judge(choice, worth, options, groups)
        if not (over.any() or under.any()):
            return choice
        if not over.any():
            best = choice
        low[over], high[under] = tolls[over], tolls[under]
        moved = over | under
        tolls[moved] = (low[moved] + high[moved]) / 2
        toll = np.zeros(len(worth))
        for group, item in zip(groups, tolls, strict=True):
            toll[group.rows] = item
        tolled = worth - toll[:, None] * options.sizes
        choice = solve_priced(tolled, options, must_run=must_run, prices=prices, gap=gap)
    return _cut(best, worth, options, groups)


def _devices(picks: Ints, options: DeviceOptions) -> Floats:
    return np.where(picks == IDLE, 0.0, options.sizes[picks])


def _judge(
    choice: PricedSolution, worth: Floats, options: DeviceOptions, groups: Sequence[TeamLimits]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which groups hold too much, and which could use more of what they may claim."""
    devices = _devices(choice.picks, options)
    over = np.zeros(len(groups), dtype=bool)
    under = np.zeros(len(groups), dtype=bool)
    for at, group in enumerate(groups):
        used = devices[group.rows].sum()
        over[at] = used > group.max_devices
        if used < min(group.min_devices, group.max_devices):
            left = min(group.min_devices, group.max_devices) - used
            more = options.sizes[None, :] - devices[group.rows][:, None]
            wants = np.isfinite(worth[group.rows]) & (more > 0) & (more <= left)
            under[at] = bool(wants.any())
    return over, under


def _cut(
    choice: PricedSolution, worth: Floats, options: DeviceOptions, groups: Sequence[TeamLimits]
) -> PricedSolution:
    """Take what a group holds beyond its limit from those of its jobs that lose least."""
    picks = choice.picks.copy()
    table = np.column_stack([worth, np.zeros(len(worth))])
    sizes = np.append(options.sizes, 0.0)
    for group in groups:
        rows = group.rows
        while sizes[picks[rows]].sum() > group.max_devices:
            now = sizes[picks[rows]]
            same = options.kinds[picks[rows]][:, None] == np.append(options.kinds, IDLE)
            same[:, IDLE] = True
            freed = now[:, None] - sizes
            loss = table[rows, picks[rows]][:, None] - table[rows]
            per_device = np.where(same & (freed > 0), loss / np.maximum(freed, 1), np.inf)
            row, column = np.unravel_index(int(per_device.argmin()), per_device.shape)
            picks[rows[row]] = column if column < len(options.sizes) else IDLE
    value = float(table[np.arange(len(picks)), picks].sum())
    return replace(choice, picks=picks, value=value)
