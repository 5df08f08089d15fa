"""One option per job under several capacities: prices, repair, and an exact core.

The multiple-choice knapsack with one capacity per group of devices. Its Lagrangian dual has one
price per group; smoothed by log-sum-exp it is minimised by a few Newton steps over an array of
jobs x options. At the prices found nearly every job already has its best option; the rest is
repaired greedily, and where the gap to the dual bound is still worth it a dynamic programme decides
among the few options that the bound has not ruled out. Deterministic: no clock and no chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.knapsack_core import OpenChoices, solve_core

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

IDLE = -1
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
    _fill(picks, used, table, options)
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


def _fill(picks: Ints, used: Floats, table: Floats, options: DeviceOptions) -> None:
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
