"""One decision for a pool of several types of devices: the policy ``yunlu`` on a mixed pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.hardware.fleet import NOTHING, Placement
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
from yunlu.scheduler.policy.mixed_worth import MixedOutlook, tell_mixed_outlook
from yunlu.scheduler.policy.placement import PlacedJobs, PlacementRequest, place
from yunlu.scheduler.policy.priced_knapsack import IDLE, DeviceOptions, PricedSolution, solve_priced
from yunlu.scheduler.policy.shapes import ShapeTable, group_nodes, lay_out_groups
from yunlu.scheduler.policy.team_knapsack import solve_priced_with_teams
from yunlu.scheduler.policy.values import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.fairness import FairnessRules, TeamQuota
    from yunlu.scheduler.policy.mixed_worth import SeveralTypesParams
    from yunlu.scheduler.policy.remaining_work import WorkHistory
    from yunlu.scheduler.policy.values import Demand, PoolState

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class MixedRound:
    """One decision, step by step. What it found out stays readable afterwards."""

    def __init__(
        self,
        state: PoolState,
        *,
        taste: SeveralTypesParams,
        manners: FairnessRules,
        lengths: WorkHistory | None,
        waiting_since: Mapping[str, float],
        prices: Floats | None = None,
    ) -> None:
        """Weighs everything up; ``prices`` are those of the last decision, to be quicker."""
        self.state, self.jobs = state, state.jobs
        self._manners, self._waiting_since = manners, waiting_since
        self.prices = prices
        kinds = group_nodes(state.nodes)
        self.shapes: ShapeTable = lay_out_groups(kinds, _find_extra(self.jobs))
        self._kind_of = {node.name: at for at, kind in enumerate(kinds) for node in kind.nodes}
        self.is_pinned = np.array([job.is_pinned and bool(job.held) for job in self.jobs], bool)
        self.whole = sum(kind.devices for kind in kinds)
        self.capacities = self._tell_capacities()
        self.allowances: dict[str, TeamQuota] = compute_quotas(state.teams, self.jobs, self.whole)
        self.outlook: MixedOutlook = tell_mixed_outlook(
            self.jobs,
            self.shapes,
            now=state.now,
            taste=_settle(taste, state),
            lengths=lengths,
            weights=weigh_jobs(self.jobs, self.allowances),
        )
        self.least = self._tell_least()
        self.picks = np.full(len(self.jobs), IDLE)

    def decide(self) -> Decision:
        """Shapes, then machines, then words."""
        if not self.jobs:
            return Decision(placements={})
        if len(self.shapes) and self.capacities.any():
            choice = self._choose()
            self.picks, self.prices = choice.picks, choice.prices
        placed = self._place()
        account = DecisionDetails(
            now=self.state.now,
            jobs=self.jobs,
            placed=placed,
            nodes=frozenset(node.name for node in self.state.nodes),
            capacity=self.whole,
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

    def _tell_capacities(self) -> Floats:
        """Devices of each kind that are not pinned."""
        found = np.array([kind.devices for kind in self.shapes.kinds], dtype=np.float64)
        for row in np.flatnonzero(self.is_pinned):
            for name, count in self.jobs[row].held.shares:
                if name in self._kind_of:
                    found[self._kind_of[name]] -= count
        return np.maximum(found, 0.0)

    def _tell_least(self) -> Ints:
        """The fewest devices each job can run on; 0 is none at all."""
        if not len(self.shapes):
            return np.zeros(len(self.jobs), dtype=np.int64)
        sizes = np.where(np.isfinite(self.outlook.values), self.shapes.devices, 1 << 40)
        least = sizes.min(axis=1)
        return np.where(least < 1 << 40, least, 0)

    def _choose(self) -> PricedSolution:
        now, devices = self.state.now, self.shapes.devices
        values = self.outlook.values.copy()
        values[self.is_pinned] = -np.inf
        values[:, devices > self.capacities[self.shapes.kind]] = -np.inf
        free = int(self.capacities.sum())
        can_run = np.isfinite(values).any(axis=1)
        taken: Counter[str] = Counter()
        for row in np.flatnonzero(self.is_pinned):
            taken[self.jobs[row].team] += self.jobs[row].held.devices
        must_run = find_must_run(
            self.jobs,
            np.where(can_run, self.least, 0),
            now=now,
            capacity=free,
            manners=self._manners,
            allowances=self.allowances,
            waiting_since=self._waiting_since,
            taken=taken,
        )
        keep_recent_sizes(
            values, self.jobs, devices, now=now, capacity=free, dwell_s=self._manners.dwell_s
        )
        options = DeviceOptions(
            sizes=devices.astype(np.float64), kinds=self.shapes.kind, capacities=self.capacities
        )
        if not self.allowances:
            return solve_priced(values, options, must_run=must_run, prices=self.prices)
        groups = limit_teams(self.jobs, self.allowances, taken)
        return solve_priced_with_teams(
            values, options, groups=groups, must_run=must_run, prices=self.prices
        )

    def _place(self) -> PlacedJobs:
        """Each kind for itself; who is pinned stays even on nodes of several kinds."""
        placements: dict[str, Placement] = {}
        moved: set[str] = set()
        unplaced: set[str] = set()
        for at, kind in enumerate(self.shapes.kinds):
            placed = place(kind.nodes, self._want(at))
            placements.update(placed.placements)
            moved |= placed.moved
            unplaced |= placed.unplaced
        for row in np.flatnonzero(self.is_pinned):
            placements[self.jobs[row].id] = self.jobs[row].held
        return PlacedJobs(
            placements=placements, moved=frozenset(moved), unplaced=frozenset(unplaced)
        )

    def _want(self, at: int) -> list[PlacementRequest]:
        wants: list[PlacementRequest] = []
        for row, job in enumerate(self.jobs):
            here = Placement(
                tuple(share for share in job.held.shares if self._kind_of.get(share[0]) == at)
            )
            pick = int(self.picks[row])
            if self.is_pinned[row]:
                if here:
                    wants.append(
                        PlacementRequest(id=job.id, devices=here.devices, held=here, is_pinned=True)
                    )
            elif pick != IDLE and self.shapes.kind[pick] == at:
                devices = int(self.shapes.devices[pick])
                stays = here == job.held and devices == here.devices
                wants.append(PlacementRequest(id=job.id, devices=devices, held=here, stays=stays))
        return wants

    def _speedup(self, row: int) -> float:
        before, after = int(self.outlook.held[row]), int(self.picks[row])
        return compute_speedup(self.outlook.goodputs[row], before, after)

    def _tell_ends(self, account: DecisionDetails, starts: Mapping[str, float]) -> dict[str, float]:
        """When each job will end, were nothing to change any more."""
        ends: dict[str, float] = {}
        for row, job in enumerate(self.jobs):
            gets = account.placed.placements.get(job.id, NOTHING)
            if gets:
                restart_s = job.restart_s if gets != job.held else 0.0
                ends[job.id] = self.state.now + restart_s + float(account.left_s[row])
            elif job.id in starts:
                usual_s = float(self.outlook.work_s[row] / max(self.least[row], 1))
                ends[job.id] = starts[job.id] + job.restart_s + usual_s
        return {job: at for job, at in ends.items() if np.isfinite(at)}


def _settle(taste: SeveralTypesParams, state: PoolState) -> SeveralTypesParams:
    """What is given lasts the longer, the longer nobody new has come."""
    quiet_s = state.now - max((job.submitted_at for job in state.jobs), default=state.now)
    return replace(taste, dwell_s=max(taste.dwell_s, taste.calm * quiet_s))


def _find_extra(jobs: tuple[Demand, ...]) -> set[int]:
    """Sizes that some job insists on or holds, beside the usual ones."""
    extra: set[int] = set()
    for job in jobs:
        extra.update((job.min_devices, job.held.devices))
        if job.multiple > 1:
            extra.update(job.multiple * count for count in (1, 2, 3, 4, 6, 8))
    return {size for size in extra if size > 0}
