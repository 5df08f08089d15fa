"""One decision of the allocator: shapes, values, claims, choice, placement, reasons."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from yunlu.hardware.fleet import Placement
from yunlu.scheduler.policy.decision_details import (
    DecisionDetails,
    build_reasons,
    compute_speedup,
    predict_starts,
    take_columns,
)
from yunlu.scheduler.policy.fairness import (
    compute_quotas,
    find_must_run,
    keep_recent_sizes,
    limit_teams,
    weigh_jobs,
)
from yunlu.scheduler.policy.knapsack import IDLE
from yunlu.scheduler.policy.placement import PlacedJobs, PlacementRequest, place
from yunlu.scheduler.policy.values import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.fairness import FairnessRules
    from yunlu.scheduler.policy.knapsack import TeamLimits
    from yunlu.scheduler.policy.remaining_work import WorkHistory
    from yunlu.scheduler.policy.shapes import ShapeTable
    from yunlu.scheduler.policy.value_table import ValueTable
    from yunlu.scheduler.policy.values import Demand, PoolState

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class Sizing(Protocol):
    """The step of a decision that depends on the number of device types: which shapes jobs get.

    Two implementations, because both were tuned and measured apart and one would lose what the other
    has. With one type there is one capacity: the knapsack is solved exactly over every device, with
    values from the theory of one queue (urgency), and whole nodes of unequal size are one group. With
    several types there is a capacity per group, where the exact programme is too large and urgency,
    which counts in shares of one capacity, is not defined: values are relative speeds, as in Sia, and
    the choice is found by prices.
    """

    def lay_out(self, state: PoolState) -> ShapeTable:
        """Shapes that jobs can be given."""
        ...

    def value(
        self,
        state: PoolState,
        shapes: ShapeTable,
        *,
        history: WorkHistory | None,
        weights: Floats,
        stopped_devices: Mapping[str, int],
    ) -> ValueTable:
        """Value of every shape to every job.

        ``stopped_devices`` is what jobs that were stopped only just now held.
        """
        ...

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
        """The column of each job (``IDLE`` is none) and the prices to begin with next time."""
        ...


class AllocationRound:
    """One decision, step by step; intermediate tables stay readable."""

    def __init__(
        self,
        state: PoolState,
        *,
        sizing: Sizing,
        fairness: FairnessRules,
        history: WorkHistory | None,
        waiting_since: Mapping[str, float],
        stopped_devices: Mapping[str, int] | None = None,
        prices: Floats | None = None,
    ) -> None:
        """Lays out shapes and computes their values; ``prices`` are those of the last decision."""
        self.state, self.jobs = state, state.jobs
        self.prices = prices
        self._sizing, self._fairness, self._waiting_since = sizing, fairness, waiting_since
        self.shapes = sizing.lay_out(state)
        self.is_pinned = np.array([job.is_pinned and bool(job.held) for job in self.jobs], bool)
        self.capacity = sum(group.devices for group in self.shapes.groups)
        self.free = self._count_free()
        self.quotas = compute_quotas(state.teams, self.jobs, self.capacity)
        self.table = sizing.value(
            state,
            self.shapes,
            history=history,
            weights=weigh_jobs(self.jobs, self.quotas),
            stopped_devices=stopped_devices or {},
        )
        self.picks = np.full(len(self.jobs), IDLE)

    def decide(self) -> Decision:
        """Choose shapes, place them on nodes, and explain the result."""
        if not self.jobs:
            return Decision(placements={})
        if len(self.shapes) and self.free.any():
            self.picks, self.prices = self._choose()
        placed = self._place()
        details = DecisionDetails(
            now=self.state.now,
            jobs=self.jobs,
            placed=placed,
            nodes=frozenset(node.name for node in self.state.nodes),
            capacity=self.capacity,
            min_devices=self.table.min_devices,
            left_s=take_columns(self.table.left_s, self._columns, idle=np.inf),
            quotas=self.quotas,
        )
        starts = predict_starts(details)
        return Decision(
            placements=placed.placements,
            reasons=build_reasons(details, starts, self._compute_speedup),
            predicted_end_at=self._predict_ends(details, starts),
        )

    def compute_rates(self) -> Floats:
        """Goodput of each job with what it was given; 0 if it was given nothing."""
        return take_columns(self.table.goodputs, self._columns, idle=0.0)

    @property
    def _columns(self) -> Ints:
        """Column of what each job holds from now on."""
        return np.where(self.is_pinned, self.table.held, self.picks)

    def _count_free(self) -> Ints:
        """Devices of each group that are neither pinned nor leaving."""
        free = np.array([group.devices for group in self.shapes.groups], dtype=np.int64)
        staying = {node.name for node in self.state.nodes if not node.is_leaving}
        for row in np.flatnonzero(self.is_pinned):
            for name, count in self.jobs[row].held.shares:
                group = self.shapes.find_group(name)
                if group is not None and name in staying:
                    free[group] -= count
        return np.maximum(free, 0)

    def _choose(self) -> tuple[Ints, Floats | None]:
        """Shapes of the largest total value within capacities, claims and team limits."""
        now, devices, fairness = self.state.now, self.shapes.devices, self._fairness
        values = self.table.values.copy()
        values[self.is_pinned] = -np.inf
        values[:, devices > self.free[self.shapes.group]] = -np.inf
        free = int(self.free.sum())
        can_run = np.isfinite(values).any(axis=1)
        pinned_devices: Counter[str] = Counter()
        for row in np.flatnonzero(self.is_pinned):
            pinned_devices[self.jobs[row].team] += self.jobs[row].held.devices
        must_run = find_must_run(
            self.jobs,
            np.where(can_run, self.table.min_devices, 0),
            now=now,
            capacity=free,
            rules=fairness,
            quotas=self.quotas,
            waiting_since=self._waiting_since,
            pinned_devices=pinned_devices,
        )
        keep_recent_sizes(
            values, self.jobs, devices, now=now, capacity=free, hold_s=fairness.min_hold_s
        )
        return self._sizing.choose(
            values,
            self.shapes,
            self.free,
            must_run=must_run,
            limits=limit_teams(self.jobs, self.quotas, pinned_devices),
            prices=self.prices,
        )

    def _place(self) -> PlacedJobs:
        """Place each group by itself; pinned jobs stay, even on nodes of several groups."""
        placements: dict[str, Placement] = {}
        moved: set[str] = set()
        unplaced: set[str] = set()
        for index, group in enumerate(self.shapes.groups):
            placed = place(group.nodes, self._request(index))
            placements.update(placed.placements)
            moved |= placed.moved
            unplaced |= placed.unplaced
        for row in np.flatnonzero(self.is_pinned):
            job = self.jobs[row]
            groups = {self.shapes.find_group(name) for name, _ in job.held.shares}
            if len(groups) > 1 or None in groups:
                placements[job.id] = job.held
        return PlacedJobs(
            placements=placements, moved=frozenset(moved), unplaced=frozenset(unplaced)
        )

    def _request(self, group: int) -> list[PlacementRequest]:
        """What jobs want of the nodes of one group."""
        requests: list[PlacementRequest] = []
        for row, job in enumerate(self.jobs):
            here = self._keep_shares(job, group)
            pick = int(self.picks[row])
            if self.is_pinned[row]:
                if here:
                    requests.append(
                        PlacementRequest(id=job.id, devices=here.devices, held=here, is_pinned=True)
                    )
            elif pick != IDLE and self.shapes.group[pick] == group:
                devices = int(self.shapes.devices[pick])
                is_same = here == job.held and devices == here.devices
                stays = is_same and not self.table.is_repacked[row]
                requests.append(
                    PlacementRequest(id=job.id, devices=devices, held=here, stays=bool(stays))
                )
        return requests

    def _keep_shares(self, job: Demand, group: int) -> Placement:
        """What a job holds of one group."""
        shares = job.held.shares
        return Placement(tuple(s for s in shares if self.shapes.find_group(s[0]) == group))

    def _compute_speedup(self, row: int) -> float:
        before, after = int(self.table.held[row]), int(self.picks[row])
        return compute_speedup(self.table.goodputs[row], before, after)

    def _predict_ends(
        self, details: DecisionDetails, starts: Mapping[str, float]
    ) -> dict[str, float]:
        """When each job will end if nothing changes any more."""
        ends: dict[str, float] = {}
        for row, job in enumerate(self.jobs):
            given = details.placed.placements.get(job.id)
            if given:
                restart_s = job.restart_s if given != job.held else 0.0
                ends[job.id] = self.state.now + float(details.left_s[row]) + restart_s
            elif job.id in starts:
                left_s = float(self.table.min_left_s[row])
                ends[job.id] = starts[job.id] + job.restart_s + left_s
        return {job: at for job, at in ends.items() if np.isfinite(at)}
