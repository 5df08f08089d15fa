"""Sizes for a pool with one device type: value by urgency, chosen exactly by dynamic programming.

A size is worth the work it does per second times the urgency of that work (``urgency.py``). Being
moved or resized costs a job the time of its restart, so it happens only where it pays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.knapsack import solve_knapsack, solve_with_teams
from yunlu.scheduler.policy.shapes import lay_out_pool
from yunlu.scheduler.policy.urgency import PolicyParams, compute_urgency
from yunlu.scheduler.policy.value_table import (
    ValueTable,
    add_deadlines,
    estimate_work,
    find_min_devices,
    forbid_unaffordable,
    measure_held,
    tabulate_allowed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.knapsack import TeamLimits
    from yunlu.scheduler.policy.remaining_work import WorkHistory
    from yunlu.scheduler.policy.shapes import ShapeTable
    from yunlu.scheduler.policy.values import Demand, PoolState

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

ONE_TYPE_PARAMS = PolicyParams(
    longest_weight=0.3, expected_jobs_per_job=0.25, late_expected_jobs=3.0, growth_cost=2.5
)
"""Tuned on one public workload (Pollux's sixth, as it is and with its jobs shuffled)."""
_LATE_S = 3600.0


@dataclass(frozen=True, slots=True)
class OneTypeSizing:
    """Chooses sizes where all devices are of one type."""

    params: PolicyParams = ONE_TYPE_PARAMS

    def lay_out(self, state: PoolState) -> ShapeTable:
        """All nodes as one group, whatever their sizes."""
        return lay_out_pool(state.nodes, state.jobs)

    def value(
        self,
        state: PoolState,
        shapes: ShapeTable,
        *,
        history: WorkHistory | None,
        weights: Floats,
        stopped_devices: Mapping[str, int],
    ) -> ValueTable:
        """Value of every size to every job."""
        params, jobs = _adapt(self.params, state), state.jobs
        goodputs = tabulate_allowed(jobs, shapes)
        held = shapes.find_held(jobs)
        held_goodputs, is_repacked = measure_held(jobs, shapes, held, goodputs)
        device_goodputs = _measure_device(goodputs, shapes)
        work_s = estimate_work(jobs, device_goodputs, history, is_typical_guessed=True)
        with np.errstate(divide="ignore"):
            left_s = (work_s * device_goodputs)[:, None] / goodputs
        # Without restarts: what a job holds makes it neither more nor less urgent than others.
        speedups = goodputs / device_goodputs[:, None]
        capacity = sum(group.devices for group in shapes.groups)
        urgency = compute_urgency(work_s, speedups, shapes.devices, capacity, params)
        restart_s = np.array([job.restart_s for job in jobs])
        has = held >= 0
        stopped = np.array([stopped_devices.get(job.id, 0) for job in jobs], dtype=np.int64)
        last_devices = np.where(has, shapes.devices[held], stopped)
        is_growth = (last_devices[:, None] > 0) & (shapes.devices > last_devices[:, None])
        change_s = np.where(is_growth, params.growth_cost, 1.0) * params.change_cost
        change_s = change_s * restart_s[:, None]
        dwell_s = _expect_dwell(jobs, state.now, params)
        change_s = change_s * np.maximum(1.0, left_s / dwell_s[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            total_s = left_s + np.where(np.isfinite(left_s), change_s, 0.0)
            stay_s = np.where(held_goodputs > 0, work_s * device_goodputs / held_goodputs, np.inf)
        at = np.flatnonzero(has), held[has]
        is_repacked[has] &= stay_s[has] > total_s[at]
        total_s[at] = np.where(is_repacked[has], total_s[at], stay_s[has])
        left_s[at] = np.where(is_repacked[has], left_s[at], stay_s[has])
        # A job that waits has to start once, whenever that is: its start is part of its work, and
        # no loss. A job that was stopped only just now had started: it is worth no more than while
        # it ran, or the decision to stop it would be undone.
        counted_s = work_s + np.where(last_devices > 0, 0.0, restart_s)
        values = (urgency * counted_s * weights)[:, None] / total_s
        values = np.where(np.isfinite(total_s), values, -np.inf)
        add_deadlines(values, jobs, total_s, now=state.now, unit=weights.max(initial=1.0))
        forbid_unaffordable(values, jobs, left_s, shapes)
        min_devices = find_min_devices(values, shapes)
        columns = np.searchsorted(shapes.devices, min_devices)
        return ValueTable(
            goodputs=goodputs,
            device_goodputs=device_goodputs,
            work_s=work_s,
            left_s=left_s,
            values=values,
            held=held,
            is_repacked=is_repacked,
            min_devices=min_devices,
            min_left_s=left_s[np.arange(len(jobs)), columns],
        )

    def choose(
        self,
        values: Floats,
        shapes: ShapeTable,
        capacities: Ints,
        *,
        must_run: Bools,
        limits: Sequence[TeamLimits],
        prices: Floats | None,
    ) -> tuple[Ints, Floats | None]:
        """The best sizes, exactly; ``limits`` is empty where there are no teams."""
        capacity, devices = int(capacities.sum()), shapes.devices
        if limits:
            return solve_with_teams(values, devices, capacity, must_run, limits).picks, prices
        return solve_knapsack(values, devices, capacity, must_run).picks, prices


def _adapt(params: PolicyParams, state: PoolState) -> PolicyParams:
    """Expect sizes to last longer the longer nobody new has come; then the end of all jobs counts."""
    quiet_s = max(state.now - max(job.submitted_at for job in state.jobs), 0.0)
    share = min(quiet_s / _LATE_S, 1.0)
    expected = params.expected_jobs + params.expected_jobs_per_job * len(state.jobs)
    turnover = params.turnover_power
    return replace(
        params,
        min_dwell_s=max(
            params.min_dwell_s, min(params.dwell_per_quiet_s * quiet_s, params.max_dwell_s)
        ),
        turnover_power=turnover + (params.late_turnover_power - turnover) * share,
        expected_jobs=expected + (params.late_expected_jobs - expected) * share,
    )


def _measure_device(goodputs: Floats, shapes: ShapeTable) -> Floats:
    """Useful samples per second of one device, at the smallest size of each job."""
    count = len(shapes)
    smallest = np.where(goodputs > 0, np.arange(count), count).min(axis=1)
    can_run = smallest < count
    smallest = np.where(can_run, smallest, 0)
    rates = goodputs[np.arange(len(goodputs)), smallest]
    return np.where(can_run, rates, 1.0) / shapes.devices[smallest]


def _expect_dwell(jobs: Sequence[Demand], now: float, params: PolicyParams) -> Floats:
    """How long each size will probably last: the minimum, or as long again as it has lasted."""
    held_s = [0.0 if job.held_since is None else now - job.held_since for job in jobs]
    return np.maximum(np.array(held_s), params.min_dwell_s)
