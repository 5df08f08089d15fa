from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.catalog.machine import Device, Machine
from yunlu.core.errors import DataError, JobError
from yunlu.planning.plan import Profile
from yunlu.planning.planner import MEMORY_SHARE, make_plan
from yunlu.spec.job import Job

GIB = 1 << 30


def machine(**changes: object) -> Machine:
    cpu = Device(kind="cpu", name="test", memory_bytes=8 * GIB, fast_precisions=("fp32", "bf16"))
    fields = {"hostname": "here", "cores": 4, "memory_bytes": 16 * GIB, "devices": (cpu,)}
    return Machine.model_validate(fields | changes)


def profile(**changes: object) -> Profile:
    fields = {
        "parameters": 1_000_000, "trainable": 1_000_000, "flops_per_sample": 6e6,
        "activation_bytes_per_sample": 1e5, "probe_samples": 32, "probe_s": 0.016,
        "update_s": 0.002, "load_s_per_sample": 1e-6, "evaluate_s_per_sample": 1e-4,
        "train_samples": 1000, "validation_samples": 100, "test_samples": 100,
        "startup_s": 3.0, "resident_bytes": GIB // 4, "threads": 2, "threads_gain": 1.7,
        "task_metric": "accuracy",
        "metrics": ("accuracy", "loss"),
    }  # fmt: skip
    return Profile.model_validate(fields | changes)


def job(**train: object) -> Job:
    return Job.model_validate({"task": "t", "model": "m", "data": "d", "train": train})


def test_everything_auto_is_decided_with_a_reason() -> None:
    plan = make_plan(job(), machine(), profile())
    assert (plan.batch, plan.micro_batch, plan.accumulation) == (32, 32, 1)
    assert (plan.steps, plan.steps_per_epoch, plan.warmup_steps) == (320, 32, 16)
    assert (plan.precision, plan.lr, plan.compile, plan.workers) == ("fp32", 1e-3, "none", 0)
    assert all(choice.reason for choice in plan.choices)
    assert not any(choice.pinned for choice in plan.choices)


def test_what_the_user_sets_is_pinned() -> None:
    plan = make_plan(
        job(batch=64, micro_batch=16, precision="bf16", workers=3, steps=7, compile=True,
            optimizer={"lr": 0.5}, schedule={"warmup": 0.5}),
        machine(), profile(),
    )  # fmt: skip
    assert (plan.micro_batch, plan.accumulation, plan.steps) == (16, 4, 7)
    assert (plan.precision, plan.workers, plan.lr, plan.compile) == ("bf16", 3, 0.5, "inductor")
    assert plan.warmup_steps == 4
    pinned = {choice.name for choice in plan.choices if choice.pinned}
    assert pinned >= {"batch", "micro-batch", "precision", "steps", "learning rate", "compile"}


@given(st.integers(1, 4096), st.floats(1e3, 1e9), st.integers(1, 64))
def test_a_chosen_micro_batch_fits_in_memory(batch: int, per_sample: float, gib: int) -> None:
    small = machine(devices=(Device(kind="cpu", name="c", memory_bytes=gib * GIB),))
    measured = profile(activation_bytes_per_sample=per_sample, train_samples=batch)
    plan = make_plan(job(batch=batch), small, measured)
    assert 1 <= plan.micro_batch <= batch
    assert plan.accumulation * plan.micro_batch >= batch
    if plan.micro_batch > 1:
        assert plan.prediction.memory_bytes <= gib * GIB * MEMORY_SHARE * 1.001


def test_work_enough_makes_bf16_pay_only_where_it_is_native() -> None:
    heavy = profile(flops_per_sample=1e10)
    assert make_plan(job(), machine(), heavy).precision == "bf16"
    plain = machine(devices=(Device(kind="cpu", name="c", memory_bytes=GIB),))
    assert make_plan(job(), plain, heavy).precision == "fp32"


def test_the_prediction_adds_up() -> None:
    plan = make_plan(job(epochs=2), machine(dollars_per_hour=3.6), profile())
    step_s = 0.016 + 0.002 + 32e-6
    total_s = 3.0 + 64 * step_s + (2 * 100 + 100) * 1e-4
    assert plan.prediction.step_s == pytest.approx(step_s)
    assert plan.prediction.samples_per_s == pytest.approx(32 / step_s)
    assert plan.prediction.total_s == pytest.approx(total_s)
    assert plan.prediction.dollars == pytest.approx(total_s / 1000)


def test_slow_data_gets_loading_processes() -> None:
    assert make_plan(job(), machine(), profile(load_s_per_sample=1e-3)).workers > 0


def test_a_batch_larger_than_the_data_is_refused_with_the_limit() -> None:
    with pytest.raises(DataError, match="only 10 training samples") as caught:
        make_plan(job(batch=11), machine(), profile(train_samples=10))
    assert "10 or less" in str(caught.value.hint)


def test_an_unknown_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(JobError) as caught:
        make_plan(job(checkpoint={"metric": "acuracy"}), machine(), profile())
    assert "'accuracy'" in str(caught.value.hint)


def test_fine_tuning_a_trained_model_moves_less() -> None:
    tuned = Job.model_validate({"task": "t", "model": "hf:dir", "data": "d"})
    assert make_plan(tuned, machine(), profile()).lr == 5e-5
