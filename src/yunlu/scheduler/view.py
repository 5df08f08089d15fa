"""What the pool looks like, as plain figures for a table, a script, or a page."""

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
    stands: Sequence[ScheduledRun],
    nodes: Sequence[Node],
    decision: Decision,
    forecasts: Mapping[str, QueueForecast],
    *,
    arrivals: Sequence[PendingNode] = (),
    now: float,
    gauge: UsageMonitor,
    settings: PoolSettings,
    limits: str = "",
    decided_ms: float,
    troubles: Mapping[str, str],
) -> dict[str, Any]:
    """Everything ``yunlu pool`` shows; strict JSON, with null for what is not known."""
    held = {node.name: 0 for node in nodes}
    for stand in stands:
        for name, count in stand.notes.claims.items():
            held[name] = held.get(name, 0) + count
    return {
        "at": now,
        "policy": settings.policy,
        "executor": settings.executor,
        "limits": limits,
        "nodes": [_node(node, held[node.name], gauge.nodes.get(node.name)) for node in nodes],
        "arrivals": [
            {"kind": each.kind, "devices": each.devices, "node": each.node, "at": each.at}
            for each in arrivals
        ],
        "devices": sum(node.devices for node in nodes),
        "held": sum(held.values()),
        "dollars_per_hour": sum(node.dollars_per_hour for node in nodes),
        "machine": dict(gauge.machine),
        "decided_ms": round(decided_ms, 3),
        "runs": [
            _run(stand, decision, forecasts.get(stand.id), gauge.usage.get(stand.id))
            for stand in stands
            if stand.notes.claims or stand.phase is Phase.PAUSED or not stand.phase.is_over
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
    stand: ScheduledRun, decision: Decision, foreseen: QueueForecast | None, usage: Usage | None
) -> dict[str, Any]:
    entry, notes = stand.entry, stand.notes
    done, remaining = count_samples(stand)
    pace_s = stand.course.pace_s(notes.placement.devices)
    batch = stand.course.batch
    wanted = decision.placements.get(stand.id)
    reason = decision.reasons.get(stand.id)
    whole = done + remaining if remaining is not None else None
    waits = stand.sight.waits_for if stand.sight.is_alive else ""
    return {
        "id": stand.id,
        "phase": stand.phase.value,
        "state": stand.sight.state.value,
        "priority": entry.priority,
        "team": entry.team,
        "devices": notes.placement.devices,
        "shares": [list(share) for share in notes.shares],
        "wanted": wanted.devices if wanted else 0,
        "least": entry.needs.least,
        "most": entry.needs.most,
        "submitted_at": entry.submitted_at,
        "deadline_at": entry.deadline_at,
        "progress": done / whole if whole else None,
        "samples_per_s": batch / pace_s if batch and pace_s else None,
        "cores": usage.cores if usage else None,
        "memory_bytes": usage.memory_bytes if usage else None,
        "restarts": notes.restarts,
        "device_s": notes.served_device_s,
        "dollars": notes.spent_dollars,
        "start_at": _finite(foreseen.start_at) if foreseen else None,
        "end_at": _finite(foreseen.end_at) if foreseen else None,
        "reason": notes.given_up or waits or (reason.text if reason else "") or notes.failure,
        "problem": stand.problem,
    }


def _finite(at: float | None) -> float | None:
    return at if at is not None and math.isfinite(at) else None
