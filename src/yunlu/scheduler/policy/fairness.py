"""Who must get something, and how much each team may have: what goes before speed.

In this order: who cannot be stopped, who has only just begun, who has waited too long, higher
priority. So a turn once begun is a turn, and nobody waits for ever. The rest is left to what brings the most progress. A team can always claim its quota; what
it does not use others may borrow, and lose again when it is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.knapsack import TeamLimits
from yunlu.scheduler.policy.values import Team

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.values import Demand

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

_STRONGEST = 3
"""Priorities beyond this count no more for devices above a job's minimum."""
_FAVOUR = 2.0
"""At most so much more or less a team counts for having used little or much lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessRules:
    """How long jobs wait and stay."""

    patience_s: float = 7200.0
    """Who has waited this long for its first devices goes before all others."""
    turn_s: float = 300.0
    """Who has begun is not stopped before this; its least size is enough."""
    dwell_s: float = 0.0
    """Who has just been given devices keeps at least as many for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamQuota:
    """What one team may hold."""

    team: Team
    quota: int
    most: int


def compute_quotas(
    teams: Sequence[Team], jobs: Sequence[Demand], capacity: int
) -> dict[str, TeamQuota]:
    """Quota and limit of each team; empty where nobody has teams."""
    if not teams:
        return {}
    known = {team.name: team for team in teams}
    for job in jobs:
        known.setdefault(job.team, Team(name=job.team))
    asked = sum(team.quota for team in known.values() if team.quota is not None)
    open_ended = [team for team in known.values() if team.quota is None]
    shares = sum(team.weight for team in open_ended)
    scale = min(1.0, capacity / asked) if asked else 1.0
    left = max(capacity - asked, 0)
    found: dict[str, TeamQuota] = {}
    for team in known.values():
        if team.quota is None:
            quota = int(left * team.weight / shares) if shares else 0
        else:
            quota = int(team.quota * scale)
        most = capacity if team.borrow is None else min(quota + team.borrow, capacity)
        found[team.name] = TeamQuota(team=team, quota=quota, most=most)
    return found


def weigh_jobs(jobs: Sequence[Demand], allowances: Mapping[str, TeamQuota]) -> Floats:
    """How much each job's progress counts: its priority, and what its team has had lately."""
    priority = np.array([job.priority for job in jobs], dtype=np.float64)
    weights = 2.0 ** np.clip(priority, -_STRONGEST, _STRONGEST)
    if not allowances:
        return weights
    used = sum(one.team.used_device_s for one in allowances.values())
    due = sum(one.team.weight for one in allowances.values())
    favour: dict[str, float] = {}
    for name, one in allowances.items():
        fair = one.team.weight / due if due else 1.0
        had = one.team.used_device_s / used if used else fair
        favour[name] = float(np.clip(fair / max(had, 1e-9), 1 / _FAVOUR, _FAVOUR)) * one.team.weight
    return weights * np.array([favour[job.team] for job in jobs])


def find_must_run(
    jobs: Sequence[Demand],
    least: NDArray[np.int64],
    *,
    now: float,
    capacity: int,
    manners: FairnessRules,
    allowances: Mapping[str, TeamQuota],
    waiting_since: Mapping[str, float],
    taken: Mapping[str, int],
) -> Bools:
    """Who must not be left with nothing.

    ``least`` is each job's smallest size, 0 if it cannot run; ``waiting_since`` is since when each
    waits, or since when it runs (resized or not); ``taken`` is what pinned jobs of each team hold.
    """
    must_run = np.zeros(len(jobs), dtype=bool)
    lowest = min((job.priority for job in jobs), default=0)
    claims: list[tuple[int, float, float, int]] = []
    for row, (job, need) in enumerate(zip(jobs, least.tolist(), strict=True)):
        if need > 0:
            claim = _claim(job, lowest, now, manners, waiting_since)
            if claim is not None:
                claims.append((*claim, row))
    left = capacity
    used = dict(taken)
    for _, _, _, row in sorted(claims):
        team = jobs[row].team
        need = int(least[row])
        allowance = allowances.get(team)
        if allowance is not None and used.get(team, 0) + need > allowance.most:
            continue
        if need <= left:
            must_run[row] = True
            left -= need
            used[team] = used.get(team, 0) + need
    return must_run


def _claim(
    job: Demand,
    lowest: int,
    now: float,
    manners: FairnessRules,
    waiting_since: Mapping[str, float],
) -> tuple[int, float, float] | None:
    """Kind of claim, and the order among equals; None where speed alone decides."""
    claim: tuple[int, float, float] | None = None
    if job.held.shares:
        began_at = waiting_since.get(job.id, now if job.held_since is None else job.held_since)
        if not job.is_preemptible:
            claim = (0, 0.0, job.submitted_at)
        elif now - began_at < manners.turn_s:
            claim = (1, began_at, job.submitted_at)
    elif now - (waits_from := waiting_since.get(job.id, job.submitted_at)) >= manners.patience_s:
        claim = (2, -float(job.priority), waits_from)
    if claim is None and job.priority > lowest:
        claim = (3, -float(job.priority), job.submitted_at)
    return claim


def keep_recent_sizes(
    values: Floats,
    jobs: Sequence[Demand],
    devices: NDArray[np.int64],
    *,
    now: float,
    capacity: int,
    dwell_s: float,
) -> None:
    """Take away sizes below what a job has been given only just now, as long as all that fits."""
    if dwell_s <= 0:
        return
    fresh = [
        row
        for row, job in enumerate(jobs)
        if job.held and job.held_since is not None and now - job.held_since < dwell_s
    ]
    if sum(jobs[row].held.devices for row in fresh) > capacity:
        return
    for row in fresh:
        smaller = devices < jobs[row].held.devices
        if np.isfinite(values[row, ~smaller]).any():
            values[row, smaller] = -np.inf


def limit_teams(
    jobs: Sequence[Demand], allowances: Mapping[str, TeamQuota], taken: Mapping[str, int]
) -> list[TeamLimits]:
    """The teams as the knapsack sees them; ``taken`` is what their pinned jobs hold."""
    rows: dict[str, list[int]] = {}
    for row, job in enumerate(jobs):
        rows.setdefault(job.team, []).append(row)
    found: list[TeamLimits] = []
    for name, own in rows.items():
        one = allowances[name]
        has = taken.get(name, 0)
        found.append(
            TeamLimits(
                rows=np.array(own, dtype=np.int64),
                least=max(one.quota - has, 0),
                most=max(one.most - has, 0),
            )
        )
    return found
