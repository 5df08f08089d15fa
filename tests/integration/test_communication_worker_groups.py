"""Real worker groups that exchange in ways of their own, really disturbed: nothing is lost, nothing hangs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import load, read
from tests.distributed.test_worker_groups import (
    BATCH,
    Runs,
    events,
    losses,
    strike,
    wait_for_end,
    wait_for_step,
    wait_for_workers,
    write_job,
)
from yunlu.jobs import lifecycle
from yunlu.jobs.lifecycle import resize
from yunlu.runs.events import (
    CommunicationChosen,
    DataOpened,
    Evaluated,
    ModelExported,
    StateChanged,
    WorkerGroupFormed,
)
from yunlu.runs.run_store import Area, Log, RunStore
from yunlu.training.data.sample_order import StepOrder, digest_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 100


@pytest.fixture
def runs(tmp_path: Path, own_home: Path) -> Iterator[Runs]:
    write_job(tmp_path)
    job = tmp_path / "job.yaml"
    # Both in the middle of the way, and what was best is what is exported.
    text = job.read_text().replace("evaluate: never", "evaluate: 25")
    job.write_text(text.replace("{every: 60, keep_best: 0}", "{every: 30, keep_best: 1}"))
    made = Runs(tmp_path, own_home)
    try:
        yield made
    finally:
        made.end()


def start(runs: Runs, communication: str, *, steps: int = STEPS) -> RunStore:
    words = ["--set", f"communication={communication}", "--set", f"train.steps={steps}"]
    run = runs.start("--devices", "2", *words)
    wait_for_step(run, 5)
    return run


def check_run(run: RunStore, *, steps: int = STEPS) -> None:
    """It is finished, and the last time that a step was made it took its samples, each of them once."""
    assert events(run, StateChanged)[-1].state == "finished"
    about = events(run, DataOpened)[0]
    order = StepOrder(samples=about.train, batch=BATCH, seed=0).steps_from(0)
    expected = {step: digest_of(next(order)) for step in range(1, steps + 1)}
    records = [json.loads(line) for line in (run.path / Log.LEDGER).read_text().splitlines()]
    assert {record["step"]: int(record["digest"], 16) for record in records} == expected
    curve = losses(run)
    assert curve[steps] < curve[1]


def test_who_is_killed_is_replaced_by_one_who_has_to_choose_alike(runs: Runs) -> None:
    run = start(runs, "{codec: int8}", steps=40)
    strike(run, 1, signal.SIGKILL)
    wait_for_end(run)
    check_run(run, steps=40)
    assert [group.redone_steps for group in events(run, WorkerGroupFormed)] == [0, 0]
    chosen = {event.setting.codec for event in events(run, CommunicationChosen)}
    assert chosen == {"int8"}


@pytest.mark.parametrize(
    "communication",
    [
        pytest.param("{method: diloco, every: 4, codec: int8}", marks=pytest.mark.long),
        "{method: post-local, start: 10, every: 4}",
    ],
)
def test_workers_on_their_own_survive_a_kill_resizes_and_a_stop(
    runs: Runs, communication: str
) -> None:
    run = start(runs, communication)
    wait_for_step(run, 15)
    strike(run, 0, signal.SIGKILL)  # the one who speaks for all
    event = events(run, WorkerGroupFormed)[-1]
    assert event.redone_steps <= 4 + 1  # back to where they last met
    resize(run, devices=3)
    wait_for_workers(run, 3)
    wait_for_step(run, max(losses(run)) + 2)
    lifecycle.stop(run)
    done = max(losses(run))
    assert done < STEPS
    assert runs.call("resume", run.id, "--detach").returncode == 0
    wait_for_end(run)
    check_run(run)
    assert [event.resumed_from_step for event in events(run, StateChanged)
            if event.state == "running"] == [None, done]  # fmt: skip
    check_exported(run)


def check_exported(run: RunStore) -> None:
    """What was best is what is saved and exported, to the bit."""
    scores = {event.step: event.loss for event in events(run, Evaluated)
              if event.split == "validation"}  # fmt: skip
    best = min(scores, key=lambda step: scores[step])
    assert events(run, ModelExported)[-1].from_step == best
    saved = load(read(run.path / Area.CHECKPOINTS / f"step-{best:010d}"), "model")
    exported = load_file(run.path / Area.MODEL / "model.safetensors")
    assert exported
    for name, value in exported.items():
        assert torch.equal(value, saved[name]), name
