"""What a run warns of before it trains, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from yunlu.runs.events import Evaluated, ModelExported, PlanMade, WarningRaised
from yunlu.runs.home import open_run
from yunlu.runs.run_store import RunStore, write_job
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.training import prepare
from yunlu.training.autotune.tune import _why_not_compiled
from yunlu.training.callbacks import BestCheckpoint
from yunlu.training.probe import probe_machine
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.worker import run as live

MakeRun = Callable[..., RunStore]


def warnings_of(run: RunStore) -> list[str]:
    return [event.message for event, _ in run.read_events() if isinstance(event, WarningRaised)]


def table_job(path: Path, *, labels: int) -> Job:
    rows = "".join(f"{i / 7},{i % labels}\n" for i in range(60))
    path.write_text(f"x,y\n{rows}")
    return Job.model_validate(
        {
            "task": "tabular-classification",
            "model": {"name": "mlp", "args": {"hidden": [4]}},
            "data": {"train": str(path)},
            "train": {"steps": 1, "batch": 8, "trial_share": 0.0, "threads": 1},
        }
    )


@pytest.mark.parametrize(("labels", "warns"), [(60, True), (3, False)])
def test_labels_that_occur_once_are_warned_of(tmp_path: Path, labels: int, warns: bool) -> None:
    (tmp_path / "run").mkdir()
    run = open_run(tmp_path / "run")
    write_job(run, table_job(tmp_path / "t.csv", labels=labels))
    prepare.prepare(run, table_job(tmp_path / "t.csv", labels=labels))
    said = [text for text in warnings_of(run) if "hardly one occurs twice" in text]
    assert bool(said) is warns
    if warns:
        assert "60 labels in the column 'y'" in said[0]
        assert "tabular-regression" in said[0]


def test_a_precision_without_instructions_is_warned_of_with_the_way_out(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("measured although there is no time")

    monkeypatch.setattr(prepare, "load_speeds", lambda _: None)
    monkeypatch.setattr(prepare, "measured_speeds", refuse)
    monkeypatch.setattr(prepare, "SPEEDS_S", 1e9)
    run = make_run(epochs=1, batch=20, precision="fp16")
    inputs = torch.randn(60, 6)
    task = ObjectTask(model=nn.Linear(6, 1), data=(inputs, inputs[:, :1]))
    assert live(run.path, task=task) is RunState.FINISHED
    is_native = "fp16" in probe_machine().best_device.fast_precisions
    said = [text for text in warnings_of(run) if "no instructions for" in text]
    assert bool(said) is not is_native
    assert all("Leave train.precision out" in text for text in said)


def test_why_a_model_is_not_compiled_is_true(make_run: MakeRun) -> None:
    run = make_run(epochs=1, batch=20)
    inputs = torch.randn(60, 6)
    assert (
        live(run.path, task=ObjectTask(model=nn.Linear(6, 1), data=(inputs, inputs[:, :1])))
        is RunState.FINISHED
    )
    (plan,) = [event.plan for event, _ in run.read_events() if isinstance(event, PlanMade)]
    assert all("packed" not in choice.reason for choice in plan.choices)
    machine = probe_machine()
    job = Job.model_validate({"task": "t", "model": "m", "data": "d", "devices": 2})
    assert "several workers" in _why_not_compiled(job, machine, plan)
    packed = plan.model_copy(update={"padding": "pack"})
    assert "packed batches" in _why_not_compiled(job, machine, packed)


def test_where_the_metric_ties_the_checkpoint_of_the_lowest_loss_is_exported(
    make_run: MakeRun,
) -> None:
    best = BestCheckpoint("accuracy", ties_by_loss=True)
    assert best.observe({"accuracy": 1.0, "loss": 0.5})
    assert best.observe({"accuracy": 1.0, "loss": 0.4})
    assert not best.observe({"accuracy": 1.0, "loss": 0.45})
    run = make_run(epochs=6, batch=20, optimizer={"name": "sgd", "lr": 20.0}, schedule="constant")
    inputs = torch.randn(90, 4)
    inputs[:, 0] = inputs[:, 0].sign() * 3
    task = ObjectTask(model=nn.Linear(4, 2), data=(inputs, (inputs[:, 0] > 0).long()))
    assert live(run.path, task=task) is RunState.FINISHED
    scores = [
        e for e, _ in run.read_events() if isinstance(e, Evaluated) and e.split == "validation"
    ]
    (exported,) = [e for e, _ in run.read_events() if isinstance(e, ModelExported)]
    top = max(e.metrics["accuracy"] for e in scores)
    tied = [e for e in scores if e.metrics["accuracy"] == top]
    assert exported.from_step == min(tied, key=lambda e: (e.loss, e.step)).step
