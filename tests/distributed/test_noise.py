"""Replicas measure the noise of their gradients, and adapt their batch, without changing a bit of the rest."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import yunlu.training.gradient_noise as noises
from tests.distributed.parity import Recorder
from tests.distributed.parity import make_plan as make_usual_plan
from tests.distributed.ranks import run_world
from tests.distributed.test_worker_groups import (
    BATCH,
    Runs,
    events,
    strike,
    wait_for_end,
    wait_for_step,
    wait_for_workers,
    write_job,
)
from yunlu.jobs.lifecycle import resize
from yunlu.planning.layouts import Layout
from yunlu.runs.events import BatchChanged, DataOpened, StateChanged
from yunlu.runs.run_store import Log, RunStore
from yunlu.spec.job import Job
from yunlu.training import loop
from yunlu.training.data.sample_order import digest_of, permute
from yunlu.training.engine import Engine
from yunlu.training.gradient_noise import NoiseScale
from yunlu.training.parallel.world import World
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.tasks.task import TrainingInputs

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
SAMPLES, FEATURES = 3000, 40
ALONE = Layout()


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    truth = torch.randn(FEATURES, 1, generator=generator) / FEATURES**0.5
    return inputs, inputs @ truth + 0.5 * torch.randn(SAMPLES, 1, generator=generator)


def network() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(FEATURES, 1)


def truth_of(model: nn.Linear) -> tuple[float, float]:
    """tr(Sigma) and |G|^2 over all samples, exactly."""
    inputs, targets = points()
    residuals = 2 * (model(inputs) - targets)
    gradients = torch.cat((inputs * residuals, residuals), dim=1).detach()
    return float(gradients.var(dim=0).sum()), float(gradients.mean(dim=0).square().sum())


def build(
    world: World, *, batch: int, micro_batch: int, lr: float, steps: int, **more: Any
) -> Engine:
    optimizer = {"name": "sgd", "lr": lr}
    train = {"batch": batch, "steps": steps, "optimizer": optimizer, "clip": 1.0,
             "schedule": {"name": "constant", "warmup": 0}, **more}  # fmt: skip
    job = Job.model_validate({"task": "t", "model": "m", "data": "d", "train": train})
    plan = make_usual_plan(world.layout, job, micro_batch=micro_batch, kernel="single")
    plan = plan.model_copy(update={"lr": lr, "steps": steps, "warmup_steps": 0})
    inputs, targets = points()
    task = ObjectTask(model=network(), data={"train": (inputs, targets)})
    parts = TrainingInputs(task=task, model=task.build(job), splits=task.load(job))
    return Engine(job, plan, parts, lambda *_, **__: None, world=world)


def _measure(world: World, batch: int, micro_batch: int, numbers: int) -> dict[str, float]:
    noises.NUMBERS = numbers
    # Weights that hardly move have one noise scale.
    engine = build(world, batch=batch, micro_batch=micro_batch, lr=1e-9, steps=300)
    engine.noise = NoiseScale(engine.weights, every=2)
    loop.run(engine, Recorder([], []))
    return engine.noise.figures()


@pytest.mark.parametrize(
    ("layout", "batch", "micro_batch", "numbers"),
    [
        (ALONE, 60, 20, 1 << 14),
        (Layout(dp=2), 60, 30, 1 << 14),
        (Layout(dp=3), 50, 10, 1 << 14),
        (Layout(dp=2), 60, 30, 20),
    ],
)
def test_noise_and_signal_are_those_of_the_data(
    layout: Layout, batch: int, micro_batch: int, numbers: int
) -> None:
    true_noise, true_signal = truth_of(network())
    margin = 1 if numbers > FEATURES else 3  # of the places, half are looked at
    for figures in run_world(_measure, layout, batch, micro_batch, numbers):
        assert figures["noise_var"] == pytest.approx(true_noise, rel=0.08 * margin)
        assert figures["noise_sqr"] == pytest.approx(true_signal, rel=0.15 * margin)
        assert figures["noise_parts"] == (3 if layout.dp == 3 else 2)


def _train(world: World, is_measured: bool) -> tuple[list[float], list[float], list[list[float]]]:
    engine = build(world, batch=60, micro_batch=10, lr=0.05, steps=45)
    if not is_measured:
        engine.noise.is_due = lambda step: False
    recorder = Recorder([], [])
    loop.run(engine, recorder)
    assert (engine.noise.value is not None) == is_measured
    weights = [weight.detach().flatten().tolist() for weight in engine.weights]
    return recorder.losses, recorder.norms, weights


@pytest.mark.parametrize("layout", [ALONE, Layout(dp=3)])
def test_measuring_changes_no_bit_of_the_training(layout: Layout) -> None:
    assert run_world(_train, layout, True) == run_world(_train, layout, False)


def _adapt(world: World, asked: int | None, replicas: int) -> tuple[list[float], list[Any], int]:
    engine = build(
        world,
        batch=24,
        micro_batch=24,
        lr=0.01,
        steps=70,
        adapt_batch={"max": 96, "rate": "linear"},
    )
    engine.batch_schedule.restore({"replicas": replicas})
    engine.requested_batch = lambda: (
        asked if world.is_leader else 7
    )  # only the leader's word counts
    recorder = Recorder([], [])
    loop.run(engine, recorder)
    turns = [turn.model_dump() for turn in engine.batch_schedule.changes]
    return recorder.losses, turns, engine.batch_schedule.steps


def test_workers_turn_to_another_batch_together_and_train_as_one_would() -> None:
    ((alone, turns, steps),) = run_world(_adapt, ALONE, 60, 1)
    assert [(turn["step"], turn["batch"], turn["rate"]) for turn in turns][:1] == [(40, 60, 2.5)]
    assert 40 < steps < 70
    assert len(alone) == steps
    for losses, others, _ in run_world(_adapt, Layout(dp=2), 60, 2):
        assert [turn["batch"] for turn in others][:1] == [60]
        # How far a step brings the run is measured, and differs a little.
        common = min(len(alone), len(losses))
        assert common > 50
        assert losses[:common] == pytest.approx(alone[:common], rel=1e-4)


def test_the_batch_follows_the_replicas() -> None:
    first, second = run_world(_adapt, Layout(dp=2), None, 1)
    assert first == second
    _, turns, _ = first
    assert (turns[0]["step"], turns[0]["batch"]) == (40, 48)


@pytest.mark.long
def test_a_group_adapts_its_batch_and_takes_every_sample_of_an_epoch_once(
    tmp_path: Path, own_home: Path
) -> None:
    write_job(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text(f"{job.read_text()}  adapt_batch: {2 * BATCH}\n")
    runs = Runs(tmp_path, own_home)
    try:
        run = runs.start("--devices", "2", "--set", "train.steps=240", brake=False)
        wait_for_step(run, 45)
        resize(run, devices=3)
        wait_for_workers(run, 3)
        wait_for_step(run, 85)
        strike(run, 0, signal.SIGKILL)
        wait_for_step(run, 105)
        resize(run, devices=2)
        wait_for_end(run)
    finally:
        runs.end()
    turns = events(run, BatchChanged)
    sizes = read_sizes(run)
    batches = {turn["batch"] for turn in turns}
    assert min(batches) == BATCH < max(batches) <= BATCH * 3 // 2  # as far as noise allows
    assert batches <= set(sizes.values())
    assert max(sizes.values()) == max(batches)
    assert len(sizes) == max(sizes) == turns[-1]["steps"]
    assert events(run, StateChanged)[-1].state == "finished"


def read_sizes(run: RunStore) -> dict[int, int]:
    """How many samples each step took; they are those that follow the ones of the step before."""
    records = [json.loads(line) for line in (run.path / Log.LEDGER).read_text().splitlines()]
    ledger = {record["step"]: record for record in records}
    samples, done = events(run, DataOpened)[0].train, 0
    for step in sorted(ledger):
        epoch, first = divmod(done, samples)
        places = np.arange(first, first + ledger[step]["samples"], dtype=np.uint64)
        assert places[-1] < samples
        indices = permute(places, samples, seed=0, epoch=epoch)
        assert int(ledger[step]["digest"], 16) == digest_of(indices), step
        done += len(indices)
    return {step: record["samples"] for step, record in sorted(ledger.items())}
