"""State of a trial's run, folded from its events. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from yunlu.runs.events import AttemptStarted, Evaluated, StateChanged, WorkerGroupFormed
from yunlu.runs.fold import RunView, apply
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.runs.events import ErrorRaised, Event
    from yunlu.runs.run_store import RunStore


@dataclass(frozen=True, slots=True)
class RungScore:
    """One evaluation on the validation data."""

    rung: int
    step: int
    metrics: dict[str, float]
    at: float
    device_seconds: float
    """Used by the run until then, over all its attempts."""


@dataclass(slots=True, kw_only=True)
class TrialEvents:
    """A run as of the events read so far."""

    devices: int = 1
    """Held, or about to be assigned."""
    offset: int = 0
    view: RunView = field(default_factory=RunView)
    """The general fold of the events."""
    reason: str = ""
    """Why it is stopping or has stopped."""
    evaluated: dict[int, RungScore] = field(default_factory=dict[int, RungScore])
    """By rung; an evaluation repeated after a crash has the same value."""
    _spent_s: float = 0.0
    _since: float | None = None

    @property
    def state(self) -> RunState:
        """Of the run."""
        return self.view.state

    @property
    def error(self) -> ErrorRaised | None:
        """Of its newest attempt."""
        return self.view.error

    @property
    def plan(self) -> Plan | None:
        """None before it is made."""
        return self.view.plan

    @property
    def train_samples(self) -> int:
        """0 before the data is loaded."""
        return self.view.data.train if self.view.data else 0

    @property
    def parameters(self) -> int:
        """0 before the model is built."""
        return self.view.model.parameters if self.view.model else 0

    @property
    def checkpoints(self) -> dict[int, str]:
        """By step, where each was written: a path inside the run's directory, or a URL."""
        return {checkpoint.step: checkpoint.path for checkpoint in self.view.checkpoints}

    @property
    def rungs(self) -> int:
        """Evaluations of the whole training; 0 where there are none, or before the plan."""
        if self.plan is None or not self.plan.evaluate_every:
            return 0
        return ceil(self.plan.steps / self.plan.evaluate_every - 1e-9)

    def device_seconds(self, now: float) -> float:
        """Device-seconds used until now."""
        running_s = 0.0 if self._since is None else max(now - self._since, 0.0)
        return self._spent_s + running_s * self.devices

    def step_of(self, rung: int) -> int | None:
        """Step of a rung's evaluation."""
        result = self.evaluated.get(rung)
        return None if result is None else result.step

    def apply_event(self, event: Event) -> RungScore | None:
        """Apply one event; return the validation score it carries, if any."""
        self.view = apply(self.view, event)
        match event:
            case StateChanged():
                self._move(event)
            case AttemptStarted():
                self._since = min(event.began_at, event.at)
                self.devices = event.devices or 1  # a worker alone does not say how many
            case WorkerGroupFormed():
                self.resize(max(len(event.ranks), 1), event.at)
            case Evaluated() if event.rung is not None:
                score = RungScore(
                    rung=event.rung,
                    step=event.step,
                    metrics={"loss": event.loss, **event.metrics},
                    at=event.at,
                    device_seconds=self.device_seconds(event.at),
                )
                self.evaluated[score.rung] = score
                return score
            case _:
                pass
        return None

    def resize(self, devices: int, at: float) -> None:
        """Account for a new number of devices."""
        if self._since is not None:
            self._spent_s += max(at - self._since, 0.0) * self.devices
            self._since = at
        self.devices = devices

    def _move(self, event: StateChanged) -> None:
        if self.state is RunState.PENDING:  # another attempt
            self.reason = ""
        self.reason = event.reason or self.reason
        if self._since is None and self.state is RunState.STOPPED:
            self.reason = "it had just been started"  # and wrote no reason itself
        if not self.state.is_active and self._since is not None:
            # A lost worker cost nothing between its last sign of life and its discovery.
            seen_at = min(event.seen_at or event.at, event.at)
            self.resize(self.devices, max(seen_at, self._since))
            self._since = None


def read_trial_events(run: RunStore, *, devices: int = 1) -> TrialEvents:
    """Fold all events of a run."""
    events = TrialEvents(devices=devices)
    for event, offset in run.read_events():
        events.apply_event(event)
        events.offset = offset
    return events


def has_finished(run: RunStore) -> bool:
    """Whether a run was trained to its end: somebody may have resumed a held trial by hand."""
    return read_trial_events(run).state is RunState.FINISHED
