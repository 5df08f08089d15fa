"""The pool of this machine's home directory."""
# ruff: noqa: PLC0415 (a verb imports only what it needs)

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.client.local_runs import find_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from yunlu.planning.plan import Plan
    from yunlu.scheduler.pool_view import Explanation, PoolDown, PoolUp, PoolView, QueuedRun
    from yunlu.scheduler.queue import QueueEntry
    from yunlu.spec.job import Job


_LOOK_S, _LOOK_AFAR_S = 1.0, 3.0
"""Seconds between two observations of the runs on this machine, and on a cluster."""


class LocalPool:
    """As ``PoolVerbs``."""

    def submit(
        self,
        job: Job,
        *,
        source: Path | None = None,
        plan: Plan | None = None,
        priority: int = 0,
        team: str = "",
        min_devices: int | None = None,
        max_devices: int | None = None,
        deadline: str | None = None,
        budget: float | None = None,
    ) -> QueuedRun:
        """As ``PoolVerbs.submit``."""
        from yunlu.jobs import lifecycle
        from yunlu.jobs.submitted_plan import resolve_plan
        from yunlu.scheduler.pool_view import view_submitted
        from yunlu.scheduler.queue import enqueue, read_options

        options = read_options(
            priority=priority,
            team=team,
            min_devices=min_devices,
            max_devices=max_devices,
            deadline=deadline,
            budget_dollars=budget,
        )
        job, plan = resolve_plan(job, plan)
        run = enqueue(job, options, source=source, plan=plan)
        return view_submitted(lifecycle.home(), run)

    def pool(self) -> PoolView:
        """As ``PoolVerbs.pool``."""
        from yunlu.jobs import lifecycle
        from yunlu.scheduler.pool_view import view_pool

        return view_pool(lifecycle.home())

    def pool_up(
        self,
        *,
        executor: str = "local",
        policy: str = "yunlu",
        round_s: float = 30.0,
        quotas: Mapping[str, int] = {},
        borrow: Mapping[str, int] = {},
        weights: Mapping[str, float] = {},
        idle_s: float = 300.0,
        max_nodes: int | None = None,
        max_dollars_per_hour: float | None = None,
        team_dollars_per_hour: Mapping[str, float] = {},
        prices: Mapping[str, float] = {},
    ) -> PoolUp:
        """As ``PoolVerbs.pool_up``."""
        from yunlu.core.settings import read_settings
        from yunlu.jobs import lifecycle
        from yunlu.scheduler.pool_store import PoolSettings
        from yunlu.scheduler.pool_view import start_pool

        settings = PoolSettings(
            executor=executor,
            policy=policy,
            round_s=round_s,
            look_s=_LOOK_S if executor.startswith("local") else _LOOK_AFAR_S,
            quotas=dict(quotas),
            borrow=dict(borrow),
            weights=dict(weights),
            team_dollars_per_hour=dict(team_dollars_per_hour),
            prices=dict(prices),
            idle_s=idle_s,
            max_nodes=max_nodes,
            max_dollars_per_hour=max_dollars_per_hour,
            dollars_per_hour=read_settings().dollars_per_hour,
        )
        return start_pool(lifecycle.home(), settings)

    def pool_down(self, *, stop_jobs: bool = False) -> PoolDown:
        """As ``PoolVerbs.pool_down``."""
        from yunlu.jobs import lifecycle
        from yunlu.scheduler.pool_view import stop_pool

        return stop_pool(lifecycle.home(), stop_jobs=stop_jobs)

    def pool_why(self, run: str) -> Explanation:
        """As ``PoolVerbs.pool_why``."""
        from yunlu.jobs import lifecycle
        from yunlu.scheduler.pool_view import explain

        return explain(lifecycle.home(), find_run(run))

    def pool_change(
        self,
        run: str,
        *,
        priority: int | None = None,
        deadline: str | None = None,
        budget: str | None = None,
        min_devices: int | None = None,
        max_devices: int | None = None,
    ) -> QueueEntry:
        """As ``PoolVerbs.pool_change``."""
        from yunlu.scheduler.queue import change_terms

        return change_terms(
            find_run(run),
            priority=priority,
            deadline=deadline,
            budget=budget,
            min_devices=min_devices,
            max_devices=max_devices,
        )
