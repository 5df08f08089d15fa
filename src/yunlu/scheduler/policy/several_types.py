"""Sizes for a pool with several device types: value by relative speed, chosen by prices.

A job with ``T`` seconds left in a shape counts ``T ** -power`` there: between fairness (0: every job
the same share of its own best) and shortest first (1). A change costs the time of its restart. Speeds
on different types are compared in the job's own useful samples, so that nothing else is needed to
mix types.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.priced_knapsack import DeviceOptions, solve_priced
from yunlu.scheduler.policy.shapes import group_nodes, lay_out_groups
from yunlu.scheduler.policy.team_knapsack import solve_priced_with_teams
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralTypesParams:
    """How a pool with several device types weighs jobs against each other."""

    length_power: float = 0.15
    """How much less a long job counts: 0 not at all, 1 as in shortest first."""
    speed_power: float = 0.35
    """How much the speed of a job counts once it runs: near 0 all jobs get alike, 1 the fastest all."""
    max_length_s: float = 7200.0
    """Device-seconds beyond which a job does not count as longer, so that no job starves."""
    min_dwell_s: float = 250.0
    """How long a shape is expected to last at least: the time in which a restart must pay for itself."""
    dwell_per_quiet_s: float = 0.5
    """How much longer for every second since the last job came."""
    change_cost: float = 1.0
    """Cost of a change, in restarts."""


SEVERAL_TYPES_PARAMS = SeveralTypesParams()
"""Tuned on Sia's workloads philly 6 and saturn 1; the others were held out."""


@dataclass(frozen=True, slots=True)
class SeveralTypesSizing:
    """Chooses type and size where devices are of several types."""

    params: SeveralTypesParams = SEVERAL_TYPES_PARAMS

    def lay_out(self, state: PoolState) -> ShapeTable:
        """One group for each device type and number of devices per node."""
        return lay_out_groups(group_nodes(state.nodes), _find_named(state.jobs))

    def value(
        self,
        state: PoolState,
        shapes: ShapeTable,
        *,
        history: WorkHistory | None,
        weights: Floats,
        stopped_devices: Mapping[str, int],
    ) -> ValueTable:
        """Value of every shape to every job."""
        del stopped_devices  # here a start is never free: a job that was stopped is worth less
        params, jobs = _adapt(self.params, state), state.jobs
        goodputs = tabulate_allowed(jobs, shapes)
        held = shapes.find_held(jobs)
        held_goodputs, _ = measure_held(jobs, shapes, held, goodputs)
        device_goodputs = _measure_device(goodputs, shapes)
        work_s = estimate_work(jobs, device_goodputs, history, is_typical_guessed=False)
        rows = np.flatnonzero(held >= 0)
        with np.errstate(divide="ignore"):
            left_s = (work_s * device_goodputs)[:, None] / goodputs
            stay_s = (work_s * device_goodputs)[rows] / held_goodputs[rows]
        restart_s = np.array([job.restart_s for job in jobs])
        change_s = params.change_cost * restart_s[:, None]
        change_s = change_s * np.maximum(1.0, left_s / params.min_dwell_s)
        total_s = left_s + np.where(np.isfinite(left_s), change_s, 0.0)
        left_s[rows, held[rows]] = total_s[rows, held[rows]] = stay_s
        length_h = np.minimum(work_s, params.max_length_s)[:, None] / 3600.0
        speedup = work_s[:, None] / total_s
        values = length_h**-params.length_power * speedup**params.speed_power * weights[:, None]
        values = np.where(np.isfinite(total_s), values, -np.inf)
        add_deadlines(values, jobs, total_s, now=state.now, unit=weights.max(initial=1.0))
        forbid_unaffordable(values, jobs, left_s, shapes)
        min_devices = find_min_devices(values, shapes)
        return ValueTable(
            goodputs=goodputs,
            device_goodputs=device_goodputs,
            work_s=work_s,
            left_s=left_s,
            values=values,
            held=held,
            is_repacked=np.zeros(len(jobs), dtype=bool),
            min_devices=min_devices,
            min_left_s=work_s / np.maximum(min_devices, 1),
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
        """Shapes of nearly the best total value, and the prices; ``prices`` are where to begin."""
        options = DeviceOptions(
            sizes=shapes.devices.astype(np.float64),
            kinds=shapes.group,
            capacities=capacities.astype(np.float64),
        )
        if limits:
            solution = solve_priced_with_teams(
                values, options, groups=limits, must_run=must_run, prices=prices
            )
        else:
            solution = solve_priced(values, options, must_run=must_run, prices=prices)
        return solution.picks, solution.prices


def _adapt(params: SeveralTypesParams, state: PoolState) -> SeveralTypesParams:
    """Expect shapes to last longer the longer nobody new has come."""
    quiet_s = state.now - max((job.submitted_at for job in state.jobs), default=state.now)
    dwell_s = max(params.min_dwell_s, params.dwell_per_quiet_s * quiet_s)
    return replace(params, min_dwell_s=dwell_s)


def _find_named(jobs: Sequence[Demand]) -> set[int]:
    """Sizes that some job insists on or holds, beside the common ones."""
    named: set[int] = set()
    for job in jobs:
        named.update((job.min_devices, job.held.devices))
        if job.multiple > 1:
            named.update(job.multiple * count for count in (1, 2, 3, 4, 6, 8))
    return {size for size in named if size > 0}


def _measure_device(goodputs: Floats, shapes: ShapeTable) -> Floats:
    """Useful samples per second of one device, in the best shape of each job."""
    best = (goodputs / shapes.devices).max(axis=1, initial=0.0)
    return np.where(best > 0, best, 1.0)
