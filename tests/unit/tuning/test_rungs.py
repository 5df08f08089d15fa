"""Evaluations of a training are counted at a glance; only where that cannot be, a worker is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from yunlu.spec.job import Job
from yunlu.spec.search import SearchSpec
from yunlu.tuning import rungs
from yunlu.tuning.rungs import count_rungs, measure_training

SEARCH = {"space": {"train.optimizer.lr": "1e-4 .. 1e-1 log"}, "metric": "loss"}


def make_job(data: str = "sklearn:digits", task: str = "image-classification", **train: Any) -> Job:
    """Of digits 1437 are trained on: a tenth of 1797 is held out twice."""
    fields = {"task": task, "model": "cnn", "data": data, "train": train, "search": SEARCH}
    return Job.model_validate(fields)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, 10),
        ({"epochs": 2.5}, 3),
        ({"steps": 100, "evaluate": 30}, 4),
        ({"epochs": 2, "evaluate": 10, "batch": 64}, 5),  # 46 steps
        ({"epochs": 3, "evaluate": 45, "batch": 32}, 3),  # 135 steps
        ({"steps": 100, "batch": 64}, 5),  # 23 steps an epoch
    ],
)
def test_no_worker_is_asked_where_the_data_can_be_counted(
    train: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rungs, "make_plan", pytest.fail)
    job = make_job(**train)
    assert job.search is not None
    found = measure_training(job, job.search, probes=True)
    assert (found.rungs, found.metrics, found.plan) == (expected, ("loss",), None)


def test_where_the_length_varies_the_longest_training_counts() -> None:
    space = {"train.epochs": "2 .. 6", "train.batch": [64, 32], "train.clip": [None, 1.0]}
    courses: list[tuple[dict[str, Any], int]] = [
        ({}, 6),
        ({"epochs": 3, "evaluate": 45}, 6),
        ({"steps": 90}, 2),
    ]
    for train, expected in courses:
        job = make_job(**train)
        search = SearchSpec.model_validate({"space": space, "metric": "loss"})
        assert measure_training(job, search, probes=True).rungs == expected


def test_rows_of_a_table_are_counted(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("x,y\n" + "1,2\n" * 100)
    job = make_job(str(table), "tabular-regression", epochs=4, evaluate=5, batch=8)
    assert count_rungs(job) == 8  # 80 samples, 40 steps


@pytest.mark.parametrize(
    "job",
    [
        make_job("synthetic:python-docs", "language-modeling", epochs=2, evaluate=20),
        make_job("nowhere:at-all", epochs=2, evaluate=20),
        make_job(epochs=2, evaluate=20, batch=5000),
    ],
)
def test_what_only_a_worker_can_tell_is_not_guessed(job: Job) -> None:
    assert count_rungs(job) is None
