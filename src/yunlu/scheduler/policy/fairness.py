"""Claims, priorities and team quotas: what goes before speed.

Claims in this order: jobs that cannot be stopped, jobs that have only just started, jobs that have
waited too long, higher priority. So a job that has started gets a turn, and no job waits for ever.
All other devices go where they bring the most progress. A team can always claim its quota; other teams
may borrow what it does not use, and lose it when it is claimed.
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

_MAX_PRIORITY = 3
"""Priorities beyond this add no weight to devices above a job's minimum."""
_MAX_USAGE_FACTOR = 2.0
"""Factor by which a team counts more or less for having used little or much lately, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessRules:
    """How long jobs wait and stay."""

    max_wait_s: float = 7200.0
    """A job that has waited this long for its first devices goes before all others."""
    min_run_s: float = 300.0
    """A job that has started is not stopped before this; it may be shrunk to its minimum."""
    min_hold_s: float = 0.0
    """A job that has just been given devices keeps at least as many for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamQuota:
    """Devices of one team."""

    team: Team
    quota: int
    """Devices it can always claim."""
    limit: int
    """Devices it may hold: its quota and what it may borrow."""


def compute_quotas(
    teams: Sequence[Team], jobs: Sequence[Demand], capacity: int
) -> dict[str, TeamQuota]:
    """Quota and limit of each team; empty where there are no teams."""
    if not teams:
        return {}
    known = {team.name: team for team in teams}
    for job in jobs:
        known.setdefault(job.team, Team(name=job.team))
    declared = sum(team.quota for team in known.values() if team.quota is not None)
    open_ended = [team for team in known.values() if team.quota is None]
    weight = sum(team.weight for team in open_ended)
    scale = min(1.0, capacity / declared) if declared else 1.0
    left = max(capacity - declared, 0)
    quotas: dict[str, TeamQuota] = {}
    for team in known.values():
        if team.quota is None:
            quota = int(left * team.weight / weight) if weight else 0
        else:
            quota = int(team.quota * scale)
        limit = capacity if team.borrow is None else min(quota + team.borrow, capacity)
        quotas[team.name] = TeamQuota(team=team, quota=quota, limit=limit)
    return quotas


def weigh_jobs(jobs: Sequence[Demand], quotas: Mapping[str, TeamQuota]) -> Floats:
    """Weight of each job's progress: its priority, and what its team has used lately."""
    priority = np.array([job.priority for job in jobs], dtype=np.float64)
    weights = 2.0 ** np.clip(priority, -_MAX_PRIORITY, _MAX_PRIORITY)
    if not quotas:
        return weights
    total_used = sum(quota.team.used_device_s for quota in quotas.values())
    total_weight = sum(quota.team.weight for quota in quotas.values())
    team_weights: dict[str, float] = {}
    for name, quota in quotas.items():
        fair = quota.team.weight / total_weight if total_weight else 1.0
        used = quota.team.used_device_s / total_used if total_used else fair
        factor = np.clip(fair / max(used, 1e-9), 1 / _MAX_USAGE_FACTOR, _MAX_USAGE_FACTOR)
        team_weights[name] = float(factor) * quota.team.weight
    return weights * np.array([team_weights[job.team] for job in jobs])


def find_must_run(
    jobs: Sequence[Demand],
    min_devices: NDArray[np.int64],
    *,
    now: float,
    capacity: int,
    rules: FairnessRules,
    quotas: Mapping[str, TeamQuota],
    waiting_since: Mapping[str, float],
    pinned_devices: Mapping[str, int],
) -> Bools:
    """Which jobs must not be left with nothing.

    Args:
        jobs: All jobs.
        min_devices: Fewest devices each can run on; 0 if it cannot run.
        now: The time of the decision.
        capacity: Devices that are free for all these jobs.
        rules: How long jobs wait and stay.
        quotas: By team; empty where there are no teams.
        waiting_since: Since when each job waits, or since when it runs (resized or not).
        pinned_devices: Devices that pinned jobs of each team hold.
    """
    must_run = np.zeros(len(jobs), dtype=bool)
    lowest = min((job.priority for job in jobs), default=0)
    claims: list[tuple[int, float, float, int]] = []
    for row, (job, needed) in enumerate(zip(jobs, min_devices.tolist(), strict=True)):
        if needed > 0:
            claim = _claim(job, lowest, now, rules, waiting_since)
            if claim is not None:
                claims.append((*claim, row))
    left = capacity
    used = dict(pinned_devices)
    for _, _, _, row in sorted(claims):
        team = jobs[row].team
        needed = int(min_devices[row])
        quota = quotas.get(team)
        if quota is not None and used.get(team, 0) + needed > quota.limit:
            continue
        if needed <= left:
            must_run[row] = True
            left -= needed
            used[team] = used.get(team, 0) + needed
    return must_run


def _claim(
    job: Demand,
    lowest: int,
    now: float,
    rules: FairnessRules,
    waiting_since: Mapping[str, float],
) -> tuple[int, float, float] | None:
    """Rank of a claim, and its order among equals; None where speed alone decides."""
    claim: tuple[int, float, float] | None = None
    if job.held.shares:
        started_at = waiting_since.get(job.id, now if job.held_since is None else job.held_since)
        if not job.is_preemptible:
            claim = (0, 0.0, job.submitted_at)
        elif now - started_at < rules.min_run_s:
            claim = (1, started_at, job.submitted_at)
    elif now - (waits_from := waiting_since.get(job.id, job.submitted_at)) >= rules.max_wait_s:
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
    hold_s: float,
) -> None:
    """Forbid sizes below what a job was given less than ``hold_s`` ago, if all of these fit."""
    if hold_s <= 0:
        return
    recent = [
        row
        for row, job in enumerate(jobs)
        if job.held and job.held_since is not None and now - job.held_since < hold_s
    ]
    if sum(jobs[row].held.devices for row in recent) > capacity:
        return
    for row in recent:
        is_smaller = devices < jobs[row].held.devices
        if np.isfinite(values[row, ~is_smaller]).any():
            values[row, is_smaller] = -np.inf


def limit_teams(
    jobs: Sequence[Demand], quotas: Mapping[str, TeamQuota], pinned_devices: Mapping[str, int]
) -> list[TeamLimits]:
    """Limits for the jobs of each team that are not pinned; empty where there are no teams."""
    if not quotas:
        return []
    rows: dict[str, list[int]] = {}
    for row, job in enumerate(jobs):
        rows.setdefault(job.team, []).append(row)
    limits: list[TeamLimits] = []
    for name, team_rows in rows.items():
        quota, pinned = quotas[name], pinned_devices.get(name, 0)
        limits.append(
            TeamLimits(
                rows=np.array(team_rows, dtype=np.int64),
                min_devices=max(quota.quota - pinned, 0),
                max_devices=max(quota.limit - pinned, 0),
            )
        )
    return limits
