"""A batch that adapts: which samples steps take, how far they bring the run, and that a crash changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from yunlu.planning.large_batch import efficiency
from yunlu.planning.plan import Plan, Prediction
from yunlu.runs.events import BatchChanged, Evaluated
from yunlu.runs.run_store import Area, Document, Log, RunStore
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.training.batch_schedule import CHANGE_EVERY, BatchChange, BatchSchedule
from yunlu.training.data.sample_order import (
    BucketOrder,
    PhasedOrder,
    RunOrder,
    StepOrder,
    SwitchedOrder,
)
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.tasks.task import Batch
from yunlu.training.worker import run as live

MakeRun = Callable[..., RunStore]


@st.composite
def turned_orders(draw: st.DrawFn) -> RunOrder:
    samples, seed = draw(st.integers(1, 60)), draw(st.integers(0, 3))

    def make() -> StepOrder:
        return StepOrder(samples=samples, batch=draw(st.integers(1, samples)), seed=seed)

    order: RunOrder = PhasedOrder(((0, make()),))
    step = 0
    for _ in range(draw(st.integers(0, 4))):
        step += draw(st.integers(0, 25))  # 0: two turns at one step
        order = SwitchedOrder(order, step, make())
    return order


@settings(max_examples=40)
@given(turned_orders())
def test_each_sample_comes_once_per_epoch_whatever_the_batch(order: RunOrder) -> None:
    samples, step = order.samples, 0
    plain = StepOrder(samples=samples, batch=samples, seed=order_seed(order))
    wholes = plain.steps_from(0)
    epoch: list[int] = []
    turns = 0
    for step, indices in enumerate(islice(order.steps_from(0), 120)):
        assert len(indices) == order.size_of(step) > 0
        assert order.samples_before(step) == turns * samples + len(epoch)
        assert order.epoch_at(step) == pytest.approx(order.samples_before(step) / samples, abs=1)
        epoch.extend(indices.tolist())
        if len(epoch) == samples:
            # Where a sample comes in an epoch does not depend on batches.
            assert epoch == next(wholes).tolist()
            turns, epoch = turns + 1, []
            assert order.epoch_at(step + 1) == turns


def order_seed(order: RunOrder) -> int:
    last = order.order if isinstance(order, SwitchedOrder) else order.phases[0][1]
    assert isinstance(last, StepOrder)
    return last.seed


@settings(max_examples=40)
@given(turned_orders(), st.integers(0, 120))
def test_starting_late_gives_the_same_steps(order: RunOrder, start: int) -> None:
    whole = list(islice(order.steps_from(0), start + 5))[start:]
    late = list(islice(order.steps_from(start), 5))
    assert [step.tolist() for step in whole] == [step.tolist() for step in late]


def test_an_order_by_length_changes_only_between_epochs() -> None:
    def make(batch: int) -> BucketOrder:
        return BucketOrder(samples=20, batch=batch, seed=1, lengths=np.arange(20))

    before = PhasedOrder(((0, make(5)),))
    with pytest.raises(ValueError, match="middle of an epoch"):
        SwitchedOrder(before, 3, make(4))
    order = SwitchedOrder(before, 4, make(10))
    assert [len(step) for step in islice(order.steps_from(0), 6)] == [5, 5, 5, 5, 10, 10]


def make_schedule(
    *, steps: int = 1000, batch: int = 32, samples: int = 10_000, **train: Any
) -> BatchSchedule:
    asked = {"steps": steps, "batch": batch, "adapt_batch": {"max": 512}, **train}
    job = Job.model_validate({"task": "t", "model": "m", "data": "d", "train": asked})
    plan = Plan(
        device="cpu", threads=1, micro_batch=batch, batch=batch, accumulation=1, steps=steps,
        steps_per_epoch=-(-samples // batch), warmup_steps=0, lr=0.1, weight_decay=0.0,
        evaluate_every=0, checkpoint_every=100, best_metric="loss", stopping_metric="loss",
        workers=0, choices=(),
        prediction=Prediction(memory_bytes=0, step_s=1, samples_per_s=1, total_s=1, dollars=None),
    )  # fmt: skip
    return BatchSchedule(job, plan, None, samples=samples)


def test_without_a_change_the_run_is_the_plan() -> None:
    schedule = make_schedule(schedule="linear")
    assert schedule.steps == 1000
    assert [schedule.position(step) for step in (0, 17, 999)] == [0, 17, 999]
    assert schedule.rate_at(250) == 0.75
    assert not schedule.may_change(0)
    assert not make_schedule(adapt_batch=None).may_change(CHANGE_EVERY)


def test_steps_count_by_what_they_are_worth() -> None:
    schedule = make_schedule(schedule="linear")
    schedule.apply(BatchChange(step=200, batch=128, gain=2.5, rate=2.0))
    assert schedule.steps == 200 + 800 / 2.5
    assert schedule.position(199) == 199
    assert schedule.position(201) == 202.5
    assert schedule.rate_at(199) == pytest.approx(1 - 0.199)
    assert schedule.rate_at(200) == pytest.approx(2 * 0.8)
    schedule.apply(BatchChange(step=300, batch=32, gain=1.0, rate=1.0))
    assert schedule.position(300) == 450
    assert schedule.steps == 300 + 550
    assert schedule.order.size_of(199) == 32
    assert schedule.order.size_of(200) == 128
    assert schedule.order.size_of(300) == 32


@pytest.mark.parametrize(
    ("noise", "replicas", "batch"),
    [
        (1e6, 4, 128),  # noise enough for each of four workers
        (1e6, 64, 512),  # the job's limit
        (10.0, 4, 50),  # a sample is to keep 0.7 of its worth
        (1e6, 1, 32),
    ],
)
def test_the_batch_follows_the_workers_as_far_as_noise_allows(
    noise: float, replicas: int, batch: int
) -> None:
    schedule = make_schedule()
    change = schedule.plan_change(40, noise=noise, replicas=replicas)
    assert batch == (32 if change is None else change.batch)
    if change is not None and batch < 512:
        assert efficiency(noise, change.batch, 32) >= 0.7
        assert change.gain == pytest.approx(change.batch / 32 * efficiency(noise, change.batch, 32))


def test_a_requested_batch_is_limited() -> None:
    schedule = make_schedule(adapt_batch={"min": 16, "max": 100})
    for asked, batch in ((64, 64), (7, 16), (1000, 100)):
        change = schedule.plan_change(40, noise=50.0, replicas=1, requested=asked)
        assert change is not None
        assert change.batch == batch
    assert schedule.plan_change(40, noise=50.0, replicas=1, requested=32) is None
    assert schedule.plan_change(40, noise=None, replicas=1, requested=64) is None, (
        "its worth is unknown"
    )


def test_small_differences_do_not_change_the_batch() -> None:
    schedule = make_schedule()
    first = schedule.plan_change(40, noise=60.0, replicas=4)
    assert first is not None
    schedule.apply(first)
    assert schedule.plan_change(60, noise=62.0, replicas=4) is None
    later = schedule.plan_change(60, noise=250.0, replicas=4)
    assert later is not None
    assert later.batch == 128
    schedule.apply(later)
    again = schedule.plan_change(80, noise=2000.0, replicas=4)
    assert again is not None, "the same batch, but its steps are worth more"
    assert (again.batch, again.gain > 1.1 * later.gain) == (128, True)


@pytest.mark.parametrize(
    ("train", "factor"),
    [
        ({"optimizer": "sgd"}, 4 * efficiency(100.0, 128, 32)),
        ({"optimizer": "adamw"}, 2.0),
        ({"optimizer": {"name": "adamw", "scaling": "linear"}}, 4.0),
        ({"optimizer": "sgd", "adapt_batch": {"max": 512, "rate": "none"}}, 1.0),
        ({"optimizer": "adam", "adapt_batch": {"max": 512, "rate": "gain"}},
         4 * efficiency(100.0, 128, 32)),
    ],
)  # fmt: skip
def test_the_rate_follows_the_batch_as_the_job_says(train: dict[str, Any], factor: float) -> None:
    change = make_schedule(**train).plan_change(40, noise=100.0, replicas=1, requested=128)
    assert change is not None
    assert change.rate == pytest.approx(factor)


def test_a_schedule_is_restored_from_its_state() -> None:
    schedule = make_schedule()
    schedule.apply(BatchChange(step=40, batch=100, gain=2.0, rate=1.5))
    schedule.apply(BatchChange(step=40, batch=64, gain=1.5, rate=1.2))
    schedule.apply(BatchChange(step=200, batch=64, gain=1.9, rate=1.2))
    other = make_schedule()
    other.apply(BatchChange(step=60, batch=33, gain=1.0, rate=1.0))  # of a past that is no more
    other.restore(schedule.state())
    assert other.state() == schedule.state()
    assert (other.steps, other.rate_at(300)) == (schedule.steps, schedule.rate_at(300))
    mine, theirs = (islice(each.order.steps_from(0), 250) for each in (other, schedule))
    assert [step.tolist() for step in mine] == [step.tolist() for step in theirs]


def test_samples_sorted_by_length_change_between_epochs() -> None:
    train = {"steps": 100, "batch": 10, "adapt_batch": 20}
    job = Job.model_validate({"task": "t", "model": "m", "data": "d", "train": train})
    plan = make_schedule(steps=100, batch=10, adapt_batch=20)._plan  # pyright: ignore[reportPrivateUsage]
    plan = plan.model_copy(update={"padding": "bucket"})
    schedule = BatchSchedule(job, plan, np.arange(250), samples=250)
    assert [step for step in range(101) if schedule.may_change(step)] == []
    schedule = BatchSchedule(job, plan, np.arange(200), samples=200)
    assert [step for step in range(101) if schedule.may_change(step)] == [20, 40, 60, 80]


def points() -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(310, 6, generator=generator)
    targets = inputs[:, :1] * 2 + inputs[:, 1:2] + torch.randn(310, 1, generator=generator)
    return {"train": (inputs[:290], targets[:290]), "validation": (inputs[290:], targets[290:])}


class Crashing(ObjectTask):
    """Breaks in one training pass, counted from the first of the run."""

    def __init__(self, run: RunStore, at: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        super().__init__(model=model, data=points())
        self._run, self._left = run, at

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        if model.training and b'"running"' in (self._run.path / Log.EVENTS).read_bytes():
            self._left -= 1
            if self._left == 0:
                raise RuntimeError("a crash")
        return super().loss(model, batch)


def read(run: RunStore, key: str) -> dict[int, float]:
    return {record["step"]: record[key] for record, _ in run.read_metrics()}


def changes_of(run: RunStore) -> list[dict[str, Any]]:
    return [event for event, _ in run.read_events() if isinstance(event, BatchChanged)]


SETTINGS: dict[str, Any] = {
    "epochs": 12, "batch": 29, "micro_batch": 29, "trial_share": 0.0, "threads": 1,
    "checkpoint": 7, "optimizer": {"name": "momentum", "lr": 0.01},
    "adapt_batch": {"max": 120, "rate": "linear"},
}  # fmt: skip


def test_a_run_changes_to_the_requested_batch_and_ends_at_the_planned_progress(
    make_run: MakeRun,
) -> None:
    run = make_run(**SETTINGS)
    (run.path / Document.TARGET_BATCH).write_text("87")
    assert live(run.path, task=Crashing(run, -1)) is RunState.FINISHED
    first, *_ = turns = changes_of(run)
    assert (first.step, first.batch, first.rate) == (41, 87, 3.0)
    assert {change.batch for change in turns} == {87}
    sizes, samples = read(run, "items"), read(run, "samples")
    assert set(list(sizes.values())[:40]) == {29}
    assert max(list(sizes.values())[40:]) == 87
    assert len(sizes) == max(sizes) == turns[-1].steps
    assert 40 + 80 / 3 <= len(sizes) < 120
    assert samples[len(sizes)] == sum(sizes.values())
    assert 1 < first.gain < 3
    validated = [event for event, _ in run.read_events() if isinstance(event, Evaluated)]
    ends = {each.step for each in validated[:-1]}
    assert all(samples[step] % 290 == 0 for step in ends if step < len(sizes))


@pytest.mark.parametrize("at", [41, 43, 60])
def test_a_crash_around_a_change_has_no_effect(make_run: MakeRun, at: int) -> None:
    whole, broken = make_run(**SETTINGS), make_run(**SETTINGS)
    for run in (whole, broken):
        (run.path / Document.TARGET_BATCH).write_text("87")
    assert live(whole.path, task=Crashing(whole, -1)) is RunState.FINISHED
    assert live(broken.path, task=Crashing(broken, at)) is RunState.FAILED
    assert live(broken.path, task=Crashing(broken, -1)) is RunState.FINISHED
    for key in ("loss", "lr", "samples", "items"):
        assert read(broken, key) == read(whole, key)
    weights = load_file(whole.path / Area.MODEL / "model.safetensors")
    for name, weight in load_file(broken.path / Area.MODEL / "model.safetensors").items():
        assert torch.equal(weight, weights[name])


def test_a_job_refuses_limits_that_contradict_themselves() -> None:
    def make(**train: Any) -> Job:
        return Job.model_validate({"task": "t", "model": "m", "data": "d", "train": train})

    assert make(batch=32, adapt_batch=64).train.adapt_batch is not None
    for wrong, why in (
        ({"batch": 32, "adapt_batch": 16}, "outside"),
        ({"batch": 32, "adapt_batch": {"min": 40, "max": 64}}, "outside"),
        ({"adapt_batch": {"min": 80, "max": 64}}, "above max"),
        ({"adapt_batch": 64, "grow_batch": 2}, "cannot also grow"),
        ({"adapt_batch": 64, "gradient_release": True, "clip": None}, "remove adapt_batch"),
    ):
        with pytest.raises(ValueError, match=why):
            make(**wrong)
