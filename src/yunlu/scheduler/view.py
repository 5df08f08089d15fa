"""Published view of the pool, built from the scheduler's state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from yunlu.scheduler.run_status import Phase, count_samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.executors.usage import NodeUse
    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.forecast import QueueForecast
    from yunlu.scheduler.pending_nodes import PendingNode
    from yunlu.scheduler.policy.values import Decision
    from yunlu.scheduler.pool_store import PoolSettings
    from yunlu.scheduler.run_status import ScheduledRun
    from yunlu.scheduler.usage_monitor import Usage, UsageMonitor


def make_view(
    scheduled_runs: Sequence[ScheduledRun],
    nodes: Sequence[Node],
    decision: Decision,
    forecasts: Mapping[str, QueueForecast],
    *,
    pending_nodes: Sequence[PendingNode] = (),
    now: float,
    usage_monitor: UsageMonitor,
    settings: PoolSettings,
    limits: str = "",
    decided_ms: float,
    troubles: Mapping[str, str],
) -> dict[str, Any]:
    """Everything that ``yunlu pool`` shows; strict JSON, null where unknown."""
    held = {node.name: 0 for node in nodes}
    for scheduled in scheduled_runs:
        for name, count in scheduled.allocation.claims.items():
            held[name] = held.get(name, 0) + count
    return {
        "at": now,
        "policy": settings.policy,
        "executor": settings.executor,
        "limits": limits,
        "nodes": [
            _node(node, held[node.name], usage_monitor.nodes.get(node.name)) for node in nodes
        ],
        "pending_nodes": [
            {
                "kind": pending_node.kind,
                "devices": pending_node.devices,
                "node": pending_node.node,
                "at": pending_node.at,
            }
            for pending_node in pending_nodes
        ],
        "devices": sum(node.devices for node in nodes),
        "held": sum(held.values()),
        "dollars_per_hour": sum(node.dollars_per_hour for node in nodes),
        "machine": dict(usage_monitor.machine),
        "decided_ms": round(decided_ms, 3),
        "runs": [
            _run(
                scheduled,
                decision,
                forecasts.get(scheduled.id),
                usage_monitor.usage.get(scheduled.id),
            )
            for scheduled in scheduled_runs
            if scheduled.allocation.claims
            or scheduled.phase is Phase.PAUSED
            or not scheduled.phase.is_over
        ],
        "troubles": dict(troubles),
    }


def _node(node: Node, held: int, use: NodeUse | None) -> dict[str, Any]:
    return {
        "name": node.name,
        "type": node.type,
        "devices": node.devices,
        "held": held,
        "dollars_per_hour": node.dollars_per_hour,
        "is_spot": node.is_spot,
        "is_leaving": node.is_leaving,
        "cpu": use.cpu if use else None,
        "memory": use.memory if use else None,
        "gpus": [list(gpu) for gpu in use.gpus] if use else [],
    }


def _run(
    scheduled: ScheduledRun,
    decision: Decision,
    predicted: QueueForecast | None,
    usage: Usage | None,
) -> dict[str, Any]:
    entry, allocation = scheduled.entry, scheduled.allocation
    done, remaining = count_samples(scheduled)
    pace_s = scheduled.progress.pace_s(allocation.placement.devices)
    batch = scheduled.progress.batch
    wanted = decision.placements.get(scheduled.id)
    reason = decision.reasons.get(scheduled.id)
    whole = done + remaining if remaining is not None else None
    waits = scheduled.observation.waits_for if scheduled.observation.is_alive else ""
    return {
        "id": scheduled.id,
        "phase": scheduled.phase.value,
        "state": scheduled.observation.state.value,
        "priority": entry.priority,
        "team": entry.team,
        "devices": allocation.placement.devices,
        "shares": [list(share) for share in allocation.shares],
        "wanted": wanted.devices if wanted else 0,
        "least": entry.request.least,
        "most": entry.request.most,
        "submitted_at": entry.submitted_at,
        "deadline_at": entry.deadline_at,
        "progress": done / whole if whole else None,
        "samples_per_s": batch / pace_s if batch and pace_s else None,
        "cores": usage.cores if usage else None,
        "memory_bytes": usage.memory_bytes if usage else None,
        "restarts": allocation.restarts,
        "device_s": allocation.served_device_s,
        "dollars": allocation.spent_dollars,
        "start_at": _finite(predicted.start_at) if predicted else None,
        "end_at": _finite(predicted.end_at) if predicted else None,
        "reason": allocation.given_up
        or waits
        or (reason.text if reason else "")
        or allocation.failure,
        "problem": scheduled.problem,
    }


def _finite(at: float | None) -> float | None:
    return at if at is not None and math.isfinite(at) else None
