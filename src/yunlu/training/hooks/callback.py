"""The ``Callback`` extension point: code of the user's own, called by a run while it trains.

Callbacks are called between steps, in the thread that trains, by the one worker that leads the run. A run
without callbacks pays nothing for them.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from yunlu.core.errors import JobError, YunluError, did_you_mean
from yunlu.core.imports import (
    CALLBACKS,
    import_object,
    load_registered,
    make_object,
    names_object,
)
from yunlu.core.secrets import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.runs.events import CheckpointSaved, Evaluated
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

EndRequest = Literal["", "finish", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step."""

    step: int
    """Steps done, this one included."""
    epoch: float
    """Epochs done."""
    loss: float
    """Mean over the batch; ``nan`` where the step was skipped."""
    lr: float
    grad_norm: float
    """Before clipping."""
    samples: int
    """Samples consumed since the run began."""
    seconds: float
    is_applied: bool = True
    """Whether the weights were changed: an update that overflows or goes astray is left out."""


class CallbackContext:
    """The run that calls, and what may be asked of it. May be kept, and used from any thread."""

    def __init__(self, run: RunStore, job: Job, *, steps: int) -> None:
        self.id = run.id
        """Name of the run."""
        self.address = run.address
        """Its directory, where a callback may write files of its own."""
        self.job = job
        """What was asked."""
        self.steps = steps
        """Steps planned."""
        self._lock = threading.Lock()
        self._request: EndRequest = ""
        self._reason = ""

    def finish(self, reason: str) -> None:
        """Train no further: evaluate, score the test data and export, as after the last step."""
        self._ask("finish", reason)

    def stop(self, reason: str) -> None:
        """Save a checkpoint and stop, as ``yunlu stop`` does; ``yunlu resume`` goes on from there."""
        self._ask("stop", reason)

    @property
    def request(self) -> EndRequest:
        """What was asked for; a stop outweighs a finish."""
        return self._request

    @property
    def reason(self) -> str:
        """Why, as the callback said."""
        return self._reason

    def _ask(self, request: EndRequest, reason: str) -> None:
        with self._lock:
            if self._request not in {"stop", request}:
                self._request, self._reason = request, mask(str(reason))


@runtime_checkable
class Callback(Protocol):
    """Called by a run as it trains. Inherit it and override what you need: the rest does nothing.

    Built with no arguments where a job names it; anew in each attempt. With several workers, the one
    that leads has the callbacks and calls them; another that takes the lead makes its own. A callback
    that raises is disabled with one warning; the run goes on.
    """

    def on_step(self, step: StepReport, run: CallbackContext) -> None:
        """After each step. Training waits for it: keep it short."""

    def on_evaluation(self, evaluation: Evaluated, run: CallbackContext) -> None:
        """After each evaluation, of the validation data and at last of the test data."""

    def on_checkpoint(self, checkpoint: CheckpointSaved, run: CallbackContext) -> None:
        """Once a checkpoint is complete on disk."""


_HOOKS = ("on_step", "on_evaluation", "on_checkpoint")


def import_callbacks(names: Sequence[str]) -> None:
    """Import what a job names, so that a mistake is found before anything is loaded."""
    for name in names:
        _find(name)


def open_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """One object of each: a name makes one, a class too."""
    return [check_callback(_make(item)) for item in callbacks]


def check_callback(callback: Any) -> Any:
    """The callback, if a run can call it."""
    kind = callback.__name__ if inspect.isclass(callback) else type(callback).__name__
    # A misspelt hook would never be called, and nobody would know.
    for name in dir(callback):
        if name.startswith("on_") and name not in _HOOKS and callable(getattr(callback, name)):
            raise JobError(
                f"callbacks: {kind}.{name} is not called by a run.", hint=did_you_mean(name, _HOOKS)
            )
    hooks = [name for name in _HOOKS if callable(getattr(callback, name, None))]
    if not hooks:
        raise JobError(
            f"callbacks: {kind} is not a callback.",
            hint="it needs at least one of the methods " + ", ".join(_HOOKS),
        )
    for name in hooks:
        try:
            inspect.signature(getattr(callback, name)).bind(None, None)
        except TypeError:
            raise JobError(
                f"callbacks: {kind}.{name} cannot be called with two arguments.",
                hint=f"def {name}(self, {name.removeprefix('on_')}, run): ...",
            ) from None
        except ValueError:  # of what is written in C, the arguments may not be known
            continue
    return callback


def _find(name: str) -> Any:
    if names_object(name):
        return import_object(name)
    return load_registered(CALLBACKS, name, kind="callback")


def _make(item: Any) -> Any:
    if isinstance(item, str):
        return make_object(item) if names_object(item) else _find(item)()
    return item() if inspect.isclass(item) else item


class CallbackCaller:
    """The callbacks of one worker, called in their order; those without a hook are not called for it."""

    def __init__(
        self,
        callbacks: Sequence[Any] = (),
        context: CallbackContext | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._context, self._warn = context, warn
        self._callbacks = {name: _overriding(callbacks, name) for name in _HOOKS}
        self._saved: deque[CheckpointSaved] = deque()
        self.has_step_hooks = bool(self._callbacks["on_step"])
        """Whether any callback wants to hear of every step."""

    @property
    def request(self) -> EndRequest:
        """What a callback asked of the run."""
        return "" if self._context is None else self._context.request

    @property
    def reason(self) -> str:
        """Why it asked."""
        return "" if self._context is None else f"a callback asked: {self._context.reason}"

    def call_step(self, step: StepReport) -> None:
        """Report a step."""
        self._call("on_step", step)

    def call_evaluation(self, evaluation: Evaluated) -> None:
        """Report an evaluation."""
        self._call("on_evaluation", evaluation)

    def note_checkpoint(self, checkpoint: CheckpointSaved) -> None:
        """Keep a checkpoint for the training thread to report: another thread wrote it."""
        if self._callbacks["on_checkpoint"]:
            self._saved.append(checkpoint)

    def call_checkpoints(self) -> None:
        """Report the checkpoints that were completed since the last call."""
        while self._saved:
            self._call("on_checkpoint", self._saved.popleft())

    def _call(self, hook: str, value: Any) -> None:
        for callback in tuple(self._callbacks[hook]):
            try:
                getattr(callback, hook)(value, self._context)
            except Exception as error:  # noqa: BLE001 (third-party code: training continues after any error)
                self._disable(callback, hook, error)

    def _disable(self, callback: Any, hook: str, error: Exception) -> None:
        for callbacks in self._callbacks.values():
            callbacks[:] = [other for other in callbacks if other is not callback]
        self.has_step_hooks = bool(self._callbacks["on_step"])
        cause = str(error) if isinstance(error, YunluError) else f"{type(error).__name__}: {error}"
        name = type(callback).__name__
        self._warn(f"{name}.{hook} failed, and {name} is disabled for this run: {mask(cause)}")


def _overriding(callbacks: Sequence[Any], hook: str) -> list[Any]:
    """Those that have a hook of their own."""
    inherited = getattr(Callback, hook)
    return [
        callback
        for callback in callbacks
        if callable(getattr(callback, hook, None))
        and getattr(type(callback), hook, None) is not inherited
    ]
