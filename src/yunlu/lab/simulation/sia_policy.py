"""Sia's policy (Jayaram Subramanya et al., SOSP'23), as a baseline.

The same objective, penalties and constants as in its artifact: goodputs of a job relative to its
smallest, to the power of -0.5, a factor against restarts, 1.1 for a job that gets nothing; one
binary per job and shape. Solved with HiGHS in place of CBC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.lab.simulation.shape_placement import place_shapes
from yunlu.scheduler.policy.shapes import ShapeTable, allow_shapes, group_nodes, lay_out_groups
from yunlu.scheduler.policy.speed_by_type import tabulate_goodputs
from yunlu.scheduler.policy.values import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.values import Demand, PoolState

    Floats = NDArray[np.float64]

_DEAREST = 3000.0
_GAP = 1e-4


@dataclass(kw_only=True)
class SiaPolicy:
    """Fair goodput over device types, by integer programming."""

    name: str = "sia"
    power: float = -0.5
    waiting_cost: float = 1.1
    restart_s_by_program: Mapping[str, float] = field(default_factory=dict[str, float])
    """Assumed restart cost, by the part of a job's name before the dash."""

    def decide(self, state: PoolState) -> Decision:
        """Placement of each job."""
        groups = group_nodes(state.nodes)
        if not groups or not state.jobs:
            return Decision(placements={})
        fixed = {job.min_devices for job in state.jobs if job.min_devices == job.max_devices}
        shapes = lay_out_groups(groups, fixed)
        held = [shapes.find_packed(job.held) for job in state.jobs]
        cost = self._cost(state, shapes, held)
        picks = _solve(cost, shapes, held, [job.is_pinned for job in state.jobs])
        return Decision(placements=place_shapes(state.jobs, picks, shapes))

    def _cost(self, state: PoolState, shapes: ShapeTable, held: Sequence[int | None]) -> Floats:
        """Cost of each shape to each job, minus that of waiting; ``inf`` where it cannot run."""
        types = [shapes.groups[group].type for group in shapes.group]
        goodput = tabulate_goodputs(
            state.jobs, types, shapes.nodes.tolist(), shapes.devices.tolist()
        )
        goodput = np.where(allow_shapes(state.jobs, shapes), goodput, 0.0)
        cost = np.full(goodput.shape, np.inf)
        for row, job in enumerate(state.jobs):
            valid = goodput[row] > 0
            if not valid.any():
                continue
            least = int(np.argmin(np.where(valid, goodput[row], np.inf)))
            unit = int(shapes.devices[valid & (shapes.group == shapes.group[least])].min())
            relative = goodput[row] * unit / goodput[row, least]
            at = held[row]
            if at is not None:
                stay = relative[at]
                relative = relative * self._restart_factor(job, state.now)
                relative[at] = stay
            valid &= relative > 0
            price = np.round(relative[valid] ** self.power, 2)
            cost[row, valid] = np.minimum(price, _DEAREST) - self.waiting_cost
        return cost

    def _restart_factor(self, job: Demand, now: float) -> float:
        program = job.id.partition("-")[0]
        restart_s = self.restart_s_by_program.get(program, job.restart_s)
        age = now - job.submitted_at
        if age < restart_s:
            return 1.0
        return max(age - job.restarts * restart_s, 0.0) / (age + restart_s)


def _solve(
    cost: Floats, shapes: ShapeTable, held: Sequence[int | None], pinned: Sequence[bool]
) -> list[int | None]:
    """The cheapest choice of at most one shape per job within the capacity of each kind."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 (slow to import)
    from scipy.sparse import csr_array  # noqa: PLC0415

    stays = {row: at for row, at in enumerate(held) if at is not None and pinned[row]}
    is_open = cost < 0
    for row, at in stays.items():
        is_open[row] = False
        is_open[row, at] = True
    jobs, columns = np.nonzero(is_open)
    count = len(jobs)
    picks: list[int | None] = [None] * len(cost)
    if not count:
        return picks
    item = np.arange(count)
    matrix = csr_array(
        (
            np.concatenate([np.ones(count), shapes.devices[columns]]),
            (
                np.concatenate([jobs, len(cost) + shapes.group[columns]]),
                np.concatenate([item, item]),
            ),
        ),
        shape=(len(cost) + len(shapes.groups), count),
    )
    limits: Any = np.concatenate([np.ones(len(cost)), [group.devices for group in shapes.groups]])
    must: Any = np.array([float(row in stays) for row in jobs])
    answer = milp(
        np.where(np.isfinite(cost[jobs, columns]), cost[jobs, columns], 0.0),
        constraints=LinearConstraint(matrix, ub=limits),
        integrality=np.ones(count),
        bounds=Bounds(must, 1),
        options={"mip_rel_gap": _GAP},
    )
    if answer.x is None:
        return [at if at is not None and row in stays else None for row, at in enumerate(held)]
    for index in np.flatnonzero(answer.x > 0.5):
        picks[int(jobs[index])] = int(columns[index])
    return picks
