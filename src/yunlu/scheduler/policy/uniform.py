"""One decision for a pool with one type of device: sizes, then machines, then words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

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
from yunlu.scheduler.policy.knapsack import IDLE, KnapsackSolution, solve_knapsack, solve_with_teams
from yunlu.scheduler.policy.placement import PlacedJobs, PlacementRequest, place
from yunlu.scheduler.policy.sizes import Sizes, find_sizes
from yunlu.scheduler.policy.values import Decision, PoolState
from yunlu.scheduler.policy.worth import Outlook, tell_outlook

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.fairness import FairnessRules
    from yunlu.scheduler.policy.remaining_work import WorkHistory
    from yunlu.scheduler.policy.urgency import PolicyParams

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class UniformRound:
    """One decision, step by step. What it found out stays readable afterwards."""

    def __init__(
        self,
        state: PoolState,
        *,
        taste: PolicyParams,
        manners: FairnessRules,
        lengths: WorkHistory | None,
        waiting_since: Mapping[str, float],
        stopped_at_devices: Mapping[str, int],
    ) -> None:
        """Weighs everything up."""
        self.state = state
        self._manners, self._waiting_since = manners, waiting_since
        self.device_type = state.nodes[0].type if state.nodes else ""
        self.jobs = state.jobs
        self.sizes: Sizes = find_sizes(state.nodes, self.jobs)
        self.is_pinned = np.array([job.is_pinned and bool(job.held) for job in self.jobs], bool)
        pinned = sum(
            count
            for job, fixed in zip(self.jobs, self.is_pinned, strict=True)
            if fixed
            for name, count in job.held.shares
            if name in self._staying
        )
        self.capacity = max(self.sizes.capacity - pinned, 0)
        self.allowances = compute_quotas(state.teams, self.jobs, self.sizes.capacity)
        dollars = [n.dollars_per_hour / n.devices for n in state.nodes if n.devices]
        self.outlook: Outlook = tell_outlook(
            self.jobs,
            self.sizes,
            self.device_type,
            now=state.now,
            taste=taste,
            lengths=lengths,
            weights=weigh_jobs(self.jobs, self.allowances),
            dollars_per_device_hour=max(dollars, default=0.0),
            stopped_at_devices=stopped_at_devices,
        )
        can_run = np.isfinite(self.outlook.values)
        first = can_run.argmax(axis=1) if len(self.sizes.devices) else np.zeros(len(self.jobs), int)
        has_any = can_run.any(axis=1)
        self.least: Ints = np.zeros(len(self.jobs), dtype=np.int64)
        if has_any.any():
            self.least[has_any] = self.sizes.devices[first[has_any]]

        self.picks: Ints = np.full(len(self.jobs), IDLE)

    @property
    def _staying(self) -> set[str]:
        return {node.name for node in self.state.nodes if not node.is_leaving}

    def decide(self) -> Decision:
        """Sizes, then machines, then words."""
        if not self.jobs:
            return Decision(placements={})
        if self.capacity and len(self.sizes.devices):
            self.picks = self._choose().picks
        placed = self._place()
        account = DecisionDetails(
            now=self.state.now,
            jobs=self.jobs,
            placed=placed,
            nodes=frozenset(node.name for node in self.state.nodes),
            capacity=self.sizes.capacity,
            least=self.least,
            left_s=take_columns(self.outlook.left_s, self._columns, idle=np.inf),
            allowances=self.allowances,
        )
        starts = predict_starts(account)
        return Decision(
            placements=placed.placements,
            reasons=build_reasons(account, starts, self._speedup),
            predicted_end_at=self._tell_ends(account, starts),
        )

    def tell_rates(self) -> Floats:
        """Goodput of what each job was given; 0 for those that were given nothing."""
        return take_columns(self.outlook.goodputs, self._columns, idle=0.0)

    @property
    def _columns(self) -> Ints:
        """Of what each job holds from now on."""
        return np.where(self.is_pinned, self.outlook.held, self.picks)

    def _choose(self) -> KnapsackSolution:
        now, manners = self.state.now, self._manners
        values = self.outlook.values.copy()
        values[self.is_pinned] = -np.inf
        values[:, self.sizes.devices > self.capacity] = -np.inf
        least = np.where(self.is_pinned | (self.least > self.capacity), 0, self.least)
        taken: Counter[str] = Counter()
        for row in np.flatnonzero(self.is_pinned):
            taken[self.jobs[row].team] += self.jobs[row].held.devices
        must_run = find_must_run(
            self.jobs,
            least,
            now=now,
            capacity=self.capacity,
            manners=manners,
            allowances=self.allowances,
            waiting_since=self._waiting_since,
            taken=taken,
        )
        keep_recent_sizes(
            values,
            self.jobs,
            self.sizes.devices,
            now=now,
            capacity=self.capacity,
            dwell_s=manners.dwell_s,
        )
        if not self.allowances:
            return solve_knapsack(values, self.sizes.devices, self.capacity, must_run)
        groups = limit_teams(self.jobs, self.allowances, taken)
        return solve_with_teams(values, self.sizes.devices, self.capacity, must_run, groups)

    def _place(self) -> PlacedJobs:
        wants: list[PlacementRequest] = []
        for row, job in enumerate(self.jobs):
            if self.is_pinned[row]:
                wants.append(
                    PlacementRequest(
                        id=job.id, devices=job.held.devices, held=job.held, is_pinned=True
                    )
                )
            elif self.picks[row] != IDLE:
                devices = int(self.sizes.devices[self.picks[row]])
                stays = devices == job.held.devices and not self.outlook.repacks[row]
                wants.append(
                    PlacementRequest(id=job.id, devices=devices, held=job.held, stays=stays)
                )
        return place(self.state.nodes, wants)

    def _speedup(self, row: int) -> float:
        before, after = int(self.outlook.held[row]), int(self.picks[row])
        return compute_speedup(self.outlook.goodputs[row], before, after)

    def _tell_ends(self, account: DecisionDetails, starts: Mapping[str, float]) -> dict[str, float]:
        """When each job will end, were nothing to change any more."""
        now = self.state.now
        ends: dict[str, float] = {}
        for row, (job, left_s) in enumerate(zip(self.jobs, account.left_s.tolist(), strict=True)):
            gets = account.placed.placements.get(job.id)
            if gets is not None:
                ends[job.id] = now + left_s + (job.restart_s if gets != job.held else 0.0)
            elif job.id in starts:
                column = int(np.searchsorted(self.sizes.devices, self.least[row]))
                left_s = float(self.outlook.left_s[row, column])  # noqa: PLW2901
                ends[job.id] = starts[job.id] + job.restart_s + left_s
        return {job: at for job, at in ends.items() if at < np.inf}
