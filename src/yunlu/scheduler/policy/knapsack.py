"""One size per job within capacities: the multiple-choice knapsack, solved exactly or by prices.

Exact solution of the core of a knapsack: dynamic programming over free devices of each group.
Few options survive the bound of the dual, and most jobs keep what the prices gave them. What
remains is decided over a grid of devices used of each kind: all of them where the pool is small,
else a window around the choice found so far (the balanced programming of Pisinger, "Budgeting with
bounded multiple-choice constraints", 1999).

Small pools are solved by dynamic programming over devices. Large ones are first priced (one
Lagrangian price per device): the resulting bound rules out almost every other choice of almost
every job, and the same programme is run over the few that are left (Pisinger's core idea, Eur. J.
Oper. Res. 83, 1995). The solution has a bound on its gap to the optimum; 0 is exact.

One option per job under several capacities: prices, repair, and an exact core.
The multiple-choice knapsack with one capacity per group of devices. Its Lagrangian dual has one
price per group; smoothed by log-sum-exp it is minimised by a few Newton steps over an array of
jobs x options. At the prices found nearly every job already has its best option; the rest is
repaired greedily, and where the gap to the dual bound is still worth it a dynamic programme decides
among the few options that the bound has not ruled out. Deterministic: no clock and no chance.

The knapsack under several capacities with limits for teams.
A team above its limit pays a toll per device, a team below its quota receives one. Tolls are found by
bisection; what a team still holds beyond its limit is taken from the jobs that lose least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_MOST_CELLS = 20_000
_MOST_WORK = 4_000_000
"""Limits on the cells of the grid, and on cells times options; a larger grid is narrowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChoices:
    """Jobs that are still undecided, each with the options left to it (a row per option)."""

    jobs: Ints
    """Whose option a row is; ascending."""
    worth: Floats
    load: Ints
    """Devices of each group it takes, rows x groups."""
    room: Ints
    """Devices of each group that these jobs can have."""
    reference: Ints
    """The row of each job in the best choice so far, which fits the room."""


def solve_core(rest: OpenChoices) -> Ints:
    """The row of each job in the best choice that fits the grid; at least as good as so far."""
    reach = _reach(rest)
    starts = np.flatnonzero(np.diff(rest.jobs, prepend=-1))
    ends = np.append(starts[1:], len(rest.jobs))
    base = rest.load[rest.reference]
    is_whole = reach >= rest.room
    # Counted from nothing where the whole room is in the grid, else from the reference.
    origin = np.where(is_whole, 0, base)
    ceiling = np.where(is_whole, rest.room, reach)
    floor = np.where(is_whole, 0, -reach)
    table = np.full(tuple(ceiling - floor + 1), -np.inf)
    table[tuple(-floor)] = 0.0
    picked: list[NDArray[np.int16]] = []
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        table, rows = _add_job(table, rest.worth[start:end], rest.load[start:end] - origin[at])
        picked.append(rows)
    spare = np.where(is_whole, rest.room, rest.room - base.sum(axis=0))
    allowed = tuple(slice(0, int(last) + 1) for last in np.minimum(spare, ceiling) - floor)
    inside = table[allowed]
    cell = np.array(np.unravel_index(int(inside.argmax()), inside.shape))
    rows = np.empty(len(starts), dtype=np.int64)
    for at in range(len(starts) - 1, -1, -1):
        rows[at] = starts[at] + int(picked[at][tuple(cell)])
        cell = cell - (rest.load[rows[at]] - origin[at])
    return rows


def _reach(rest: OpenChoices) -> Ints:
    """How far from the reference, or from nothing, the grid goes in each group."""
    reach = rest.room.copy()
    most = min(_MOST_CELLS, _MOST_WORK // max(len(rest.jobs), 1))
    while np.prod(np.where(reach >= rest.room, rest.room + 1, 2 * reach + 1)) > most:
        widest = int(np.argmax(np.where(reach >= rest.room, rest.room, 2 * reach)))
        reach[widest] = min(int(reach[widest] * 3 // 4), rest.room[widest] // 2)
    return reach


def _add_job(table: Floats, worth: Floats, shifts: Ints) -> tuple[Floats, NDArray[np.int16]]:
    """The grid after one more job, and which of its options leads to each cell."""
    after = np.full(table.shape, -np.inf)
    rows = np.zeros(table.shape, dtype=np.int16)
    for option, (value, shift) in enumerate(zip(worth, shifts, strict=True)):
        if (np.abs(shift) >= table.shape).any():
            continue
        came = tuple(
            slice(max(-s, 0), n - max(s, 0)) for s, n in zip(shift, table.shape, strict=True)
        )
        goes = tuple(
            slice(max(s, 0), n - max(-s, 0)) for s, n in zip(shift, table.shape, strict=True)
        )
        candidate = table[came] + value
        better = candidate > after[goes]
        after[goes] = np.where(better, candidate, after[goes])
        rows[goes] = np.where(better, option, rows[goes])
    return after, rows


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
    """As ``solve_knapsack``, with limits for groups; a group's least is cut to what it can use."""
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
    picks = _fill_ties(
        worth.argmax(axis=1), (table - below * widths).argmax(axis=1), widths, capacity
    )
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


def _fill_ties(picks: Ints, larger: Ints, widths: Ints, capacity: int) -> Ints:
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


_HOT, _COLD = 0.3, 0.002
"""Temperatures of the smoothed dual: the first in mean worths of a job, the last in usual ones."""
_COOLING = 6.0
"""By at most so much at a time."""
_STEPS = 12
_MUST = 10.0
"""What not running costs a job that must, in units of what all jobs are worth together."""
_MOST_LEFT = 2000
"""More undecided options than this are left to the repair: its gap is then tiny beside the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSolution:
    """Option of each job, its total value, and an upper bound on it."""

    picks: Ints
    """Option of each job; ``IDLE`` is none."""
    prices: Floats
    """Price of a device of each group."""
    value: float
    bound: float
    """No solution has a higher value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Options of all jobs: a number of devices of one group."""

    sizes: Floats
    kinds: Ints
    capacities: Floats

    @property
    def load(self) -> Floats:
        """Devices of each group that each option takes, options x groups."""
        load = np.zeros((len(self.sizes), len(self.capacities)))
        load[np.arange(len(self.sizes)), self.kinds] = self.sizes
        return load


def solve_priced(
    worth: Floats,
    options: DeviceOptions,
    *,
    must_run: NDArray[np.bool_] | None = None,
    prices: Floats | None = None,
    gap: float = 1e-4,
) -> PricedSolution:
    """The most valuable choice of one option or none per job.

    Args:
        worth: Of each option to each job, jobs x options, over having none; ``-inf`` forbids.
        options: What can be chosen.
        must_run: Jobs that get an option before others get any, as far as all of them fit.
        prices: Of a similar problem, to start from.
        gap: How much of a usual job's worth an answer may fall short of the best, for each job.
    """
    kinds = len(options.capacities)
    if worth.size == 0:
        nobody = np.full(len(worth), IDLE)
        return PricedSolution(picks=nobody, prices=np.zeros(kinds), value=0.0, bound=0.0)
    table = np.column_stack([worth, np.zeros(len(worth))])
    if must_run is not None:
        top = np.where(np.isfinite(worth), np.abs(worth), 0.0).max(axis=1)
        table[:, IDLE] = np.where(must_run, -_MUST * max(float(top.sum()), 1e-9), 0.0)
    prices = _find_prices(table, options, prices)
    net = table - np.append(prices @ options.load.T, 0.0)
    best = net.max(axis=1)
    bound = float(best.sum() + prices @ options.capacities)
    picks = _repair(table, net, options)
    value = _value(table, picks)
    if bound - value > gap * len(worth) * _usual(worth):
        picks = _finish(table, net, best, picks, options, room=bound - value)
        value = _value(table, picks)
    return PricedSolution(picks=picks, prices=prices, value=value, bound=bound)


def _value(table: Floats, picks: Ints) -> float:
    """Total value of a solution."""
    return float(table[np.arange(len(picks)), picks].sum())


def _usual(worth: Floats) -> float:
    """Best value of the median job, so that a few of a thousand times the value do not count."""
    top = worth.max(axis=1)
    top = top[top > 0]
    return float(np.median(top)) if len(top) else 1e-12


def _find_prices(table: Floats, options: DeviceOptions, start: Floats | None) -> Floats:
    """Prices that nearly minimise the dual: projected Newton on its smoothed form, cooling down."""
    unit = float(np.maximum(table.max(axis=1), 0.0).mean())
    kinds = len(options.capacities)
    if unit <= 0:
        return np.zeros(kinds)
    hot, cold = _HOT * unit, _COLD * _usual(table[:, :IDLE])
    stages = max(math.ceil(math.log(hot / cold, _COOLING)), 1)
    prices = np.full(kinds, unit * len(table) / max(options.capacities.sum(), 1.0))
    if start is not None and len(start) == kinds:
        prices = np.maximum(start, 0.0)
    load = np.vstack([options.load, np.zeros(kinds)])
    for temperature in np.geomspace(hot, cold, stages + 1).tolist():
        dual = _SmoothDual(table, load, options.capacities, temperature)
        prices = _descend(dual, prices)
    return prices


@dataclass(frozen=True, slots=True)
class _SmoothDual:
    """The dual with max replaced by temperature x log-sum-exp."""

    table: Floats
    load: Floats
    capacities: Floats
    temperature: float

    def value(self, prices: Floats) -> float:
        """How high it is."""
        net = (self.table - prices @ self.load.T) / self.temperature
        top = net.max(axis=1)
        spread = np.exp(net - top[:, None]).sum(axis=1)
        return self._height(top, spread, prices)

    def slope(self, prices: Floats) -> tuple[float, Floats, Floats]:
        """Its height, gradient and Hessian."""
        net = (self.table - prices @ self.load.T) / self.temperature
        top = net.max(axis=1)
        shares = np.exp(net - top[:, None])
        spread = shares.sum(axis=1)
        shares /= spread[:, None]
        wanted = shares @ self.load
        squares = shares.sum(axis=0) @ self.load**2
        curvature = (np.diag(squares) - wanted.T @ wanted) / self.temperature
        gradient = self.capacities - wanted.sum(axis=0)
        return self._height(top, spread, prices), gradient, curvature

    def _height(self, top: Floats, spread: Floats, prices: Floats) -> float:
        total = self.temperature * float((top + np.log(spread)).sum())
        return total + float(prices @ self.capacities)


def _descend(dual: _SmoothDual, prices: Floats) -> Floats:
    """A few guarded Newton steps, never below zero."""
    tolerance = 1e-3 * np.maximum(dual.capacities, 1.0)
    for _ in range(_STEPS):
        height, gradient, curvature = dual.slope(prices)
        free = (prices > 0) | (gradient < 0)
        if not free.any() or bool((np.abs(gradient) <= tolerance)[free].all()):
            break
        inner = curvature[np.ix_(free, free)]
        ridge = 1e-9 * max(float(np.trace(inner)), 1e-12)
        step = np.zeros_like(prices)
        step[free] = np.linalg.solve(inner + ridge * np.eye(int(free.sum())), gradient[free])
        reach = 1.0
        while reach > 1e-3:
            tried = np.maximum(prices - reach * step, 0.0)
            if dual.value(tried) <= height - 1e-4 * float(gradient @ (prices - tried)):
                break
            reach *= 0.4
        else:
            break
        prices = tried
    return prices


def _repair(table: Floats, net: Floats, options: DeviceOptions) -> Ints:
    """A choice within the capacities near the one that the prices suggest."""
    picks = net.argmax(axis=1)
    picks[picks == len(options.sizes)] = IDLE
    used = np.zeros(len(options.capacities))
    chosen = picks[picks != IDLE]
    np.add.at(used, options.kinds[chosen], options.sizes[chosen])
    for kind in np.flatnonzero(used > options.capacities):
        _shed(int(kind), picks, used, net, options)
    _fill_free(picks, used, table, options)
    return picks


def _shed(kind: int, picks: Ints, used: Floats, net: Floats, options: DeviceOptions) -> None:
    """Take devices of one group from the jobs that lose least per device, until it fits."""
    same = np.append(np.flatnonzero(options.kinds == kind), IDLE)
    sizes = np.append(options.sizes, 0.0)[same]
    while used[kind] > options.capacities[kind]:
        holders = np.flatnonzero((picks != IDLE) & (options.kinds[picks] == kind))
        held = options.sizes[picks[holders]]
        freed = held[:, None] - sizes
        loss = net[holders, picks[holders]][:, None] - net[np.ix_(holders, same)]
        per_device = np.where(freed > 0, loss / np.maximum(freed, 1), np.inf)
        cheapest = per_device.argmin(axis=1)
        order = np.argsort(per_device[np.arange(len(holders)), cheapest], kind="stable")
        for at in order:
            if used[kind] <= options.capacities[kind]:
                break
            used[kind] -= freed[at, cheapest[at]]
            picks[holders[at]] = same[cheapest[at]]


def _fill_free(picks: Ints, used: Floats, table: Floats, options: DeviceOptions) -> None:
    """Give free devices to the jobs that gain most per device."""
    sizes = np.append(options.sizes, 0.0)
    jobs = np.arange(len(table))
    for _ in range(8):
        left = options.capacities - used
        if not (left > 0).any():
            return
        held = np.where(picks == IDLE, IDLE, options.kinds[picks])
        again = np.where(held[:, None] == options.kinds, sizes[picks][:, None], 0.0)
        extra = options.sizes - again
        gain = np.where(
            extra <= left[options.kinds], table[:, :-1] - table[jobs, picks][:, None], 0
        )
        rate = np.where(gain > 1e-12, gain / np.maximum(extra, 0.5), -np.inf)
        best = rate.argmax(axis=1)
        top = rate[jobs, best]
        order = np.argsort(-top, kind="stable")[: int(np.isfinite(top).sum())]
        if not len(order):
            return
        for job in order:
            option = int(best[job])
            kind = int(options.kinds[option])
            if extra[job, option] > options.capacities[kind] - used[kind]:
                continue
            if held[job] != IDLE:
                used[held[job]] -= sizes[picks[job]]
            used[kind] += options.sizes[option]
            picks[job] = option


def _finish(
    table: Floats, net: Floats, best: Floats, picks: Ints, options: DeviceOptions, *, room: float
) -> Ints:
    """The best choice among options whose reduced cost leaves them in the race."""
    idle = len(options.sizes)
    is_left = best[:, None] - net <= room * (1 + 1e-9)
    # The choice so far stays in the race whatever rounding says.
    is_left[np.arange(len(picks)), picks] = True
    undecided = np.flatnonzero(is_left.sum(axis=1) > 1)
    if not len(undecided) or is_left[undecided].sum() > _MOST_LEFT:
        return picks
    load = np.vstack([options.load, np.zeros(len(options.capacities))]).astype(np.int64)
    decided = np.setdiff1d(np.arange(len(picks)), undecided)
    jobs, rows = np.nonzero(is_left[undecided])
    left = options.capacities.astype(np.int64) - load[picks[decided]].sum(axis=0)
    most = np.zeros((len(undecided), load.shape[1]), dtype=np.int64)
    np.maximum.at(most, jobs, load[rows])
    reference = np.where(picks[undecided] == IDLE, idle, picks[undecided])
    rest = OpenChoices(
        jobs=jobs,
        worth=table[undecided[jobs], rows],
        load=load[rows],
        room=np.minimum(left, most.sum(axis=0)),
        reference=np.flatnonzero(rows == reference[jobs]),
    )
    chosen = rows[solve_core(rest)]
    finished = picks.copy()
    finished[undecided] = np.where(chosen == idle, IDLE, chosen)
    return finished


_TRIES = 24


def solve_priced_with_teams(
    worth: Floats,
    options: DeviceOptions,
    *,
    groups: Sequence[TeamLimits],
    must_run: NDArray[np.bool_],
    prices: Floats | None = None,
) -> PricedSolution:
    """As ``solve_priced``, with limits for groups of jobs.

    No group gets more than its most; it gets its least as far as its jobs can use it.
    """
    choice = solve_priced(worth, options, must_run=must_run, prices=prices)
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
        choice = solve_priced(tolled, options, must_run=must_run, prices=prices)
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
