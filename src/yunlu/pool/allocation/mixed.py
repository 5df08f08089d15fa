"""One decision for a pool of several types of devices: the policy ``yunlu`` on a mixed pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.pool.allocation.entitlement import (
    group_by_team,
    keep_dwelling,
    tell_allowances,
    tell_must_run,
    tell_weights,
)
from yunlu.pool.allocation.mixed_choice import IDLE, Choice, Options, choose
from yunlu.pool.allocation.mixed_groups import choose_grouped
from yunlu.pool.allocation.mixed_shapes import Shapes, group_kinds, lay_out
from yunlu.pool.allocation.mixed_worth import MixedOutlook, tell_mixed_outlook
from yunlu.pool.allocation.placing import Placed, Want, place
from yunlu.pool.allocation.reasons import Case, explain
from yunlu.pool.allocation.values import NOTHING, Decision, Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from yunlu.pool.allocation.entitlement import Allowance, Manners
    from yunlu.pool.allocation.lengths import Lengths
    from yunlu.pool.allocation.values import Demand, PoolState, Reason
    from yunlu.pool.allocation.worth import Taste

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class MixedRound:
    """One decision, step by step. What it found out stays readable afterwards."""

    def __init__(
        self,
        state: PoolState,
        *,
        taste: Taste,
        manners: Manners,
        lengths: Lengths | None,
        waiting_since: Mapping[str, float],
        prices: Floats | None = None,
    ) -> None:
        """Weighs everything up; ``prices`` are those of the last decision, to be quicker."""
        self.state, self.jobs = state, state.jobs
        self._manners, self._waiting_since = manners, waiting_since
        self.prices = prices
        kinds = group_kinds(state.nodes)
        self.shapes: Shapes = lay_out(kinds, _find_extra(self.jobs))
        self._kind_of = {node.name: at for at, kind in enumerate(kinds) for node in kind.nodes}
        self.is_pinned = np.array([job.is_pinned and bool(job.held) for job in self.jobs], bool)
        self.whole = sum(kind.devices for kind in kinds)
        self.capacities = self._tell_capacities()
        self.allowances: dict[str, Allowance] = tell_allowances(state.teams, self.jobs, self.whole)
        self.outlook: MixedOutlook = tell_mixed_outlook(
            self.jobs,
            self.shapes,
            now=state.now,
            taste=_settle(taste, state),
            lengths=lengths,
            weights=tell_weights(self.jobs, self.allowances),
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
        return Decision(
            placements=placed.placements,
            reasons=self._explain(placed),
            predicted_end_at=self._tell_ends(placed),
        )

    def tell_rates(self) -> Floats:
        """Goodput of what each job was given; 0 for those that were given nothing."""
        columns = np.where(self.is_pinned, self.outlook.held, self.picks)
        padded = np.column_stack([self.outlook.goodputs, np.zeros(len(self.jobs))])
        return padded[np.arange(len(self.jobs)), columns]

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

    def _choose(self) -> Choice:
        now, devices = self.state.now, self.shapes.devices
        values = self.outlook.values.copy()
        values[self.is_pinned] = -np.inf
        values[:, devices > self.capacities[self.shapes.kind]] = -np.inf
        free = int(self.capacities.sum())
        can_run = np.isfinite(values).any(axis=1)
        must_run = tell_must_run(
            self.jobs,
            np.where(can_run, self.least, 0),
            now=now,
            capacity=free,
            manners=self._manners,
            allowances=self.allowances,
            waiting_since=self._waiting_since,
        )
        keep_dwelling(
            values, self.jobs, devices, now=now, capacity=free, dwell_s=self._manners.dwell_s
        )
        options = Options(
            sizes=devices.astype(np.float64), kinds=self.shapes.kind, capacities=self.capacities
        )
        if not self.allowances:
            return choose(values, options, must_run=must_run, prices=self.prices)
        taken: Counter[str] = Counter()
        for row in np.flatnonzero(self.is_pinned):
            taken[self.jobs[row].team] += self.jobs[row].held.devices
        groups = group_by_team(self.jobs, self.allowances, taken)
        return choose_grouped(values, options, groups=groups, must_run=must_run, prices=self.prices)

    def _place(self) -> Placed:
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
        return Placed(placements=placements, moved=frozenset(moved), unplaced=frozenset(unplaced))

    def _want(self, at: int) -> list[Want]:
        wants: list[Want] = []
        for row, job in enumerate(self.jobs):
            here = Placement(
                tuple(share for share in job.held.shares if self._kind_of.get(share[0]) == at)
            )
            pick = int(self.picks[row])
            if self.is_pinned[row]:
                if here:
                    wants.append(Want(id=job.id, devices=here.devices, held=here, is_pinned=True))
            elif pick != IDLE and self.shapes.kind[pick] == at:
                devices = int(self.shapes.devices[pick])
                stays = here == job.held and devices == here.devices
                wants.append(Want(id=job.id, devices=devices, held=here, stays=stays))
        return wants

    def _explain(self, placed: Placed) -> dict[str, Reason]:
        holds: Counter[str] = Counter()
        for job in self.jobs:
            holds[job.team] += placed.placements.get(job.id, NOTHING).devices
        free = self.whole - sum(holds.values())
        starts = self._tell_starts(placed)
        found: dict[str, Reason] = {}
        for row, job in enumerate(self.jobs):
            gets = placed.placements.get(job.id, NOTHING)
            left_s = self._left_s(row)
            end_at = self.state.now + left_s + (job.restart_s if gets != job.held else 0.0)
            found[job.id] = explain(
                Case(
                    job=job,
                    gets=gets,
                    speedup=self._speedup(row),
                    left_s=left_s,
                    least=int(self.least[row]),
                    is_moved=job.id in placed.moved,
                    is_unplaced=job.id in placed.unplaced,
                    misses_deadline=job.deadline_at is not None
                    and job.remaining is not None
                    and not end_at <= job.deadline_at,
                    free=free,
                    capacity=self.whole,
                    allowance=self.allowances.get(job.team),
                    team_holds=holds[job.team],
                    starts_at=starts.get(job.id),
                )
            )
        return found

    def _left_s(self, row: int) -> float:
        column = self.outlook.held[row] if self.is_pinned[row] else self.picks[row]
        return float(self.outlook.left_s[row, column]) if column != IDLE else float("inf")

    def _speedup(self, row: int) -> float:
        before, after = int(self.outlook.held[row]), int(self.picks[row])
        if before in (IDLE, after) or after == IDLE:
            return 1.0
        goodputs = self.outlook.goodputs[row]
        return float(goodputs[after] / goodputs[before]) if goodputs[before] > 0 else 1.0

    def _tell_ends(self, placed: Placed) -> dict[str, float]:
        """When each job will end, were nothing to change any more."""
        ends: dict[str, float] = {}
        starts = self._tell_starts(placed)
        for row, job in enumerate(self.jobs):
            gets = placed.placements.get(job.id, NOTHING)
            if gets:
                restart_s = job.restart_s if gets != job.held else 0.0
                ends[job.id] = self.state.now + restart_s + self._left_s(row)
            elif job.id in starts:
                usual_s = float(self.outlook.work_s[row] / max(self.least[row], 1))
                ends[job.id] = starts[job.id] + job.restart_s + usual_s
        return {job: at for job, at in ends.items() if np.isfinite(at)}

    def _tell_starts(self, placed: Placed) -> dict[str, float]:
        """When jobs that wait would find devices, as those that run come to their ends."""
        frees = sorted(
            (self.state.now + self._left_s(row), placed.placements[job.id].devices)
            for row, job in enumerate(self.jobs)
            if placed.placements.get(job.id)
        )
        waiting = [
            (row, job)
            for row, job in enumerate(self.jobs)
            if not placed.placements.get(job.id) and self.least[row] > 0
        ]
        room, at, step = self.whole - sum(count for _, count in frees), self.state.now, 0
        found: dict[str, float] = {}
        for row, job in sorted(waiting, key=lambda one: (-one[1].priority, one[1].submitted_at)):
            while room < self.least[row] and step < len(frees):
                at, count = frees[step]
                room, step = room + count, step + 1
            if room < self.least[row]:
                break
            room -= int(self.least[row])
            found[job.id] = at
        return found


def _settle(taste: Taste, state: PoolState) -> Taste:
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
