"""One size per job within a capacity: the multiple-choice knapsack, solved exactly.

Small pools are solved by dynamic programming over devices. Large ones are first priced (one
Lagrangian price per device): the resulting bound rules out almost every other choice of almost
every job, and the same programme is run over the few that are left (Pisinger's core idea, Eur. J.
Oper. Res. 83, 1995). The solution has a bound on its gap to the optimum; 0 is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

IDLE = -1
_WHOLE = 4_000_000
"""Up to this many sums the whole problem is solved at once."""
_FIRST_CORE = 48
_LAST_CORE = 192
_HALVINGS = 45
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class KnapsackSolution:
    """Size of each job."""

    picks: Ints
    """Column of each job; ``IDLE`` is none."""
    price: float
    """Marginal value of a device; 0 where no job gains from one."""
    gap: float
    """Upper bound on the distance to the optimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamLimits:
    """Jobs of one team, and how many devices they hold together."""

    rows: Ints
    min_devices: int
    max_devices: int


def solve_knapsack(
    values: Floats, sizes: Ints, capacity: int, must_run: NDArray[np.bool_]
) -> KnapsackSolution:
    """The sizes with the largest sum of values; ``-inf`` is no choice, nothing is worth 0.

    A job that must run gets a size as long as the least sizes of all such jobs fit.
    """
    table, widths = _with_idle(values, sizes, must_run)
    work = table.shape[0] * table.shape[1] * (capacity + 1)
    if work <= _WHOLE:
        best, back = _programme(table, widths, capacity)
        picks = _trace(back, widths, int(np.argmax(best)))
        price = _marginal(best, capacity)
        return KnapsackSolution(picks=picks - 1, price=price, gap=0.0)
    return _choose_core(table, widths, capacity)


def solve_with_teams(
    values: Floats,
    sizes: Ints,
    capacity: int,
    must_run: NDArray[np.bool_],
    groups: Sequence[TeamLimits],
) -> KnapsackSolution:
    """As :func:`choose`, with limits for groups; a group's least is cut to what it can use."""
    table, widths = _with_idle(values, sizes, must_run)
    parts = [_programme(table[group.rows], widths, capacity) for group in groups]
    limits: list[tuple[int, int]] = []
    for group, (best, _) in zip(groups, parts, strict=True):
        usable = int(np.argmax(best >= best.max() - _ROUNDING))
        runs = int(np.argmax(np.isfinite(best)))  # those that must run need at least this
        limits.append((min(group.min_devices, usable), max(group.max_devices, runs)))
    total = np.zeros(capacity + 1)
    shares: list[Ints] = []
    for (best, _), (min_devices, max_devices) in zip(parts, limits, strict=True):
        total, share = _join(total, best, min(min_devices, max_devices), max_devices, capacity)
        shares.append(share)
    used = int(np.argmax(total))
    price = _marginal(total, capacity)
    picks = np.zeros(len(values), dtype=np.int64)
    for group, (_, back), share in reversed(list(zip(groups, parts, shares, strict=True))):
        own = int(share[used])
        picks[group.rows] = _trace(back, widths, own)
        used -= own
    return KnapsackSolution(picks=picks - 1, price=price, gap=0.0)


def _with_idle(values: Floats, sizes: Ints, must_run: NDArray[np.bool_]) -> tuple[Floats, Ints]:
    """The table with a first column for getting nothing."""
    nothing = np.where(must_run & np.isfinite(values).any(axis=1), -np.inf, 0.0)
    return np.column_stack([nothing, values]), np.concatenate([[0], sizes]).astype(np.int64)


def _programme(table: Floats, widths: Ints, capacity: int) -> tuple[Floats, Ints]:
    """Best value for up to each number of devices, and the column each job takes there."""
    pad = int(widths.max())
    index = np.arange(capacity + 1)[None, :] + (pad - widths)[:, None]
    padded = np.full(capacity + 1 + pad, -np.inf)
    best = np.zeros(capacity + 1)
    back = np.empty((len(table), capacity + 1), dtype=np.int64)
    columns = np.arange(capacity + 1)
    for row, worth in enumerate(table):
        live = np.flatnonzero(np.isfinite(worth))
        padded[pad:] = best
        sums = padded[index[live]] + worth[live, None]
        pick = sums.argmax(axis=0)
        best = sums[pick, columns]
        back[row] = live[pick]
    return best, back


def _trace(back: Ints, widths: Ints, used: int) -> Ints:
    picks = np.zeros(len(back), dtype=np.int64)
    for row in range(len(back) - 1, -1, -1):
        picks[row] = back[row, used]
        used -= int(widths[picks[row]])
    return picks


def _marginal(best: Floats, capacity: int) -> float:
    """Value of the last devices, averaged over a few."""
    reach = min(8, capacity)
    if reach == 0 or not np.isfinite(best[capacity - reach]):
        return 0.0
    return float(max(best[capacity] - best[capacity - reach], 0.0) / reach)


def _join(
    total: Floats, best: Floats, min_devices: int, max_devices: int, capacity: int
) -> tuple[Floats, Ints]:
    """Add one team with a share between its limits; later teams get what is left."""
    joined = np.full(capacity + 1, -np.inf)
    share = np.zeros(capacity + 1, dtype=np.int64)
    for own in range(min_devices, min(max_devices, capacity) + 1):
        sums = np.full(capacity + 1, -np.inf)
        sums[own:] = total[: capacity + 1 - own] + best[own]
        better = sums > joined + _ROUNDING
        joined = np.where(better, sums, joined)
        share[better] = own
    if not np.isfinite(joined).any():  # its least does not fit: whatever does
        return _join(total, best, 0, max_devices, capacity) if min_devices else (total, share)
    return joined, share


def _choose_core(table: Floats, widths: Ints, capacity: int) -> KnapsackSolution:
    price, below = _find_price(table, widths, capacity)
    worth = table - price * widths
    rows = np.arange(len(table))
    bound = float(worth.max(axis=1).sum() + price * capacity)
    picks = _fill(worth.argmax(axis=1), (table - below * widths).argmax(axis=1), widths, capacity)
    top = worth[rows, picks]
    worth[rows, picks] = -np.inf
    behind = top - worth.max(axis=1)  # what the next best choice of each job costs
    order = np.argsort(behind, kind="stable")
    core_size = _FIRST_CORE
    while True:
        core = order[:core_size]
        rest = order[core_size:]
        left = capacity - int(widths[picks[rest]].sum())
        gap = np.inf
        if left >= 0:
            best, back = _programme(table[core], widths, left)
            if np.isfinite(best).any():
                chosen = _trace(back, widths, int(np.argmax(best)))
                value = float(best.max() + table[rest, picks[rest]].sum())
                gap = max(bound - value, 0.0)
        if gap < np.inf and (core_size >= _LAST_CORE or not len(rest) or behind[rest[0]] >= gap):
            final = picks.copy()
            final[core] = chosen  # pyright: ignore[reportPossiblyUnboundVariable]
            is_exact = not len(rest) or behind[rest[0]] >= gap
            return KnapsackSolution(picks=final - 1, price=price, gap=0.0 if is_exact else gap)
        if not len(rest):
            msg = "jobs that must run need more devices than there are"
            raise ValueError(msg)
        core_size *= 2


def _find_price(table: Floats, widths: Ints, capacity: int) -> tuple[float, float]:
    """The least price at which what the jobs want fits, and one at which it just does not."""
    with np.errstate(invalid="ignore"):
        low, high = 0.0, float(np.nanmax(table[:, 1:] / widths[1:]))
    if _wanted(table, widths, low) <= capacity:
        return 0.0, 0.0
    while _wanted(table, widths, high) > capacity and high < 1e12:  # those that must run
        high = 4 * high + 1e-9
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _wanted(table, widths, middle) > capacity:
            low = middle
        else:
            high = middle
    return high, low


def _fill(picks: Ints, larger: Ints, widths: Ints, capacity: int) -> Ints:
    """Of the jobs that are indifferent between two sizes, as many get the larger as fit."""
    picks = picks.copy()
    left = capacity - int(widths[picks].sum())
    more = widths[larger] - widths[picks]
    for row in np.flatnonzero(more > 0):
        if more[row] <= left:
            picks[row] = larger[row]
            left -= int(more[row])
    return picks


def _wanted(table: Floats, widths: Ints, price: float) -> int:
    return int(widths[(table - price * widths).argmax(axis=1)].sum())
