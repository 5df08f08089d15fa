"""Pool view: nodes, queue, placements and reasons as values, built from the scheduler's state."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from yunlu.core.errors import StoreError, YunluError, nearest
from yunlu.core.units import show_duration
from yunlu.core.value import Value
from yunlu.executors.registry import remember_address, require_known
from yunlu.jobs import lifecycle
from yunlu.jobs.lifecycle import read_record
from yunlu.runs.states import RunState
from yunlu.scheduler.allocation_record import read_allocation
from yunlu.scheduler.control import bring_down, bring_up, find_service
from yunlu.scheduler.pool_store import PoolSettings, PoolStore
from yunlu.scheduler.queue import read_entry, scan
from yunlu.scheduler.run_status import Phase, count_samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from yunlu.executors.usage import NodeUse
    from yunlu.hardware.fleet import Node
    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.allocation_record import AllocationRecord
    from yunlu.scheduler.forecast import QueueForecast
    from yunlu.scheduler.policy.values import Decision
    from yunlu.scheduler.queue import QueueEntry
    from yunlu.scheduler.run_status import ScheduledRun
    from yunlu.scheduler.scaling import PendingNode
    from yunlu.scheduler.usage_monitor import Usage, UsageMonitor

_ENDED = {"pause": "paused", "stop": "stopped"}
_PHASES = {
    RunState.PLANNING: "starting",
    RunState.RUNNING: "running",
    RunState.STOPPING: "leaving",
}
"""Of runs that continue while no service is up."""


class PoolNode(Value):
    """A node and the use of its devices."""

    name: str
    type: str
    devices: int
    held: int
    """Devices that runs hold."""
    dollars_per_hour: float = 0.0
    is_spot: bool = False
    is_leaving: bool = False
    cpu: float | None = None
    """Share of the processors in use; None where not measured."""
    memory: float | None = None
    gpus: tuple[tuple[float, float], ...] = ()
    """Share of time and of memory in use, of each GPU."""


class RequestedNode(Value):
    """A node that was requested and is not there yet."""

    kind: str
    devices: int
    node: str
    at: float
    """When it is expected."""


class PoolRun(Value):
    """A run in the queue of the pool, or on its devices; None where a figure is not known."""

    id: str
    phase: str
    state: RunState
    priority: int
    team: str
    devices: int | None = None
    """Devices it holds."""
    shares: tuple[tuple[str, int], ...] = ()
    """Nodes and the devices it holds on each."""
    wanted: int | None = None
    """Devices that the pool last decided on."""
    least: int = 1
    most: int = 1
    submitted_at: float
    deadline_at: float | None = None
    progress: float | None = None
    samples_per_s: float | None = None
    cores: float | None = None
    memory_bytes: float | None = None
    restarts: int = 0
    device_s: float = 0.0
    dollars: float | None = None
    start_at: float | None = None
    """Predicted."""
    end_at: float | None = None
    """Predicted."""
    reason: str = ""
    problem: str = ""


class PoolView(Value):
    """The pool as its service last saw it; without a service, the queue."""

    is_up: bool
    pid: int | None = None
    """Of the service."""
    at: float | None = None
    """When it was seen."""
    policy: str | None = None
    executor: str | None = None
    limits: str = ""
    nodes: tuple[PoolNode, ...] = ()
    pending_nodes: tuple[RequestedNode, ...] = ()
    devices: int = 0
    held: int = 0
    dollars_per_hour: float = 0.0
    machine: dict[str, float | None] = Field(default_factory=dict)
    decided_ms: float | None = None
    """Time that the last decision took."""
    runs: tuple[PoolRun, ...] = ()
    troubles: dict[str, str] = Field(default_factory=dict)


class PoolUp(Value):
    """A pool that was brought up."""

    pid: int
    home: str
    view: PoolView
    settings: PoolSettings
    is_as_before: bool
    """No option was given: the settings are those of the last time."""


class PoolDown(Value):
    """A pool that was brought down."""

    was_up: bool
    stopped_jobs: bool


class QueuedRun(Value):
    """A run that was submitted to the pool."""

    run: str
    dir: str
    pool_is_up: bool
    least: int
    """Devices it needs at least."""
    is_rigid: bool
    """It runs on exactly that number of devices."""
    similar_team: str | None = None
    """A team with a quota and a similar name, where the run's own team has none."""
    rehearsal_note: str = ""
    """Why it was not rehearsed, or what the rehearsal found; empty where there is nothing to say."""


def view_pool(home: Path) -> PoolView:
    """What the service last saw; without one, the queue as stored."""
    result, view = find_service(home), PoolStore(home).read_view()
    if result is not None and view is not None:
        try:
            return PoolView.model_validate({"is_up": True, "pid": result.pid, **view})
        except ValidationError as error:
            raise StoreError(
                f"{PoolStore(home).view} cannot be read: {error.errors()[0]['msg']}",
                hint="yunlu pool down, then yunlu pool up",
            ) from error
    queued: list[PoolRun] = []
    troubles: dict[str, str] = {}
    for run in scan(home) if home.is_dir() else ():
        try:
            entry = _view_queued(run)
        except YunluError as error:  # one that cannot be read does not hide the others
            troubles[run.id] = str(error)
            continue
        if entry is not None:
            queued.append(entry)
    queued.sort(key=lambda run: (-run.priority, run.submitted_at))
    return PoolView(is_up=False, runs=tuple(queued), nodes=(), troubles=troubles)


def start_pool(home: Path, wanted: PoolSettings) -> PoolUp:
    """Bring the pool of a home up; without any option, as it was last up."""
    from yunlu.scheduler.policies import open_policy  # noqa: PLC0415 (arrays are slow to import)

    before = _find_settings(home, wanted)
    settings = before or wanted
    if before is None:
        remember_address(wanted.executor)  # the user has just given it
    require_known(settings.executor, named_by=f"the pool of {home}")
    open_policy(settings.policy)  # refused here rather than in the log of the service
    result = bring_up(home, settings)
    return PoolUp(
        pid=result.pid,
        home=str(home),
        view=view_pool(home),
        settings=settings,
        is_as_before=before is not None,
    )


def stop_pool(home: Path, *, stop_jobs: bool = False) -> PoolDown:
    """Bring the pool of a home down."""
    return PoolDown(was_up=bring_down(home, stop_jobs=stop_jobs), stopped_jobs=stop_jobs)


def view_submitted(home: Path, run: RunStore) -> QueuedRun:
    """A run that was just submitted."""
    entry = read_entry(run)
    assert entry is not None
    return QueuedRun(
        run=run.id,
        dir=run.address,
        pool_is_up=find_service(home) is not None,
        least=entry.request.least,
        is_rigid=entry.request.is_rigid,
        similar_team=_find_similar_team(home, entry.team),
    )


def _view_queued(run: RunStore) -> PoolRun | None:
    record, entry = lifecycle.read_record(run), read_entry(run)
    if entry is None or not (record.state.is_active or record.state.can_resume):
        return None
    return PoolRun(
        id=run.id,
        state=record.state,
        phase=_PHASES.get(record.state) or _ENDED.get(entry.wish, "waiting"),
        priority=entry.priority,
        team=entry.team,
        progress=record.progress,
        submitted_at=entry.submitted_at,
    )


def _find_settings(home: Path, wanted: PoolSettings) -> PoolSettings | None:
    """Settings of the last time, where no option was given; none where the pool was never up."""
    default = PoolSettings(dollars_per_hour=wanted.dollars_per_hour)
    if wanted != default:
        return None
    with suppress(StoreError):  # of another version: a new one is written
        before = PoolStore(home).read_settings()
        return before if before != default else None
    return None


def _find_similar_team(home: Path, team: str) -> str | None:
    with suppress(StoreError):  # of another version
        settings = PoolStore(home).read_settings()
        if team and settings is not None and team not in settings.quotas:
            return nearest(team, settings.quotas)
    return None


_FEW = 8


class LoggedDecision(Value):
    """One decision on the run."""

    at: float
    code: str
    text: str
    was: int = 0
    devices: int = 0
    figures: dict[str, Any]


class Explanation(Value):
    """The answer to ``yunlu pool why``."""

    run: str
    standing: str
    """Current state, in one sentence."""
    holders: dict[str, int]
    """Devices that each run holds now."""
    history: tuple[LoggedDecision, ...]
    """Decisions about the run, oldest first."""

    @property
    def last(self) -> LoggedDecision | None:
        """The newest decision."""
        return self.history[-1] if self.history else None


def explain(home: Path, run: RunStore) -> Explanation:
    """Build the explanation from the stored files."""
    entry = read_entry(run)
    if entry is None:
        raise StoreError(
            f"{run.id} is not in the queue: the pool decides nothing about it",
            hint="yunlu submit queues a job; yunlu ps lists every run",
        )
    pool_store = PoolStore(home)
    view = pool_store.read_view() or {}
    is_up = find_service(home) is not None
    runs: list[dict[str, Any]] = view.get("runs") or []
    own = next((one_run for one_run in runs if one_run.get("id") == run.id), None)
    holders = {
        str(one_run["id"]): int(one_run["devices"]) for one_run in runs if one_run.get("devices")
    }
    history = [
        result for line in pool_store.read_decisions(run.id) if (result := _read_decision(line))
    ]
    return Explanation(
        run=run.id,
        standing=_standing(run, entry, read_allocation(run), own, is_up=is_up),
        holders=holders if is_up else {},
        history=tuple(history[-_FEW:]),
    )


def _standing(
    run: RunStore,
    entry: QueueEntry,
    allocation: AllocationRecord,
    own: dict[str, Any] | None,
    *,
    is_up: bool,
) -> str:
    state = read_record(run).state
    again = f"yunlu resume {run.id} queues it again"
    wait_s = allocation.wait_s() - (time.time() - (allocation.failed_at or 0.0))
    times = "once" if allocation.failures == 1 else f"{allocation.failures} times"
    cases = (
        (not state.is_active and not state.can_resume, f"{state}"),
        (bool(allocation.given_up), f"given up: {allocation.given_up}"),
        (entry.wish == "pause" and not allocation.shares, f"paused; {again}"),
        (entry.wish == "stop" and not allocation.shares, f"stopped by its owner; {again}"),
        (not is_up, f"{state}, and no pool is up: yunlu pool up starts one"),
        (
            allocation.is_backing_off(time.time()),
            f"failed {times}, tried again in {show_duration(max(wait_s, 0.0))}: {allocation.failure}",
        ),
        (own is None, f"{state}; the pool has not looked at it yet"),
    )
    return next((text for holds, text in cases if holds), "") or _words(own or {})


def _words(own: dict[str, Any]) -> str:
    devices, phase = int(own.get("devices") or 0), str(own.get("phase"))
    text = f"{phase} on {devices} device{'s' * (devices != 1)}" if devices else phase
    if own.get("wanted") and own["wanted"] != devices:
        text += f", and to have {own['wanted']}"
    start_at, end_at = own.get("start_at"), own.get("end_at")
    if not devices and start_at is not None:
        text += f"; starts in about {show_duration(max(0.0, start_at - time.time()))}"
    if end_at is not None:
        text += f"; ends in about {show_duration(max(0.0, end_at - time.time()))}"
    return text


def _read_decision(line: dict[str, Any]) -> LoggedDecision | None:
    try:
        return LoggedDecision(
            at=float(line["at"]),
            code=str(line["code"]),
            text=str(line["text"]),
            was=sum(int(count) for _, count in line.get("was") or ()),
            devices=sum(int(count) for _, count in line.get("shares") or ()),
            figures=dict(line.get("figures") or {}),
        )
    except (KeyError, TypeError, ValueError):
        return None


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
