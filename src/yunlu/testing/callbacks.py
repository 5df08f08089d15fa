"""What every callback must do, as tests to inherit.

In your own test suite::

    class TestMyCallback(CallbackContract):
        def make_callback(self):
            return MyCallback()

pytest finds the methods by their names; ``tmp_path`` is its own fixture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from yunlu.runs.events import CheckpointSaved, Evaluated
from yunlu.runs.home import open_run
from yunlu.spec.job import Job
from yunlu.training.hooks.callback import (
    CallbackCaller,
    CallbackContext,
    StepReport,
    check_callback,
)

if TYPE_CHECKING:
    from pathlib import Path

_STEPS = 6


class CallbackContract:
    """The behaviours that a run relies on: a callback that raises is disabled.

    Override ``make_callback``.
    """

    def make_callback(self) -> Any:
        """A fresh callback, as a run would make one."""
        raise NotImplementedError

    def test_a_run_can_call_it(self) -> None:
        """Its hooks have known names and take a value and the run; a run checks the same."""
        check_callback(self.make_callback())

    def test_it_goes_with_a_whole_run(self, tmp_path: Path) -> None:
        """Steps, evaluations of both splits, a checkpoint."""
        warnings = _play(self.make_callback(), tmp_path)
        assert warnings == []

    def test_numbers_that_are_not_finite_do_not_stop_it(self, tmp_path: Path) -> None:
        """A step that went astray is reported, too."""
        warnings = _play(self.make_callback(), tmp_path, loss=math.nan)
        assert warnings == []

    def test_it_asks_for_nothing_before_anything_happened(self, tmp_path: Path) -> None:
        """A run that ends before its first step calls no hook."""
        context = make_context(tmp_path)
        CallbackCaller([self.make_callback()], context)
        assert context.request == ""

    def test_another_attempt_goes_on_beside_what_the_first_left(self, tmp_path: Path) -> None:
        """A resumed run makes the callback anew, in the same directory."""
        _play(self.make_callback(), tmp_path)
        assert _play(self.make_callback(), tmp_path, first=_STEPS + 1) == []

    def test_two_runs_at_once_do_not_mix(self, tmp_path: Path) -> None:
        """What a callback keeps belongs to the run that called it, not to its class."""
        runs = [tmp_path / name for name in ("one", "other")]
        callers, warnings = [], list[str]()
        for path in runs:
            path.mkdir()
            callers.append(
                CallbackCaller([self.make_callback()], make_context(path), warnings.append)
            )
        for step in range(1, _STEPS + 1):
            for caller in callers:
                caller.call_step(make_step(step))
                caller.call_evaluation(_evaluation(step, "validation", 1.0))
        files = [sorted(path.name for path in run.iterdir()) for run in runs]
        assert warnings == []
        assert files[0] == files[1]


def make_context(directory: Path) -> CallbackContext:
    """A run for a callback to be called by."""
    return CallbackContext(open_run(directory), _JOB, steps=_STEPS)


def make_step(step: int, *, loss: float = 1.0) -> StepReport:
    """A finished step; one whose loss is no number was not applied."""
    return StepReport(
        step=step,
        epoch=step / _STEPS,
        loss=loss,
        lr=0.1,
        grad_norm=loss,
        samples=8 * step,
        seconds=0.01,
        is_applied=math.isfinite(loss),
    )


def _play(callback: Any, directory: Path, *, loss: float = 1.0, first: int = 1) -> list[str]:
    """What the run warned of while it called the callback."""
    warnings: list[str] = []
    caller = CallbackCaller([callback], make_context(directory), warnings.append)
    for step in range(first, first + _STEPS):
        caller.call_checkpoints()
        caller.call_step(make_step(step, loss=loss))
        if step % 2 == 0:
            caller.call_evaluation(_evaluation(step, "validation", loss))
            path = f"checkpoints/step-{step:010}"
            caller.note_checkpoint(
                CheckpointSaved(step=step, path=path, bytes=1 << 20, seconds=0.1)
            )
    caller.call_checkpoints()
    caller.call_evaluation(_evaluation(first + _STEPS - 1, "test", loss))
    return warnings


def _evaluation(step: int, split: str, loss: float) -> Evaluated:
    metrics = {"accuracy": 0.5, "macro_f1": math.nan}
    return Evaluated(split=split, step=step, loss=loss, metrics=metrics, seconds=0.1)


_JOB = Job.model_validate(
    {"name": "contract", "task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
)
