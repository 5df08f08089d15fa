"""``yunlu train --profile``: from the command to a trace that opens and a table that adds up."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from yunlu.runs.events import TraceWritten
from yunlu.runs.run_store import RunStore
from yunlu.runs.states import RunState
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.worker import run as live

JOB = """
name: digits
task: tabular-classification
model: mlp
data: sklearn:digits
train: {steps: 24, batch: 32, evaluate: 12}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def test_a_profiled_run_has_a_trace_and_says_where_the_time_went(
    yunlu: Callable[..., Any], job: Path, own_home: Path
) -> None:
    told = yunlu("train", job, "--profile", "--json")

    assert told.code == 0, told.err
    (event,) = [record for record in told.records if record["event"] == "trace"]
    (run,) = own_home.rglob("trace.json.gz")
    assert event["path"] == f"traces/{run.name}"
    with gzip.open(run, "rt") as file:
        names = [each["name"] for each in json.load(file)["traceEvents"]]
    for phase in ("data", "forward", "backward", "norm", "update"):
        assert names.count(f"yunlu.{phase}") == event["steps"] == 3
    assert run.stat().st_size < 2**20

    shown = yunlu("report", "last")
    assert "outside operators" in shown.out
    assert str(run) in shown.out


def test_without_the_flag_there_is_no_trace(
    yunlu: Callable[..., Any], job: Path, own_home: Path
) -> None:
    assert yunlu("train", job).code == 0
    assert list(own_home.rglob("trace.json*")) == []


def test_tracing_changes_no_bit_of_the_training(make_run: Callable[..., RunStore]) -> None:
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    data = (inputs, (inputs[:, 0] > 0).long())
    losses: list[list[float]] = []
    for profile in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2))
        run = make_run(steps=30, batch=8, micro_batch=4, evaluate=7, profile=profile)
        assert live(run.path, task=ObjectTask(model=network, data=data)) is RunState.FINISHED
        losses.append([record["loss"] for record, _ in run.read_metrics()])
        traces = [event for event, _ in run.read_events() if isinstance(event, TraceWritten)]
        assert len(traces) == profile

    assert losses[0] == losses[1]
