from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.catalog.machine import Device, Machine
from yunlu.core.errors import DataError, JobError
from yunlu.planning.plan import Profile
from yunlu.planning.planner import (
    MEMORY_SHARE,
    choose_micro_batch,
    fixed_bytes,
    make_plan,
    memory_room_bytes,
)
from yunlu.spec.job import Job

GIB = 1 << 30
SETTINGS = {"threads": 2, "micro_batch": 32}


def machine(**changes: object) -> Machine:
    cpu = Device(kind="cpu", name="test", memory_bytes=8 * GIB, fast_precisions=("fp32", "bf16"))
    fields = {"hostname": "here", "cores": 4, "memory_bytes": 16 * GIB, "devices": (cpu,)}
    return Machine.model_validate(fields | changes)


def profile(**changes: object) -> Profile:
    fields = {
        "parameters": 1_000_000, "trainable": 1_000_000,
        "activation_bytes_per_sample": 1e5, "probe_samples": 32, "probe_s": 0.016,
        "update_s": 0.002, "load_s_per_sample": 1e-6, "evaluate_s_per_sample": 1e-4,
        "train_samples": 1000, "validation_samples": 100, "test_samples": 100,
        "startup_s": 3.0, "resident_bytes": GIB // 4, "settings": SETTINGS,
        "reasons": dict.fromkeys(("threads", "precision", "compile", "kernel"), "measured"),
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
    measured = SETTINGS | {"micro_batch": 16, "precision": "bf16", "compile": "inductor"}
    plan = make_plan(
        job(batch=64, micro_batch=16, precision="bf16", workers=3, steps=7, compile=True,
            optimizer={"lr": 0.5}, schedule={"warmup": 0.5}),
        machine(), profile(settings=measured),
    )  # fmt: skip
    assert (plan.micro_batch, plan.accumulation, plan.steps) == (16, 4, 7)
    assert (plan.precision, plan.workers, plan.lr, plan.compile) == ("bf16", 3, 0.5, "inductor")
    assert plan.warmup_steps == 4
    pinned = {choice.name for choice in plan.choices if choice.pinned}
    assert pinned >= {"batch", "micro-batch", "precision", "steps", "learning rate", "compile"}


@given(st.integers(1, 4096), st.floats(1e3, 1e9), st.integers(1, 64), st.floats(0.1, 8))
def test_a_chosen_micro_batch_fits_in_memory(
    batch: int, per_sample: float, gib: int, limit_gb: float
) -> None:
    device = Device(kind="cpu", name="c", memory_bytes=gib * GIB)
    for asked, limit in ((job(batch=batch), gib * GIB * MEMORY_SHARE),
                         (job(batch=batch, memory_gb=limit_gb), limit_gb * 1e9)):  # fmt: skip
        fixed = fixed_bytes(asked, resident_bytes=1e6, parameters=1000, trainable=1000)
        room = memory_room_bytes(asked, device, fixed)
        micro = choose_micro_batch(asked, batch=batch, room_bytes=room, bytes_per_sample=per_sample)
        assert 1 <= micro <= batch
        if micro > 1:
            assert fixed + micro * per_sample <= limit * 1.001


def test_the_settings_that_were_measured_are_the_plans_with_their_reasons() -> None:
    settings = SETTINGS | {"precision": "fp16", "padding": "bucket", "kernel": "fused"}
    reasons = dict.fromkeys(("threads", "precision", "compile", "kernel", "padding"), "2 × as fast")
    plan = make_plan(job(), machine(), profile(settings=settings, reasons=reasons))
    assert (plan.precision, plan.padding, plan.kernel) == ("fp16", "bucket", "fused")
    assert plan.adapt_precision  # FP16 is safe only with an eye on its modules
    told = {choice.name: choice.reason for choice in plan.choices}
    assert told["precision"] == told["padding"] == "2 × as fast"
    assert "recompute" not in told


def test_a_scaled_rate_says_what_it_was_scaled_from() -> None:
    asked = job(batch=128, optimizer={"lr": 0.1, "scaling": "linear", "name": "momentum"})
    plan = make_plan(asked, machine(), profile())
    assert plan.lr == pytest.approx(0.4)
    (told,) = [choice for choice in plan.choices if choice.name == "learning rate"]
    assert "0.1 at batch 32" in told.reason
    assert not told.pinned


def test_a_growing_batch_takes_fewer_steps() -> None:
    # 1000 samples: two epochs of 32 steps, two of 16 (63 a step would be 16), one of 8.
    plan = make_plan(job(epochs=5, grow_batch=2), machine(), profile())
    assert plan.steps == 2 * 32 + 2 * 16 + 8


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
