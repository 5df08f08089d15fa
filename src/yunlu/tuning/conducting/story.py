"""What a trial's run has told of itself so far: its events, taken in one by one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

from yunlu.runs.run_dir import EventKind
from yunlu.runs.states import RunState, replay_move

if TYPE_CHECKING:
    from yunlu.runs.run_dir import Event
    from yunlu.runs.run_store import RunStore


@dataclass(frozen=True, slots=True)
class RungScore:
    """One evaluation on the validation data."""

    rung: int
    step: int
    metrics: dict[str, float]
    at: float
    device_seconds: float
    """Used by the run until then, over all its lives."""


@dataclass(slots=True, kw_only=True)
class Story:
    """A run, as far as its events were read."""

    devices: int = 1
    """That it holds, or is given next."""
    offset: int = 0
    state: RunState = RunState.PENDING
    reason: str = ""
    """Why it is stopping or has stopped."""
    lives: int = 0
    parameters: int = 0
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    train_samples: int = 0
    evaluated: dict[int, RungScore] = field(default_factory=dict[int, RungScore])
    """By rung; one that was made again after a crash is the same."""
    checkpoints: dict[int, str] = field(default_factory=dict[int, str])
    """By step, where each was written: a path inside the run's directory, or a URL."""
    error: dict[str, Any] | None = None
    _spent_s: float = 0.0
    _since: float | None = None

    @property
    def rungs(self) -> int:
        """Evaluations of the whole training; 0 where there are none, or before the plan."""
        every = self.plan.get("evaluate_every")
        return ceil(self.plan["steps"] / every - 1e-9) if every else 0

    def device_seconds(self, now: float) -> float:
        """What it has used until now."""
        running_s = 0.0 if self._since is None else max(now - self._since, 0.0)
        return self._spent_s + running_s * self.devices

    def step_of(self, rung: int) -> int | None:
        """After which step a rung was."""
        found = self.evaluated.get(rung)
        return None if found is None else found.step

    def take(self, event: Event) -> RungScore | None:
        """Take one more event in; an evaluation on the validation data is returned."""
        data, at = event.data, event.at
        match event.kind:
            case EventKind.STATE:
                self._move(data, at)
            case EventKind.LIFE:
                self.lives += 1
                self._since = min(data.get("began_at") or at, at)
                self.devices = data.get("devices") or 1  # a worker alone does not say how many
            case EventKind.CREW:
                self.resize(max(len(data.get("ranks") or ()), 1), at)
            case EventKind.PLAN:
                self.plan = data
            case EventKind.DATA:
                self.train_samples = data.get("train") or 0
            case EventKind.MODEL:
                self.parameters = data.get("parameters") or 0
            case EventKind.CHECKPOINT:
                self.checkpoints[data["step"]] = data["path"]
            case EventKind.ERROR:
                self.error = data
            case EventKind.EVALUATION if "rung" in data:
                found = RungScore(
                    rung=data["rung"],
                    step=data["step"],
                    metrics={"loss": _number(data["loss"])}
                    | {name: _number(value) for name, value in data["metrics"].items()},
                    at=at,
                    device_seconds=self.device_seconds(at),
                )
                self.evaluated[found.rung] = found
                return found
            case _:
                pass
        return None

    def resize(self, devices: int, at: float) -> None:
        """From now on it holds so many."""
        if self._since is not None:
            self._spent_s += max(at - self._since, 0.0) * self.devices
            self._since = at
        self.devices = devices

    def _move(self, data: dict[str, Any], at: float) -> None:
        state = replay_move(self.state, RunState(data["state"]))
        if state is RunState.PENDING:  # another life
            self.error, self.reason = None, ""
        self.reason = data.get("reason") or self.reason
        if self._since is None and state is RunState.STOPPED:
            self.reason = "it had just been started"  # and had no last words of its own
        if not state.is_active and self._since is not None:
            # One that vanished cost nothing from its last sign until somebody looked for it.
            self.resize(self.devices, max(min(data.get("seen_at") or at, at), self._since))
            self._since = None
        self.state = state


def read_story(run: RunStore, *, devices: int = 1) -> Story:
    """All that a run has told."""
    story = Story(devices=devices)
    for event, offset in run.read_events():
        story.take(event)
        story.offset = offset
    return story


def has_finished(run: RunStore) -> bool:
    """Whether a run was trained to its end: somebody may have gone on with a held trial by hand."""
    return read_story(run).state is RunState.FINISHED


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
