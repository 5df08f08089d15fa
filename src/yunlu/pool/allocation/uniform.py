"""One decision for a pool with one type of device: sizes, then machines, then words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from yunlu.pool.allocation.entitlement import (
    group_by_team,
    keep_dwelling,
    tell_allowances,
    tell_must_run,
    tell_weights,
)
from yunlu.pool.allocation.knapsack import IDLE, Choice, choose, choose_grouped
from yunlu.pool.allocation.placing import Placed, Want, place
from yunlu.pool.allocation.reasons import Case, Reasons, explain
from yunlu.pool.allocation.sizes import Sizes, find_sizes
from yunlu.pool.allocation.values import NOTHING, Decision, PoolState, Reason
from yunlu.pool.allocation.worth import Outlook, Taste, tell_outlook

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from yunlu.pool.allocation.entitlement import Manners
    from yunlu.pool.allocation.lengths import Lengths

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class UniformRound:
    """One decision, step by step. What it found out stays readable afterwards."""

    def __init__(
        self,
        state: PoolState,
        *,
        taste: Taste,
        manners: Manners,
        lengths: Lengths | None,
        waiting_since: Mapping[str, float],
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
        self.allowances = tell_allowances(state.teams, self.jobs, self.sizes.capacity)
        dollars = [n.dollars_per_hour / n.devices for n in state.nodes if n.devices]
        self.outlook: Outlook = tell_outlook(
            self.jobs,
            self.sizes,
            self.device_type,
            now=state.now,
            taste=taste,
            lengths=lengths,
            weights=tell_weights(self.jobs, self.allowances),
            dollars_per_device_hour=max(dollars, default=0.0),
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
        columns = np.where(self.is_pinned, self.outlook.held, self.picks)
        padded = np.column_stack([self.outlook.left_s, np.full(len(self.jobs), np.inf)])
        self._left_s: Floats = padded[np.arange(len(self.jobs)), columns]
        starts = self._tell_starts(placed)
        return Decision(
            placements=placed.placements,
            reasons=self._explain(placed, starts),
            predicted_end_at=self._tell_ends(placed, starts),
        )

    def tell_rates(self) -> Floats:
        """Goodput of what each job was given; 0 for those that were given nothing."""
        columns = np.where(self.is_pinned, self.outlook.held, self.picks)
        padded = np.column_stack([self.outlook.goodputs, np.zeros(len(self.jobs))])
        return padded[np.arange(len(self.jobs)), columns]

    def _choose(self) -> Choice:
        now, manners = self.state.now, self._manners
        values = self.outlook.values.copy()
        values[self.is_pinned] = -np.inf
        values[:, self.sizes.devices > self.capacity] = -np.inf
        least = np.where(self.is_pinned | (self.least > self.capacity), 0, self.least)
        must_run = tell_must_run(
            self.jobs,
            least,
            now=now,
            capacity=self.capacity,
            manners=manners,
            allowances=self.allowances,
            waiting_since=self._waiting_since,
        )
        keep_dwelling(
            values,
            self.jobs,
            self.sizes.devices,
            now=now,
            capacity=self.capacity,
            dwell_s=manners.dwell_s,
        )
        if not self.allowances:
            return choose(values, self.sizes.devices, self.capacity, must_run)
        taken: Counter[str] = Counter()
        for row in np.flatnonzero(self.is_pinned):
            taken[self.jobs[row].team] += self.jobs[row].held.devices
        groups = group_by_team(self.jobs, self.allowances, taken)
        return choose_grouped(values, self.sizes.devices, self.capacity, must_run, groups)

    def _place(self) -> Placed:
        wants: list[Want] = []
        for row, job in enumerate(self.jobs):
            if self.is_pinned[row]:
                wants.append(
                    Want(id=job.id, devices=job.held.devices, held=job.held, is_pinned=True)
                )
            elif self.picks[row] != IDLE:
                devices = int(self.sizes.devices[self.picks[row]])
                stays = devices == job.held.devices and not self.outlook.repacks[row]
                wants.append(Want(id=job.id, devices=devices, held=job.held, stays=stays))
        return place(self.state.nodes, wants)

    def _explain(self, placed: Placed, starts: Mapping[str, float]) -> Reasons:
        holds: Counter[str] = Counter()
        for job in self.jobs:
            holds[job.team] += placed.placements.get(job.id, NOTHING).devices
        free = self.sizes.capacity - sum(holds.values())

        def tell(row: int) -> Reason:
            job = self.jobs[row]
            gets = placed.placements.get(job.id, NOTHING)
            left_s = float(self._left_s[row])
            end_at = self.state.now + left_s + (job.restart_s if gets != job.held else 0.0)
            return explain(
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
                    capacity=self.sizes.capacity,
                    allowance=self.allowances.get(job.team),
                    team_holds=holds[job.team],
                    starts_at=starts.get(job.id),
                )
            )

        return Reasons([job.id for job in self.jobs], tell)

    def _speedup(self, row: int) -> float:
        before, after = int(self.outlook.held[row]), int(self.picks[row])
        if before in (IDLE, after) or after == IDLE:
            return 1.0
        goodputs = self.outlook.goodputs[row]
        return float(goodputs[after] / goodputs[before]) if goodputs[before] > 0 else 1.0

    def _tell_ends(self, placed: Placed, starts: Mapping[str, float]) -> dict[str, float]:
        """When each job will end, were nothing to change any more."""
        now = self.state.now
        ends: dict[str, float] = {}
        for row, (job, left_s) in enumerate(zip(self.jobs, self._left_s.tolist(), strict=True)):
            gets = placed.placements.get(job.id)
            if gets is not None:
                ends[job.id] = now + left_s + (job.restart_s if gets != job.held else 0.0)
            elif job.id in starts:
                column = int(np.searchsorted(self.sizes.devices, self.least[row]))
                left_s = float(self.outlook.left_s[row, column])  # noqa: PLW2901
                ends[job.id] = starts[job.id] + job.restart_s + left_s
        return {job: at for job, at in ends.items() if at < np.inf}

    def _tell_starts(self, placed: Placed) -> dict[str, float]:
        """When jobs that wait would find enough devices, as those that run come to their ends."""
        waiting = [
            (row, job)
            for row, job in enumerate(self.jobs)
            if job.id not in placed.placements and self.least[row] > 0
        ]
        if not waiting:
            return {}
        frees: list[tuple[float, int]] = []
        for row, job in enumerate(self.jobs):
            gets = placed.placements.get(job.id, NOTHING)
            if gets:
                frees.append((self.state.now + float(self._left_s[row]), gets.devices))
        frees.sort()
        found: dict[str, float] = {}
        used = sum(count for _, count in frees)
        room, at, step = self.sizes.capacity - used, self.state.now, 0
        for row, job in sorted(waiting, key=lambda one: (-one[1].priority, one[1].submitted_at)):
            while room < self.least[row] and step < len(frees):
                at, count = frees[step]
                room, step = room + count, step + 1
            if room < self.least[row]:
                break
            room -= int(self.least[row])
            found[job.id] = at
        return found
