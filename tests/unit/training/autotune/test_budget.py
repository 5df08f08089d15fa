"""Measuring takes its share of the run and no more: counted in passes, on a clock that only passes move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from yunlu.hardware.fleet import Machine
from yunlu.runs.events import PlanMade, WarningRaised
from yunlu.runs.fold import read_view
from yunlu.runs.run_store import RunStore
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.training import prepare, profile
from yunlu.training.autotune import timer, tune
from yunlu.training.autotune.budget import LEAST_S, MeasuredFigures, MeasuringBudget
from yunlu.training.probe import probe_machine
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.tasks.task import Batch, TrainingInputs
from yunlu.training.worker import run as live

MakeRun = Callable[..., RunStore]


class Clock:
    """Moved by the passes of the model, and a microsecond by whoever reads it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Slow(ObjectTask):
    """Each sample of a pass takes seconds of the clock, in training as in an evaluation."""

    def __init__(self, clock: Clock, sample_s: float, *, samples: int = 400) -> None:
        inputs = torch.randn(samples, 6)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        super().__init__(model=model, data=(inputs, (inputs[:, 0] > 0).long()))
        self.clock, self.sample_s = clock, sample_s
        self.passes: list[int] = []

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        self.passes.append(batch.samples)
        self.clock.now += self.sample_s * batch.samples
        return super().loss(model, batch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (timer, tune, profile):
        monkeypatch.setattr(module, "perf_counter", made)
    return made


def measured(clock: Clock, task: Slow, machine: Machine | None = None, **train: Any) -> Any:
    job = Job.model_validate(
        {"task": "python:objects", "model": "net", "data": "python:objects", "train": train}
    )
    inputs = TrainingInputs(task=task, model=task.build(job), splits=task.load(job))
    budget = MeasuringBudget(job.train.trial_share, clock=clock)
    found, _ = profile.measure(
        job, inputs, machine or probe_machine(), started_at=0.0, budget=budget
    )
    return found


@pytest.mark.parametrize("precision", ["auto", "fp16"])
@pytest.mark.parametrize("sample_s", [0.5, 20.0])
def test_slow_passes_are_few_however_much_there_would_be_to_measure(
    clock: Clock, sample_s: float, precision: str
) -> None:
    task = Slow(clock, sample_s)
    found = measured(clock, task, epochs=1, batch=32, precision=precision)
    measuring = found.measuring
    run_s = 400 * 0.8 * sample_s
    assert measuring.limit_s <= max(LEAST_S, 0.03 * run_s) * 1.2  # the rest of the data is held out
    assert measuring.took_s == pytest.approx(clock.now, rel=1e-3)
    # A pass that has begun comes to its end; a sample of an evaluation names the metrics.
    assert clock.now <= measuring.limit_s + max(task.passes) * sample_s + sample_s
    assert sum(task.passes) <= 0.03 * 400 + max(task.passes) + 1
    assert {"another micro-batch", "an evaluation"} <= set(measuring.left_out)
    assert found.trial_s <= measuring.took_s
    assert found.probe_s == pytest.approx(sample_s * found.probe_samples)
    assert found.evaluate_s_per_sample > 0
    assert "accuracy" in found.metrics


def test_quick_passes_are_timed_and_nothing_is_left_out_of_a_long_run(clock: Clock) -> None:
    task = Slow(clock, 1e-4)
    found = measured(clock, task, epochs=100, batch=32, threads=1)
    assert found.measuring.took_s <= found.measuring.limit_s
    assert set(found.measuring.left_out) <= {"compiling the model", "another optimiser kernel"}
    assert max(task.passes) == 32


def test_a_share_of_zero_tries_no_other_setting(clock: Clock) -> None:
    task = Slow(clock, 1e-4)
    found = measured(clock, task, epochs=100, batch=32, trial_share=0.0)
    assert found.trials == ()


def test_what_is_left_out_is_noted_once_and_the_limit_follows_the_run() -> None:
    clock = Clock()
    budget = MeasuringBudget(0.1, clock=clock)
    assert budget.limit_s == LEAST_S
    assert budget.allows(1.5, "one")
    assert not budget.allows(2.5, "two")
    assert not budget.allows(9.0, "two")
    budget.predict_run(100)
    assert budget.allows(9.0, "three")
    clock.now = 4.0
    assert budget.left_s == pytest.approx(6.0, abs=1e-4)
    assert budget.summary().left_out == ("two",)


def test_an_attempt_that_is_stopped_while_it_measures_leaves_its_figures_to_the_next(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "load_or_measure", lambda *_: None)
    run = make_run(epochs=2, batch=20, threads=1)
    found: list[str] = []
    keep = MeasuredFigures.keep

    def stop_after_two(self: MeasuredFigures, name: str, *figures: float) -> Any:
        kept = keep(self, name, *figures)
        found.append(name)
        if len(found) == 2:
            raise KeyboardInterrupt
        return kept

    with monkeypatch.context() as patched:
        patched.setattr(MeasuredFigures, "keep", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            live(run.path, task=Slow(Clock(), 0.0))
    again: list[str] = []

    def note(self: MeasuredFigures, name: str, *figures: float) -> Any:
        again.append(name)
        return keep(self, name, *figures)

    monkeypatch.setattr(MeasuredFigures, "keep", note)
    assert live(run.path, task=Slow(Clock(), 0.0)) is RunState.FINISHED
    assert len(found) == 2
    assert not set(found) & set(again)
    other = make_run(epochs=2, batch=20, threads=1)
    assert live(other.path, task=Slow(Clock(), 0.0)) is RunState.FINISHED
    assert "first" in again  # they are gone with the plan


def test_plan_and_log_say_how_long_measuring_took_and_that_a_warm_up_is_too_long(
    make_run: MakeRun,
) -> None:
    run = make_run(steps=4, batch=20, schedule={"name": "linear", "warmup": 50})
    assert live(run.path, task=Slow(Clock(), 0.0)) is RunState.FINISHED
    (plan,) = [event.plan for event, _ in run.read_events() if isinstance(event, PlanMade)]
    assert plan.measuring is not None
    by_name = {choice.name: choice for choice in plan.choices}
    assert "train.trial_share 0.03" in by_name["measuring"].reason
    assert by_name["warm-up"].pinned
    said = "50 steps were asked for, but the run has only 4"
    assert said in by_name["warm-up"].reason
    warnings = [e.message for e, _ in run.read_events() if isinstance(e, WarningRaised)]
    assert any(said in message for message in warnings)
    assert read_view(run).state is RunState.FINISHED
