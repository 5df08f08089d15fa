"""Pool view: nodes, queue, placements and reasons as values."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from yunlu.core.errors import StoreError, YunluError, nearest
from yunlu.core.value import Value
from yunlu.executors.known_addresses import remember_address, require_known
from yunlu.jobs import lifecycle
from yunlu.runs.states import RunState
from yunlu.scheduler.control import bring_down, bring_up, find_service
from yunlu.scheduler.pool_store import PoolSettings, PoolStore
from yunlu.scheduler.queue import read_entry, scan

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

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
