import importlib.util
import sys
from pathlib import Path

import pytest

import yunlu
from yunlu.core.errors import JobError, StoreError, TrainingError
from yunlu.runs.states import RunState
from yunlu.spec.job import Job, ModelSpec
from yunlu.spec.load import source_of

FAKE_WORKER = (sys.executable, str(Path(__file__).parents[1] / "jobs" / "fake_worker.py"))


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch):
    """Runs are worked on by a program that writes what a worker writes, without torch."""
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", FAKE_WORKER)


def job(fate="finish", **parts):
    model = {"name": "mlp", "args": {"fate": fate}}
    given = {
        "name": "digits",
        "task": "tabular-classification",
        "data": "synthetic:x",
        "model": model,
    }
    return Job.model_validate({**given, **parts})


def test_train_waits_for_the_result():
    run = yunlu.train(job())
    assert run.state is RunState.FINISHED
    assert run.metrics == {"loss": 0.2, "accuracy": 0.9}
    assert run.plan is not None
    assert run.plan.steps == 20
    assert [record["step"] for record in run.history()] == list(range(1, 21))
    assert repr(run) == f"Run('{run.id}', finished)"
    assert run.report().name == "report.html"
    assert run.report().exists()


def test_train_takes_a_file_overrides_and_options(tmp_path):
    file = tmp_path / "digits.yaml"
    file.write_text(
        "task: tabular-classification\nmodel: mlp\ndata: synthetic:x\ntrain: {epochs: 9}\n"
    )
    run = yunlu.train(
        file, overrides=["train.seed=7"], name="mine", steps=5, optimizer="sgd", lr=0.5
    )
    asked = Job.model_validate_json((run.dir / "job.json").read_bytes())
    assert run.id.startswith("mine-")
    assert (asked.train.steps, asked.train.epochs, asked.train.seed) == (5, None, 7)
    assert (asked.train.optimizer.name, asked.train.optimizer.lr) == ("sgd", 0.5)
    assert (run.dir / "job.source").read_text() == file.read_text()


def test_train_takes_the_parts_of_a_job():
    model = ModelSpec(name="mlp", args={"fate": "finish"})
    run = yunlu.train(model=model, data="synthetic:x", task="tabular-classification", epochs=2)
    assert run.state is RunState.FINISHED
    assert run.id.startswith("tabular-classification-")


def test_failed_run_raises_the_workers_own_error():
    with pytest.raises(TrainingError, match="not finite at step 15") as caught:
        yunlu.train(job("fail"))
    assert caught.value.hint == "Lower train.optimizer.lr."
    assert "deep inside" in str(caught.value.__cause__)
    (run,) = yunlu.list_runs()
    assert run.state is RunState.FAILED
    assert run.resume().state is RunState.FINISHED


def test_lost_run_raises_why():
    with pytest.raises(TrainingError, match="exit code 3"):
        yunlu.train(job("die at once"))


def test_run_in_the_background_is_stopped_and_resumed():
    run = yunlu.train(job("wait"), wait=False)
    with pytest.raises(TimeoutError, match="is still active"):
        run.wait(timeout_s=0)
    while len(run.history()) < 15:
        assert run.state.is_active
    assert run.stop(now=True).state is RunState.STOPPED
    assert run.wait().state is RunState.STOPPED
    assert yunlu.load_run("last") == run
    again = yunlu.resume(run.id)
    assert again.state is RunState.FINISHED
    steps = [record["step"] for record in again.history()]
    assert steps == sorted(set(steps))


def test_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(JobError, match="no option 'epoch'") as caught:
        yunlu.train(job(), epoch=3)
    assert "'epochs'" in (caught.value.hint or "")


def test_bad_value_is_refused_before_a_run_is_made():
    with pytest.raises(JobError, match=r"train\.epochs"):
        yunlu.train(job(), epochs=-1)
    assert yunlu.list_runs() == []


def test_missing_parts_are_named():
    with pytest.raises(JobError, match="task"):
        yunlu.train(model="mlp", data="synthetic:x")


def test_model_object_does_not_go_with_a_job():
    with pytest.raises(JobError, match="brings its own task"):
        yunlu.train(job(), model=object())
    with pytest.raises(JobError, match="therefore waits"):
        yunlu.train(model=object(), data=[], wait=False)
    with pytest.raises(JobError, match="cannot be planned"):
        yunlu.plan(model=object())


def test_plan_is_a_value():
    assert yunlu.plan(job(), measure=True).batch == 32


def test_options_are_values_that_can_be_changed():
    goal = {"gpu": "L4", "cloud": ["aws", "gcp"], "max_devices": 4}
    asked = {"task": "language-modeling", "model": "hf:meta-llama/Llama-3.2-1B"}
    data = {"train": "gone.txt", "tokens": 10_000_000, "max_length": 512}
    options = yunlu.plan(**asked, data=data, goal=goal, top=2, batch=32, epochs=1)
    assert isinstance(options, yunlu.PlanOptions)
    assert isinstance(options.best, yunlu.Plan)
    assert [option.hardware.device for option in options] == ["L4"] * len(options)
    assert options.replace(micro_batch=1).micro_batch == 1
    with pytest.raises(yunlu.YunluError, match=r"goal\.deadline"):
        yunlu.plan(**asked, data=data, goal={"deadline": "soon"})


def test_validate_returns_the_job(tmp_path):
    assert yunlu.validate(job()) == job()
    with pytest.raises(JobError, match="no job file"):
        yunlu.validate(tmp_path / "gone.yaml")


def test_source_is_the_file_a_named_job_stands_in():
    assert source_of("jobs.py:big") == Path("jobs.py")
    assert source_of("digits.yaml") == Path("digits.yaml")
    assert source_of(job()) is None


def test_unknown_run_is_said():
    with pytest.raises(StoreError, match="no runs"):
        yunlu.load_run("x")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_model_object_is_trained_in_this_process():
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=generator)
    targets = (inputs.sum(dim=1) > 0).long()
    run = yunlu.train(
        model=nn.Linear(4, 2),
        data=(inputs, targets),
        loss=nn.functional.cross_entropy,
        epochs=3,
        batch=16,
        lr=0.1,
    )
    assert run.state is RunState.FINISHED
    assert run.id.startswith("linear-")
    assert run.history()[-1]["loss"] < run.history()[0]["loss"]
    kinds = [event.kind for event in run.events()]
    assert "attempt" in kinds
