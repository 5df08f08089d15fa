"""Trials that really train: a hold, a copy or a shared beginning changes no number."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from yunlu.core.files import write_atomically
from yunlu.jobs import lifecycle
from yunlu.runs.events import Evaluated, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, RunStore
from yunlu.spec.job import Job
from yunlu.spec.load import job_from_mapping
from yunlu.training import worker
from yunlu.tuning.study import Study
from yunlu.tuning.study_runner.slots import LocalSlots
from yunlu.tuning.study_runner.trial_runs import clone, read_trial_events, write_verdict
from yunlu.tuning.values import TrialState

EPOCHS = 4


@pytest.fixture(autouse=True)
def nobody_left_behind(own_home: Path) -> Iterator[None]:
    yield
    for process in psutil.process_iter(["cmdline"]):
        if any(str(own_home) in word for word in process.info["cmdline"] or ()):
            process.kill()


def make_job(name: str, *, search: dict[str, Any] | None = None, **train: Any) -> Job:
    mapping = {
        "name": name,
        "task": "tabular-classification",
        "model": {"name": "mlp", "args": {"hidden": [16], "dropout": 0.2}},
        "data": "sklearn:breast_cancer",
        "train": {
            "epochs": EPOCHS,
            "batch": 64,
            "threads": 1,
            "trial_share": 0.0,
            "schedule": "wsd",
            "optimizer": {"name": "adamw", "lr": 0.01},
            "checkpoint": {"metric": "loss", "keep_last": 9},
            **train,
        },
    }
    return job_from_mapping(mapping | ({} if search is None else {"search": search}))


def make_trial(job: Job, verdict: dict[str, Any] | None = None, **about: Any) -> RunStore:
    run = lifecycle.submit(job)
    told = {"study": "s", "number": 0, "params": {}, "rungs": EPOCHS, **about}
    write_atomically(run.path / Document.TRIAL, json.dumps(told))
    if verdict is not None:
        write_verdict(run, verdict)
    return run


def train(run: RunStore) -> str:
    """One attempt, in this process: its state at the end."""
    return worker.run(run.path)


def losses(run: RunStore) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def scores(run: RunStore) -> list[tuple[int, float]]:
    found = [event for event, _ in run.read_events() if isinstance(event, Evaluated)]
    return [(event.rung, event.loss) for event in found if event.split == "validation"]


def weights(run: RunStore) -> bytes:
    return (run.path / Area.MODEL / "model.safetensors").read_bytes()


@pytest.fixture
def whole() -> RunStore:
    """A run that nobody disturbed."""
    run = lifecycle.submit(make_job("whole"))
    assert train(run) == "finished"
    return run


def test_a_trial_held_at_a_rung_and_resumed_is_the_undisturbed_run(whole: RunStore) -> None:
    run = make_trial(make_job("held"), {"hold": "others first"})
    assert train(run) == "stopped"
    states = [event for event, _ in run.read_events() if isinstance(event, StateChanged)]
    # A word that came before the first step is heard after it.
    assert states[-1].reason == "held at rung 0: others first"
    assert states[-2].state == "stopping"
    write_verdict(run, {"until": 2})
    assert train(run) == "stopped"  # nobody says how it goes on: it holds itself
    assert read_trial_events(run).reason == "held at rung 2: no decision from the study"
    write_verdict(run, {})
    assert train(run) == "finished"
    steps = [record["step"] for record, _ in run.read_metrics()]
    assert steps == sorted(losses(whole))
    assert losses(run) == losses(whole)
    assert scores(run) == scores(whole)
    assert weights(run) == weights(whole)


def test_a_pruned_trial_saves_nothing(whole: RunStore) -> None:
    run = make_trial(make_job("pruned", checkpoint={"keep_best": 0}), {"prune": "too slow"})
    assert train(run) == "stopped"
    assert read_trial_events(run).reason == "pruned at rung 0: too slow"
    assert not [*(run.path / Area.CHECKPOINTS).glob("step-*")]
    assert len(losses(run)) == 1 < len(losses(whole))


def test_a_copy_with_the_same_setting_goes_on_to_the_same_weights(whole: RunStore) -> None:
    parent = make_trial(make_job("parent"), {}, saves_checkpoints=True)
    assert train(parent) == "finished"
    assert losses(parent) == losses(whole)
    copy = make_trial(make_job("copy"), {}, is_copy=True)
    assert clone(parent, copy, 2)
    assert train(copy) == "finished"
    first = read_trial_events(parent).step_of(2)
    assert first is not None
    assert losses(copy) == {step: loss for step, loss in losses(whole).items() if step > first}
    assert scores(copy) == scores(whole)[2:]
    assert weights(copy) == weights(whole)
    shutil.rmtree(parent.path / Area.CHECKPOINTS)
    late = make_trial(make_job("late"), {}, is_copy=True)
    assert not clone(parent, late, 2)
    assert not (late.path / Area.CHECKPOINTS).exists()


def test_a_copy_with_another_setting_goes_by_its_own_rules(whole: RunStore) -> None:
    del whole
    parent = make_trial(make_job("parent"), {}, saves_checkpoints=True)
    assert train(parent) == "finished"
    rules = {"name": "adamw", "lr": 0.002, "weight_decay": 0.5}
    copy = make_trial(make_job("other", optimizer=rules), {}, is_copy=True)
    assert clone(parent, copy, 2)
    assert train(copy) == "finished"
    rates = [{r["step"]: r["lr"] for r, _ in run.read_metrics()} for run in (parent, copy)]
    shared = rates[1].keys()
    assert min(shared) == (read_trial_events(parent).step_of(2) or 0) + 1
    assert all(rates[1][step] == pytest.approx(rates[0][step] / 5) for step in shared)
    saved = max((copy.path / Area.CHECKPOINTS).glob("step-*"))
    state = json.loads((saved / "state.json").read_text())
    decays = {group["values"]["weight_decay"] for group in state["optimizer"]["groups"]}
    assert decays == {0.0, 0.5}


@pytest.mark.slow
def test_what_two_settings_have_in_common_is_trained_once(own_home: Path) -> None:
    space = {"train.schedule.decay": [0.25, 0.5]}
    search = {"space": space, "metric": "loss", "method": "grid", "stop": "none", "parallel": 1}
    study = Study(make_job("prefix", search=search), name="prefix")
    study.optimize(slots=LocalSlots(1), elastic=False)
    first, second = sorted(study.trials, key=lambda facts: facts.number)
    assert [first.state, second.state] == [TrialState.DONE] * 2
    shared = second.trial.copied_from
    assert shared is not None
    assert shared[0] == first.number
    run = open_run(own_home / str(second.run))
    assert (
        min(losses(run))
        == (read_trial_events(open_run(own_home / str(first.run))).step_of(shared[1]) or 0) + 1
    )
    decay = second.params["train.schedule.decay"]
    alone = lifecycle.submit(make_job("alone", schedule={"name": "wsd", "decay": decay}))
    assert train(alone) == "finished"
    assert [(rung, values[0]) for rung, values in second.curve] == scores(alone)
    assert {**losses(alone), **losses(run)} == losses(alone)
    assert weights(run) == weights(alone)


@pytest.mark.slow
@pytest.mark.distributed
def test_all_workers_of_a_trial_obey_its_gate() -> None:
    # Long enough that the word to prune comes in time.
    job = make_job("worker-group", epochs=200).model_copy(update={"devices": 2})
    run = make_trial(job, {"until": 2})
    lifecycle.start(run)
    wait_for_rest(run, "stopped")
    assert read_trial_events(run).reason == "held at rung 2: no decision from the study"
    assert [rung for rung, _ in scores(run)] == [1, 2]
    write_verdict(run, {"until": 400})
    lifecycle.resume(run)
    while len(scores(run)) < 3:
        assert lifecycle.read_record(run).state.is_active
        time.sleep(0.01)
    write_verdict(run, {"prune": "enough"})
    wait_for_rest(run, "stopped")
    assert read_trial_events(run).reason.startswith("pruned at rung ")
    steps = [record["step"] for record, _ in run.read_metrics()]
    assert steps == [*range(1, len(steps) + 1)]


def wait_for_rest(run: RunStore, state: str) -> None:
    while lifecycle.read_record(run).state.is_active:
        time.sleep(0.05)
    assert lifecycle.read_record(run).state == state
