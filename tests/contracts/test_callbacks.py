"""Every built-in callback keeps the contract; the caller keeps what the door promises."""

from __future__ import annotations

import csv
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from yunlu import Callback
from yunlu.core.errors import JobError
from yunlu.runs.events import CheckpointSaved, Evaluated
from yunlu.testing.callbacks import CallbackContract, make_context, make_step
from yunlu.training.hooks.callback import CallbackCaller, check_callback, open_callbacks
from yunlu.training.hooks.csv_table import FILE

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.training.hooks.callback import CallbackContext, StepReport

EVALUATION = Evaluated(split="test", step=2, loss=0.5, metrics={"accuracy": 0.75}, seconds=0.1)
CHECKPOINT = CheckpointSaved(step=2, path="checkpoints/step-2", bytes=2048, seconds=0.1)


class BuiltIn(CallbackContract):
    name: str

    def make_callback(self) -> Any:
        return open_callbacks([self.name])[0]


class TestCsv(BuiltIn):
    name = "csv"

    def test_the_table_has_every_figure_of_every_evaluation(self, tmp_path: Path) -> None:
        caller = CallbackCaller([self.make_callback()], make_context(tmp_path))
        caller.call_evaluation(EVALUATION)
        with (tmp_path / FILE).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["metric"], float(row["value"])) for row in rows] == [
            ("loss", 0.5),
            ("accuracy", 0.75),
        ]
        assert {(row["step"], row["split"]) for row in rows} == {("2", "test")}


class TestLog(BuiltIn):
    name = "log"

    def test_its_lines_go_to_standard_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        caller = CallbackCaller([self.make_callback()], make_context(tmp_path))
        caller.call_evaluation(EVALUATION)
        caller.note_checkpoint(CHECKPOINT)
        caller.call_checkpoints()
        written = capsys.readouterr()
        assert written.out == ""
        assert written.err.splitlines() == [
            "step 2/6  test  loss 0.5  accuracy 0.75",
            "step 2/6  saved checkpoints/step-2  2.0 KiB",
        ]


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_step(self, step: StepReport, run: CallbackContext) -> None:
        self.calls.append(("step", step.step))

    def on_checkpoint(self, checkpoint: CheckpointSaved, run: CallbackContext) -> None:
        self.calls.append(("checkpoint", checkpoint.step))


class TestRecorder(CallbackContract):
    def make_callback(self) -> Recorder:
        return Recorder()


class Flawed(Recorder):
    def on_step(self, step: StepReport, run: CallbackContext) -> None:
        super().on_step(step, run)
        raise ConnectionError("no route to https://me:hunter2@host.example")


def test_the_contract_catches_a_callback_that_raises(tmp_path: Path) -> None:
    contract = type("TestFlawed", (CallbackContract,), {"make_callback": lambda _: Flawed()})()
    with pytest.raises(AssertionError):
        contract.test_it_goes_with_a_whole_run(tmp_path)


def test_a_callback_that_raises_is_disabled_with_one_warning_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    flawed, good, warnings = Flawed(), Recorder(), list[str]()
    caller = CallbackCaller([flawed, good], make_context(tmp_path), warnings.append)
    for step in (1, 2):
        caller.call_step(make_step(step))
    assert flawed.calls == [("step", 1)]
    assert good.calls == [("step", 1), ("step", 2)]
    assert len(warnings) == 1
    assert "Flawed.on_step failed" in warnings[0]
    assert "hunter2" not in warnings[0]


def test_a_hook_that_is_not_overridden_is_not_called(tmp_path: Path) -> None:
    """So a callback of evaluations adds nothing to a step."""

    class OnlyEvaluations(Callback):
        def on_evaluation(self, evaluation: Evaluated, run: CallbackContext) -> None: ...

    assert not CallbackCaller().has_step_hooks
    assert not CallbackCaller([OnlyEvaluations()], make_context(tmp_path)).has_step_hooks
    assert CallbackCaller([Recorder()], make_context(tmp_path)).has_step_hooks


def test_an_object_with_one_hook_is_a_callback(tmp_path: Path) -> None:
    seen: list[int] = []
    watcher = SimpleNamespace(on_step=lambda step, run: seen.append(step.step))
    caller = CallbackCaller(open_callbacks([watcher]), make_context(tmp_path))
    caller.call_step(make_step(3))
    assert seen == [3]


def test_checkpoints_are_reported_when_the_training_thread_asks(tmp_path: Path) -> None:
    recorder = Recorder()
    caller = CallbackCaller([recorder], make_context(tmp_path))
    caller.note_checkpoint(CHECKPOINT)
    assert recorder.calls == []
    caller.call_checkpoints()
    caller.call_checkpoints()
    assert recorder.calls == [("checkpoint", 2)]


def test_a_stop_outweighs_a_finish_and_the_first_reason_stays(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    context.finish("good enough")
    context.finish("again")
    assert (context.request, context.reason) == ("finish", "good enough")
    context.stop("the machine is needed")
    context.finish("too late")
    assert (context.request, context.reason) == ("stop", "the machine is needed")


@pytest.mark.parametrize(
    ("callback", "message", "hint"),
    [
        (SimpleNamespace(on_evaluate=print), "on_evaluate is not called", "on_evaluation"),
        (SimpleNamespace(), "is not a callback", "on_step, on_evaluation, on_checkpoint"),
        (
            SimpleNamespace(on_step=lambda step: None),
            "two arguments",
            "def on_step(self, step, run)",
        ),
    ],
    ids=["misspelt", "no hook", "one argument"],
)
def test_what_could_not_be_called_is_refused(callback: Any, message: str, hint: str) -> None:
    with pytest.raises(JobError, match=message) as caught:
        check_callback(callback)
    assert hint in (caught.value.hint or "")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(JobError, match="no callback 'cvs'") as caught:
        open_callbacks(["cvs"])
    assert "csv" in (caught.value.hint or "")
