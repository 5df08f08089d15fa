"""A plan goes with the job that is submitted: chosen and pinned, or made for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.jobs.test_plan_options import make_job, probed
from yunlu.core.errors import JobError
from yunlu.jobs.lifecycle import submit
from yunlu.jobs.plan_options import plan_options
from yunlu.jobs.submitted_plan import load_plan, pin_job, plan_here, resolve_plan
from yunlu.planning.planner import DEFAULT_BATCH
from yunlu.runs.run_store import read_job, read_plan, read_submitted_plan

__all__ = ["probed"]

SMALL: dict[str, Any] = {
    "model": {"name": "transformer", "args": {"layers": 2, "width": 32, "heads": 2}},
    "data": {"train": "x.txt", "samples": 1000, "tokenizer": "bytes", "max_length": 64},
    "train": {"epochs": 1},
}


def test_the_choices_of_a_plan_are_pinned_in_the_job() -> None:
    job = make_job()
    plan = plan_options(job, top=1).best.replace(micro_batch=1)
    pinned, kept = resolve_plan(job, plan)
    assert kept is plan
    assert pinned == pin_job(job, plan)
    assert pinned.devices == plan.layout.world
    assert pinned.layout.is_whole
    assert (pinned.train.batch, pinned.train.micro_batch) == (plan.batch, 1)
    assert pinned.train.precision == plan.precision
    assert plan_options(pinned, top=1).best.layout == plan.layout
    assert pinned.model == job.model
    assert pinned.goal == job.goal


@pytest.mark.usefixtures("probed")
def test_a_described_model_is_planned_for_this_machine_as_a_worker_would() -> None:
    job = make_job(**SMALL, goal={"gpu": ["H100"], "budget": 1})
    plan = plan_here(job)
    assert plan is not None
    assert plan.hardware.cloud == "here"
    assert (plan.batch, plan.steps) == (DEFAULT_BATCH, 32)
    assert resolve_plan(job, None) == (job, plan)


def test_without_a_probe_nothing_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "cache"))
    assert plan_here(make_job(**SMALL)) is None


@pytest.mark.usefixtures("probed")
def test_a_model_that_would_have_to_be_measured_is_not_planned_in_passing() -> None:
    tables = make_job(task="tabular-classification", model="mlp", data="sklearn:digits")
    assert plan_here(tables) is None


def test_the_submitted_plan_is_kept_with_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("YUNLU_HOME", str(tmp_path / "runs"))
    job = make_job()
    plan = plan_options(job, top=1).best
    run = submit(pin_job(job, plan), plan=plan)
    assert read_submitted_plan(run) == plan
    assert read_plan(run) is None
    assert read_job(run).train.micro_batch == plan.micro_batch
    assert read_submitted_plan(submit(job)) is None


def test_a_plan_is_read_from_a_file_by_its_number(tmp_path: Path) -> None:
    options = plan_options(make_job(), top=2)
    file = tmp_path / "plans.json"
    file.write_text(options.to_json())
    assert load_plan(str(file)) == options[0]
    assert load_plan(f"{file}:2") == options[1]
    file.write_text(options[1].to_json())
    assert load_plan(str(file)) == options[1]


@pytest.mark.parametrize(
    ("text", "number", "why"),
    [("{}", "", "Field required"), ("[1]", "", "is not a plan"), ('{"options": []}', ":3", "no option 3"),
     ("no json", "", "not readable")],
)  # fmt: skip
def test_another_file_is_refused(tmp_path: Path, text: str, number: str, why: str) -> None:
    file = tmp_path / "plans.json"
    file.write_text(text)
    with pytest.raises(JobError, match=why):
        load_plan(f"{file}{number}")
    with pytest.raises(JobError, match=r"Cannot read .*No such file"):
        load_plan(str(tmp_path / "nowhere.json"))
