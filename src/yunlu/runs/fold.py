"""State of a run, folded from its events. Pure: the same events give the same state, whoever reads them.

``RunSummary`` is what one row of the index holds; ``RunView`` is everything the events say. Both are
folded one event at a time, so that whoever follows a run goes on from where it was.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from yunlu.core.value import Value
from yunlu.planning.plan import Measurement, Plan
from yunlu.runs.events import (
    AttemptStarted,
    BatchChanged,
    CheckpointSaved,
    CommunicationChosen,
    DataOpened,
    EnvironmentRecorded,
    ErrorRaised,
    Evaluated,
    MemoryExhausted,
    ModelBuilt,
    ModelExported,
    PlanMade,
    PrecisionChanged,
    PredictionMeasured,
    ProgressReported,
    RolledBack,
    StateChanged,
    StepSkipped,
    StragglerSeen,
    TraceWritten,
    WarningRaised,
    WorkerGroupFormed,
    WorkerLost,
)
from yunlu.runs.states import RunState, replay_move
from yunlu.runs.summary import RunSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore

Incident = StepSkipped | RolledBack | MemoryExhausted | PrecisionChanged
"""What the engine did about trouble, or to avoid it."""


StatusT = TypeVar("StatusT", bound=RunSummary)


def advance(status: StatusT, event: Event, *, is_first: bool = False) -> StatusT:
    """The status after one more event."""
    changes: dict[str, Any] = {"updated_at": event.at}
    if is_first:
        changes["created_at"] = event.at
    match event:
        case StateChanged():
            changes |= _advance_state(status, event)
        case AttemptStarted():
            changes |= {"pid": event.pid, "process_started_at": event.process_started_at}
        case PlanMade():
            changes |= {"steps": event.plan.steps, "metric": event.plan.best_metric}
        case BatchChanged():
            changes["steps"] = event.steps
        case Evaluated():
            metric, value = headline(event, status.metric)
            changes |= {"metric": metric, "metric_value": value}
            changes["step"] = max(status.step or 0, event.step)
        case CheckpointSaved():
            changes["step"] = max(status.step or 0, event.step)
        case ErrorRaised():
            changes["error"] = event.message
        case WorkerGroupFormed():
            changes |= {"layout": event.layout, "workers": len(event.ranks)}
        case _:
            pass
    return status.model_copy(update=changes)


def headline(evaluation: Evaluated, wanted: str | None) -> tuple[str, float | None]:
    """The metric to quote: the one the plan watches, else the first, else the loss."""
    figures = {**evaluation.metrics, "loss": evaluation.loss}
    name = wanted if wanted is not None and wanted in figures else next(iter(figures))
    value = figures[name]
    return name, None if math.isnan(value) else value  # a database has no NaN, only nothing


def _advance_state(status: RunSummary, event: StateChanged) -> dict[str, Any]:
    if replay_move(status.state, event.state) is not event.state:
        return {}
    changes: dict[str, Any] = {"state": event.state}
    if event.state is RunState.PENDING:  # a new attempt: the old worker and its error are history
        changes |= {"pid": None, "process_started_at": None, "error": None}
    if event.state is RunState.RUNNING and event.resumed_from_step is not None:
        changes["step"] = event.resumed_from_step  # later steps of the old attempt are undone
    if event.state is RunState.LOST:
        changes["error"] = event.reason
    return changes


class Attempt(Value):
    """One attempt at the run, from the start of its worker to the last event."""

    number: int
    """1 for the first."""
    started_at: float
    """When it began; for a worker of its own, when its process started."""
    began_at: float
    """When it wrote its first event."""
    last_event_at: float
    """Of the attempt's own events; others may report its loss hours later."""
    resumed_from: int | None = None
    """Step it continues from; None for the first attempt, or before it trains."""


class GroupGeneration(WorkerGroupFormed):
    """One generation of the worker group, and the attempt it belongs to."""

    attempt: int

    @property
    def key(self) -> tuple[int, int]:
        """Identifies it among all attempts."""
        return self.attempt, self.generation


class LostWorker(WorkerLost):
    """A lost worker, and the attempt and generation it belonged to."""

    attempt: int
    struck: tuple[int, int] | None
    """Attempt and generation."""


class RunView(Value):
    """Everything that the events of a run say."""

    status: RunSummary = RunSummary()
    reason: str | None = None
    """Of the state, where one was given."""
    directory: str | None = None
    """Where the run was submitted."""
    events: int = 0
    """Number of events taken in."""
    attempts: tuple[Attempt, ...] = ()
    environment: EnvironmentRecorded | None = None
    data: DataOpened | None = None
    model: ModelBuilt | None = None
    plan: Plan | None = None
    batches: tuple[BatchChanged, ...] = ()
    scored: tuple[tuple[int, Evaluated], ...] = ()
    """Evaluations of steps that are not undone, each with its place in the log."""
    saved: tuple[tuple[int, CheckpointSaved], ...] = ()
    """Checkpoints, likewise."""
    incidents: tuple[Incident, ...] = ()
    """In their order, those of undone steps included."""
    warnings: tuple[WarningRaised, ...] = ()
    errors: tuple[ErrorRaised, ...] = ()
    error: ErrorRaised | None = None
    """Of the newest attempt."""
    worker_groups: tuple[GroupGeneration, ...] = ()
    lost_workers: tuple[LostWorker, ...] = ()
    stragglers: tuple[StragglerSeen, ...] = ()
    communications: tuple[CommunicationChosen, ...] = ()
    trace: TraceWritten | None = None
    measured: Measurement | None = None
    export: ModelExported | None = None
    progress: ProgressReported | None = None
    broken_since: int | None = None
    """Place of the first lost worker since the newest generation was formed."""

    @property
    def state(self) -> RunState:
        """Of the run."""
        return self.status.state

    @property
    def evaluations(self) -> tuple[Evaluated, ...]:
        """In their order, without those of steps that were undone."""
        return tuple(event for _, event in self.scored)

    @property
    def checkpoints(self) -> tuple[CheckpointSaved, ...]:
        """In their order, without those of steps that were undone."""
        return tuple(event for _, event in self.saved)

    @property
    def worker_group(self) -> GroupGeneration | None:
        """The newest generation."""
        return self.worker_groups[-1] if self.worker_groups else None


def fold(events: Iterable[Event]) -> RunView:
    """The view after all events."""
    view = RunView()
    for event in events:
        view = apply(view, event)
    return view


def read_view(run: RunStore) -> RunView:
    """The view of a stored run, from its whole log."""
    return fold(event for event, _ in run.read_events())


def apply(view: RunView, event: Event) -> RunView:
    """The view after one more event."""
    changes: dict[str, Any] = {
        "status": advance(view.status, event, is_first=view.events == 0),
        "events": view.events + 1,
        "attempts": _extend_attempt(view, event),
    }
    kind = type(event)
    if kind in _NEWEST:
        changes[_NEWEST[kind]] = event
    elif kind in _LISTED:
        field = _LISTED[kind]
        changes[field] = (*getattr(view, field), event)
    if kind in _FOLDED:
        changes |= _FOLDED[kind](view, event)
    return view.model_copy(update=changes)


def _extend_attempt(view: RunView, event: Event) -> tuple[Attempt, ...]:
    # Others write "pending" and "lost", perhaps hours after the worker's last sign.
    is_outside = isinstance(event, StateChanged) and event.state in _OUTSIDE
    if not view.attempts or is_outside or event.at <= view.attempts[-1].last_event_at:
        return view.attempts
    newest = view.attempts[-1].model_copy(update={"last_event_at": event.at})
    return (*view.attempts[:-1], newest)


def _fold_attempt(view: RunView, event: AttemptStarted) -> dict[str, Any]:
    attempt = Attempt(
        number=len(view.attempts) + 1,
        started_at=min(event.began_at, event.at),
        began_at=event.at,
        last_event_at=event.at,
    )
    return {"attempts": (*view.attempts, attempt)}


def _fold_state(view: RunView, event: StateChanged) -> dict[str, Any]:
    changes: dict[str, Any] = {"directory": view.directory or event.directory}
    if replay_move(view.state, event.state) is event.state:
        changes["reason"] = event.reason
    if event.state is RunState.PENDING:
        changes["error"] = None
    if event.state is RunState.RUNNING and len(view.attempts) > 1:
        to_step = event.resumed_from_step or 0
        changes |= _undo(view, before=view.events, to_step=to_step)
        attempts = _extend_attempt(view, event)
        if attempts[-1].resumed_from is None:
            newest = attempts[-1].model_copy(update={"resumed_from": to_step})
            changes["attempts"] = (*attempts[:-1], newest)
    return changes


def _fold_rollback(view: RunView, event: RolledBack) -> dict[str, Any]:
    return _undo(view, before=view.events, to_step=event.to_step)


def _fold_group(view: RunView, event: WorkerGroupFormed) -> dict[str, Any]:
    attempt = max(len(view.attempts), 1)
    group = GroupGeneration.model_construct(attempt=attempt, **dict(event))
    changes: dict[str, Any] = {
        "worker_groups": (*view.worker_groups, group),
        "broken_since": None,
    }
    if event.redone_steps:
        # Reported after its first step, which may stand before it in the log, but after the fault.
        before = view.events if view.broken_since is None else view.broken_since
        changes |= _undo(view, before=before, to_step=event.from_step)
    return changes


def _fold_loss(view: RunView, event: WorkerLost) -> dict[str, Any]:
    group = view.worker_group
    lost = LostWorker.model_construct(
        attempt=max(len(view.attempts), 1), struck=group.key if group else None, **dict(event)
    )
    broken_since = view.events if view.broken_since is None else view.broken_since
    return {"lost_workers": (*view.lost_workers, lost), "broken_since": broken_since}


def _undo(view: RunView, *, before: int, to_step: int) -> dict[str, Any]:
    """The run went back to a step: what was written before that place about later ones is void."""
    return {
        "scored": tuple(
            (index, event)
            for index, event in view.scored
            if index >= before or event.step <= to_step
        ),
        "saved": tuple(
            (index, event)
            for index, event in view.saved
            if index >= before or event.step <= to_step
        ),
    }


_OUTSIDE = frozenset({RunState.PENDING, RunState.LOST})
_NEWEST: dict[type, str] = {
    EnvironmentRecorded: "environment",
    DataOpened: "data",
    ModelBuilt: "model",
    ErrorRaised: "error",
    ModelExported: "export",
    TraceWritten: "trace",
    ProgressReported: "progress",
}
_LISTED: dict[type, str] = {
    WarningRaised: "warnings",
    StepSkipped: "incidents",
    RolledBack: "incidents",
    MemoryExhausted: "incidents",
    PrecisionChanged: "incidents",
    StragglerSeen: "stragglers",
    CommunicationChosen: "communications",
    BatchChanged: "batches",
}
_FOLDED: dict[type, Callable[[RunView, Any], dict[str, Any]]] = {
    StateChanged: _fold_state,
    AttemptStarted: _fold_attempt,
    PlanMade: lambda _, event: {"plan": event.plan},
    PredictionMeasured: lambda _, event: {"measured": event.measured},
    Evaluated: lambda view, event: {"scored": (*view.scored, (view.events, event))},
    CheckpointSaved: lambda view, event: {"saved": (*view.saved, (view.events, event))},
    ErrorRaised: lambda view, event: {"errors": (*view.errors, event)},
    RolledBack: _fold_rollback,
    WorkerGroupFormed: _fold_group,
    WorkerLost: _fold_loss,
}
