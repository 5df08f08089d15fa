"""Callbacks and metrics of the user's own in real runs: in this process, from a file, with several workers."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import yunlu
from yunlu.client import default_client
from yunlu.core.errors import JobError, TrainingError
from yunlu.jobs import lifecycle
from yunlu.runs.events import CheckpointSaved, Evaluated
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.training.tasks import own_metrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from yunlu.training.hooks.callback import CallbackContext, StepReport

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {"epochs": 4, "batch": 20, "lr": 0.05, "progress": False}
STEPS = 4 * 8
"""Of the 200 samples, a tenth each is held out."""


def objects() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return {"model": net, "data": (x, (x[:, 0] > 0).long()), "loss": nn.CrossEntropyLoss()}


class Recorder(yunlu.Callback):
    """Keeps what it is told, and asks for what it was made for."""

    def __init__(self, request: str = "", at: int = 0) -> None:
        self.steps: list[StepReport] = []
        self.evaluations: list[Evaluated] = []
        self.checkpoints: list[CheckpointSaved] = []
        self._request, self._at = request, at

    def on_step(self, step: StepReport, run: CallbackContext) -> None:
        self.steps.append(step)
        if self._request and step.step == self._at:
            getattr(run, self._request)("that is enough")

    def on_evaluation(self, evaluation: Evaluated, run: CallbackContext) -> None:
        self.evaluations.append(evaluation)

    def on_checkpoint(self, checkpoint: CheckpointSaved, run: CallbackContext) -> None:
        assert Path(run.address, checkpoint.path).is_dir()
        self.checkpoints.append(checkpoint)


def test_a_callback_hears_of_every_step_evaluation_and_checkpoint() -> None:
    recorder = Recorder()
    run = yunlu.train(**objects(), **SETTINGS, callbacks=[recorder])
    history = run.history()
    assert [step.step for step in recorder.steps] == list(range(1, STEPS + 1))
    assert [step.loss for step in recorder.steps] == [record["loss"] for record in history]
    events = run.events()
    assert recorder.evaluations == [event for event in events if isinstance(event, Evaluated)]
    assert recorder.evaluations[-1].split == "test"
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert [checkpoint.step for checkpoint in recorder.checkpoints] == saved


def test_a_callback_finishes_a_run_as_after_its_last_step() -> None:
    recorder = Recorder("finish", at=11)
    run = yunlu.train(**objects(), **SETTINGS, callbacks=[recorder])
    assert run.state is RunState.FINISHED
    assert [record["step"] for record in run.history()] == list(range(1, 12))
    assert [(event.step, event.split) for event in recorder.evaluations[:-1]] == [
        (8, "validation"),
        (11, "validation"),
    ]
    assert recorder.evaluations[-1].split == "test"
    assert (run.dir / "model" / "model.safetensors").is_file()
    assert default_client().show(str(run.dir)).step == 11
    assert "that is enough" in (run.dir / "events.jsonl").read_text()


def test_a_callback_stops_a_run_that_resumes_as_if_nothing_had_been() -> None:
    undisturbed = yunlu.train(**objects(), **SETTINGS).history()
    stopped = yunlu.train(**objects(), **SETTINGS, callbacks=[Recorder("stop", at=13)])
    assert stopped.state is RunState.STOPPED
    assert stopped.history()[-1]["step"] == 13
    recorder = Recorder()
    resumed = yunlu.resume(stopped.id, **objects(), callbacks=[recorder], progress=False)
    assert resumed.state is RunState.FINISHED
    assert recorder.steps[0].step == 14
    losses = [record["loss"] for record in resumed.history()]
    assert losses == [record["loss"] for record in undisturbed]


def test_callbacks_change_nothing_of_what_is_computed() -> None:
    losses = [
        [record["loss"] for record in yunlu.train(**objects(), **SETTINGS, **more).history()]
        for more in ({}, {"callbacks": [Recorder()]})
    ]
    assert losses[0] == losses[1]


def share_right(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    return float((outputs.argmax(axis=1) == targets).mean())


def test_a_function_measures_whole_evaluations_of_a_model_object() -> None:
    run = yunlu.train(**objects(), **SETTINGS, metrics=share_right)
    scored = [event for event in run.events() if isinstance(event, Evaluated)]
    assert len(scored) == 5
    for event in scored:
        assert event.metrics["share_right"] == pytest.approx(event.metrics["accuracy"])


OWN = """
import json, os
from pathlib import Path
import numpy as np

def quality(outputs, targets):
    assert outputs.shape == (len(targets), 3), outputs.shape
    return {"top2": float((np.argsort(outputs, axis=1)[:, -2:] == targets[:, None]).any(1).mean())}

class Finish:
    def on_step(self, step, run):
        with Path(run.address, "own.jsonl").open("a") as file:
            file.write(json.dumps([step.step, os.getpid()]) + "\\n")
        if step.step >= 3:
            run.finish("three steps")
"""
JOB = """
    task: tabular-classification
    model: mlp
    data: sklearn:iris
    callbacks: own.py:Finish
    metrics: own.py:quality
    train: {epochs: 4, batch: 32, checkpoint: {metric: top2}}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    file = tmp_path / "job.yaml"
    file.write_text(dedent(JOB))
    return file


def test_a_job_file_names_both_beside_it(job_file: Path) -> None:
    run = yunlu.train(job_file, progress=False)
    assert run.plan is not None
    assert run.plan.best_metric == "top2"
    assert run.history()[-1]["step"] == 3
    assert 0 <= run.metrics["top2"] <= 1
    assert [json.loads(line)[0] for line in _own_lines(run)] == [1, 2, 3]


@pytest.mark.distributed
@pytest.mark.parametrize("method", ["exact", "asynchronous"])
def test_of_several_workers_one_calls_and_all_end_at_the_same_step(
    job_file: Path, method: str
) -> None:
    run = yunlu.train(job_file, devices=2, overrides=[f"communication={method}"], progress=False)
    assert run.state is RunState.FINISHED
    called = [json.loads(line) for line in _own_lines(run)]
    assert [step for step, _ in called] == list(range(1, len(called) + 1))
    assert len({pid for _, pid in called}) == 1
    assert len(called) >= 3
    if method == "exact":  # servers complete steps while the coordinator hears of earlier ones
        assert run.history()[-1]["step"] == 3
    assert "top2" in run.metrics


def _own_lines(run: yunlu.Run) -> list[str]:
    return (run.dir / "own.jsonl").read_text().splitlines()


def test_verbs_that_read_import_nothing_that_a_job_names(tmp_path: Path) -> None:
    trap = tmp_path / "trap.py"
    trap.write_text("raise SystemExit('imported')")
    parts = {"task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
    own = {"callbacks": [f"{trap}:Any"], "metrics": [f"{trap}:any"]}
    store = lifecycle.submit(Job.model_validate({**parts, **own}))
    client, run = default_client(), yunlu.load_run(store.id)
    assert client.ps().runs[0].id == run.id
    assert client.show(run.id).id == run.id
    assert client.report(run.id).run_id == run.id
    assert "<" in run._repr_html_()
    yunlu.validate(Job.model_validate({**parts, **own}))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda outputs, targets: "high", "returned 'high'"),
        (lambda outputs, targets: [1, 2], "a number was expected"),
        (lambda outputs, targets: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["a text", "a list", "an error"],
)
def test_a_metric_that_is_none_says_what_was_expected(function: Any, message: str) -> None:
    (metric,) = own_metrics.open_metrics([function])
    with pytest.raises(TrainingError, match=message):
        own_metrics._read("own", own_metrics._call(metric, np.zeros((2, 2)), np.zeros(2)))


def test_an_object_for_a_run_of_its_own_process_is_refused() -> None:
    parts = {"task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
    with pytest.raises(JobError, match="callbacks: Recorder is an object") as caught:
        yunlu.train(**parts, callbacks=[Recorder()])
    assert "module:Class" in (caught.value.hint or "")
    with pytest.raises(JobError, match="metrics: share_right is an object"):
        yunlu.train(**parts, metrics=share_right)
    with pytest.raises(JobError, match="cvs"):
        yunlu.train(**parts, callbacks=["cvs"])
