"""A plan on priced hardware is decided by the planner of the worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planning.test_options import choose, make_ask
from tests.unit.planning.test_search import question, work
from yunlu.hardware.fleet import Device, Machine
from yunlu.planning.plan import DatasetSize, Plan, Profile, StepSettings
from yunlu.planning.planner import count_steps, make_plan
from yunlu.spec.job import Job

DECIDED = ("steps", "steps_per_epoch", "epochs", "lr", "lr_factor", "warmup_steps")
ALSO_DECIDED = ("weight_decay", "evaluate_every", "batch", "accumulation", "micro_batch")


def plan_of(job: Job, data: DatasetSize, **changes: object) -> Plan:
    epochs = job.train.epochs or 10
    sized = replace(work(epochs * data.train), data=data, epochs=epochs)
    return choose(make_ask(job=job, question=question(most_devices=1, work=sized), **changes)).best


def measured_plan(job: Job, priced: Plan, data: DatasetSize) -> Plan:
    assert priced.facts is not None
    profile = Profile(
        parameters=priced.facts.parameters, trainable=priced.facts.trainable,
        activation_bytes_per_sample=1e6, probe_samples=priced.micro_batch, probe_s=1.0,
        update_s=0.1, load_s_per_sample=0.0, evaluate_s_per_sample=0.1, train_samples=data.train,
        validation_samples=data.validation, test_samples=data.test, startup_s=1.0,
        resident_bytes=1 << 20, task_metric="loss", metrics=("loss",),
        settings=StepSettings(threads=1, micro_batch=priced.micro_batch),
        reasons={"kernel": "timed"},
    )  # fmt: skip
    gpu = Device(kind="cuda", name="T4", memory_bytes=16 << 30)
    machine = Machine(hostname="host", cores=8, memory_bytes=1 << 36, devices=(gpu,))
    return make_plan(job, machine, profile)


def job_with(**train: object) -> Job:
    return Job.model_validate(
        {"task": "x", "model": "m", "data": "d", "devices": 1, "train": {"batch": 16, **train}}
    )


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"epochs": 3.5, "evaluate": 7},
        {"epochs": 2, "optimizer": {"name": "sgd", "scaling": "linear"}},
        {"optimizer": {"name": "adamw", "lr": 3e-4}, "schedule": {"warmup": 0.2}},
    ],
)
def test_what_is_shown_before_anyone_pays_is_what_the_worker_decides(
    train: dict[str, object],
) -> None:
    job, data = job_with(**train), DatasetSize(train=1001, validation=100, test=0)
    scaling = job.train.optimizer.scaling
    priced = plan_of(job, data, lr_scaling=scaling)
    measured = measured_plan(job, priced, data)
    for name in (*DECIDED, *ALSO_DECIDED):
        assert getattr(priced, name) == getattr(measured, name), name
    shown = {choice.name for choice in priced.choices}
    assert shown <= {choice.name for choice in measured.choices} | {"precision", "recompute"}
    assert priced.prediction.basis == "analytic"
    assert measured.prediction.basis == "measured"


def test_an_epoch_that_the_batch_does_not_divide_ends_with_a_smaller_step() -> None:
    job, data = job_with(epochs=4), DatasetSize(train=33, validation=0, test=0)
    priced = plan_of(job, data)
    assert priced.steps == 4 * 3 == count_steps(job, samples=33, batch=16)
    parts = priced.prediction.total_parts
    assert parts["steps"] == pytest.approx(priced.steps * priced.step_s.value)


def test_every_choice_has_a_reason() -> None:
    best = choose(make_ask()).best
    assert all(choice.reason for choice in best.choices)
    reasons = {choice.name: choice.reason for choice in best.choices}
    assert reasons["layout"].startswith("the fastest that fits")
    by_hand = best.replace(micro_batch=1).choices
    assert "changed by hand" in [choice.reason for choice in by_hand]
