from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sample_events import sample_plan
from yunlu.core.errors import DataError, JobError, ModelError
from yunlu.hardware.fleet import Device, Machine
from yunlu.planning.layouts import Layout, SplitConstraints
from yunlu.planning.plan import Hardware, Plan, Profile
from yunlu.planning.planner import (
    MEMORY_SHARE,
    choose_micro_batch,
    fixed_bytes,
    make_plan,
    memory_room_bytes,
)
from yunlu.planning.predict.local import STEP_PARTS
from yunlu.planning.splitting import (
    fewest_devices,
    fit_plan,
    layouts_by_count,
    predict_by_count,
    resplit,
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
        room = memory_room_bytes(asked, device.memory_bytes, fixed)
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


FACTS = {
    "parameters": 1_000_000, "trainable": 1_000_000, "state_bytes": 8e6,
    "activation_bytes_per_sample": 1e5, "layers": 4, "tensor_ways": (1, 2),
}  # fmt: skip


def spread(**parts: object) -> Job:
    return Job.model_validate({"task": "t", "model": "m", "data": "d", **parts})


def test_replicas_share_the_batch_and_the_cores() -> None:
    plan = make_plan(spread(devices=4), machine(), profile(facts=FACTS))
    assert (str(plan.layout), plan.devices) == ("dp4", 4)
    assert (plan.batch, plan.micro_batch, plan.accumulation, plan.threads) == (32, 8, 1, 1)
    told = {choice.name: choice for choice in plan.choices}
    assert (told["layout"].value, told["layout"].pinned) == ("dp4", False)
    assert "4 cores for 4 workers" in told["threads"].reason
    assert all(choice.reason for choice in plan.choices)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_an_uneven_share_is_rounded_up_for_all() -> None:
    plan = make_plan(spread(devices=3, train={"micro_batch": 4}), machine(), profile(facts=FACTS))
    assert (str(plan.layout), plan.micro_batch, plan.accumulation) == ("dp3", 4, 3)


def test_a_layout_in_the_job_is_pinned() -> None:
    plan = make_plan(spread(layout="fsdp2 x tp2"), machine(), profile(facts=FACTS))
    (told,) = [choice for choice in plan.choices if choice.name == "layout"]
    assert (told.value, told.pinned, plan.devices) == ("fsdp2 x tp2", True, 4)


def test_a_pipeline_gets_small_micro_batches() -> None:
    plan = make_plan(spread(layout="pp2"), machine(), profile(facts=FACTS))
    assert (plan.micro_batch, plan.accumulation) == (4, 8)


def test_a_model_nobody_looked_at_is_only_replicated_or_sharded() -> None:
    assert str(make_plan(spread(devices=2), machine(), profile()).layout) == "dp2"
    with pytest.raises(
        ModelError, match=r"not examined .*start a new run with --devices N"
    ) as caught:
        make_plan(spread(layout="tp2"), machine(), profile())
    assert "start a new run with --devices 2" in str(caught.value.hint)


def test_a_plan_for_one_worker_says_what_to_do_when_several_cannot_share_it() -> None:
    asking = spread(train={"batch": 1})
    plan = make_plan(asking, machine(), profile())
    _, reason = resplit(plan, asking, devices=2, cores=4)
    assert "1 of 2 devices can be used" in reason
    old = plan.model_copy(update={"facts": None})
    for call in (lambda: resplit(old, asking, devices=2, cores=4)[0],
                 lambda: fit_plan(old, asking, Layout(dp=2), cores=4)):  # fmt: skip
        with pytest.raises(ModelError, match="planned for one worker") as caught:
            call()
        assert "--devices 2" in str(caught.value.hint)


def test_settings_that_several_workers_cannot_have_are_left_out_or_refused() -> None:
    measured = SETTINGS | {"precision": "fp16", "compile": "inductor"}
    found = profile(facts=FACTS, settings=measured)
    plan = make_plan(spread(devices=2), machine(), found)
    assert (plan.precision, plan.compile, plan.adapt_precision) == ("fp16", "none", False)
    assert "fsdp" in plan.facts.why_not  # where fp16 runs now, no resize leads to shards
    assert make_plan(spread(layout="fsdp2"), machine(), found).precision == "fp32"
    shared = make_plan(spread(layout={"dp": 2, "zero1": True}), machine(), found)
    assert (shared.precision, shared.layout.zero1) == ("fp32", True)
    with pytest.raises(JobError, match=r"train.compile does not go with the layout dp2"):
        make_plan(spread(devices=2, train={"compile": True}), machine(), found)


def test_fp16_found_on_one_worker_keeps_zero1_out_of_every_resize() -> None:
    asking = spread(layout={"zero1": True})
    plan = make_plan(asking, machine(), profile(settings=SETTINGS | {"precision": "fp16"}))
    wider, reason = resplit(plan, asking, devices=2, cores=4)
    assert (wider.precision, wider.layout) == ("fp16", Layout(dp=2))
    assert "without zero1, train.precision: fp16" in reason
    pinned = spread(layout={"zero1": True}, devices=2, train={"precision": "fp16"})
    with pytest.raises(JobError, match="fp16 does not go with the layout dp2 and zero1"):
        make_plan(pinned, machine(), profile(facts=FACTS))


def test_what_one_worker_alone_may_have_goes_with_the_others_and_does_not_come_later() -> None:
    asking = spread()
    settings = SETTINGS | {"precision": "fp16", "compile": "inductor"}
    measured = profile(facts=FACTS, settings=settings)
    alone = make_plan(asking, machine(), measured)
    assert (alone.compile, alone.adapt_precision) == ("inductor", True)
    assert fit_plan(alone, asking, Layout(), cores=4) == alone
    several = fit_plan(alone, asking, Layout(dp=2), cores=4)
    assert (several.compile, several.precision, several.adapt_precision) == ("none", "fp16", False)
    sharded = fit_plan(alone, asking, Layout(fsdp=2), cores=4)
    assert (sharded.precision, sharded.adapt_precision) == ("fp32", False)

    asking = spread(layout="fsdp2")
    planned = make_plan(asking, machine(), measured)
    left = fit_plan(planned, asking, Layout(), cores=4)
    assert (left.compile, left.precision, left.adapt_precision) == ("none", "fp32", False)
    assert (left.threads, left.micro_batch, left.accumulation) == (2, 32, 1)


def test_every_gpu_is_taken_and_no_more_can_be() -> None:
    gpu = Device(kind="cuda", name="g", memory_bytes=8 * GIB)
    four = machine(devices=(gpu,) * 4, cores=8)
    assert str(make_plan(spread(), four, profile(facts=FACTS)).layout) == "dp4"
    with pytest.raises(JobError, match="this machine has 4 GPUs"):
        make_plan(spread(devices=5), four, profile(facts=FACTS))


def test_memory_is_predicted_for_one_worker_as_each_axis_divides_it() -> None:
    def memory(layout: object) -> float:
        large = FACTS | {"parameters": 10**8, "trainable": 10**8, "state_bytes": 8e8}
        large["layers"] = 12
        found = profile(facts=large, parameters=10**8, trainable=10**8, resident_bytes=GIB)
        return make_plan(spread(layout=layout), gpus, found).prediction.memory_bytes

    gpus = machine(devices=(Device(kind="cuda", name="g", memory_bytes=8 * GIB),) * 4)
    whole = memory("dp2")
    shared = {"dp": 2, "fsdp": 1, "tp": 1, "pp": 1, "zero1": True}
    assert memory("fsdp2") < memory(shared) < whole
    assert memory("tp2") == pytest.approx(memory("pp2"), rel=0.05)
    assert memory("fsdp2 x tp2") < memory("tp2") < 0.75 * whole


def test_copies_kept_for_each_other_take_the_memory_of_a_cpu_only() -> None:
    gpus = machine(devices=(Device(kind="cuda", name="g", memory_bytes=8 * GIB),) * 2)

    def more_bytes(layout: object) -> float:
        plans = [
            make_plan(spread(layout=layout), on, profile(facts=FACTS)) for on in (machine(), gpus)
        ]
        return plans[0].prediction.memory_bytes - plans[1].prediction.memory_bytes

    checkpoint = 12e6 / 2  # each of two workers copies its share before it is written
    assert more_bytes("dp2") == checkpoint  # the other replica is alive
    assert more_bytes("fsdp2") == more_bytes("tp2") == pytest.approx(4 * 12e6 / 2 + checkpoint)
    owned = 4e6 + 8e6 / 2
    assert more_bytes({"dp": 2, "zero1": True}) == pytest.approx(4 * owned + owned / 2)


def test_more_workers_than_cores_are_not_predicted_to_be_faster() -> None:
    slow = profile(facts=FACTS, probe_s=1.0, settings=SETTINGS | {"threads": 1})

    def step_s(devices: int) -> float:
        return make_plan(spread(devices=devices), machine(), slow).prediction.step_s

    assert step_s(1) == pytest.approx(1.0, rel=0.01)
    assert step_s(2) == pytest.approx(0.5, rel=0.05)
    assert step_s(4) == pytest.approx(0.25, rel=0.15)
    assert step_s(8) > 0.95 * step_s(4)


def test_a_pipeline_waits_and_cut_matrices_talk() -> None:
    slow = profile(facts=FACTS, probe_s=1.0, settings=SETTINGS | {"threads": 1})

    def step_s(layout: object, **train: object) -> float:
        asked = spread(layout=layout, train=train)
        return make_plan(asked, machine(), slow).prediction.step_s

    assert step_s("pp2", micro_batch=32) == pytest.approx(1.0, rel=0.05)  # one at a time
    assert step_s("pp2", micro_batch=4) == pytest.approx(0.5 * 9 / 8, rel=0.05)
    assert step_s("fsdp2") > step_s("dp2")


def test_a_resized_plan_computes_the_same_on_other_devices() -> None:
    plan = make_plan(spread(devices=4), machine(), profile(facts=FACTS))
    fewer, reason = resplit(plan, spread(devices=4), devices=3, cores=4)
    assert (str(fewer.layout), fewer.micro_batch, fewer.accumulation) == ("dp3", 11, 1)
    assert "dp4 becomes dp3" in reason
    alone, _ = resplit(fewer, spread(devices=4), devices=1, cores=4)
    assert (str(alone.layout), alone.micro_batch, alone.threads) == ("single", 32, 2)
    kept = ("batch", "steps", "lr", "warmup_steps", "evaluate_every", "checkpoint_every")
    assert [getattr(alone, name) for name in kept] == [getattr(plan, name) for name in kept]


def test_every_number_of_devices_has_its_layout_before_it_is_needed() -> None:
    asking = spread(layout="dp2 x tp2")
    plan = make_plan(asking, machine(), profile(facts=FACTS))
    table = layouts_by_count(plan, asking, most=4)
    assert {count: str(found) for count, found in table.items()} == {
        1: "single", 2: "tp2", 3: "dp3", 4: "dp2 x tp2",
    }  # fmt: skip
    fitted = fit_plan(plan, asking, table[3], cores=4)
    assert (fitted.layout, fitted.micro_batch, fitted.threads) == (table[3], 11, 1)
    assert fit_plan(fitted, asking, plan.layout, cores=4) == plan


def test_plans_of_old_are_still_read() -> None:
    plan = make_plan(spread(), machine(), profile())
    old = plan.model_dump(mode="json") | {"layout": "single"}
    for key in ("devices", "alone", "facts", "room_bytes", "process_bytes"):
        del old[key]
    assert Plan.model_validate(old).layout.is_single


def planned(layout: Layout, *, devices_per_node: int = 8, **parts: float) -> Plan:
    """A plan of 32 samples a step whose prediction has these parts."""
    facts = SplitConstraints(
        parameters=1000, trainable=1000, state_bytes=8e3, activation_bytes_per_sample=100
    )
    figures = dict.fromkeys(STEP_PARTS, 0.0) | parts
    prediction = {
        "memory_bytes": 1e6, "step_s": sum(figures.values()), "samples_per_s": 1.0,
        "total_s": 1.0, "dollars": None, "step_parts": figures,
    }  # fmt: skip
    hardware = Hardware(devices_per_node=devices_per_node)
    return sample_plan(
        batch=32, micro_batch=4, accumulation=8 // layout.replicas, devices=layout.world,
        layout=layout, facts=facts, room_bytes=1e6, hardware=hardware, prediction=prediction,
    )  # fmt: skip


def test_the_step_of_other_sizes_follows_work_and_bytes_of_the_prediction() -> None:
    steps = predict_by_count(
        planned(Layout(dp=4), compute=0.1, dp=0.03, optimizer=0.01, other=0.02)
    )
    assert sorted(steps) == [1, 2, 4]
    assert steps[4].total_s == pytest.approx(0.16)
    # Two send half of a message twice, four three quarters; each of two computes twice as much.
    assert steps[2].parts == pytest.approx(
        {"compute": 0.2, "dp": 0.02, "optimizer": 0.01, "other": 0.02}
        | dict.fromkeys(("tp", "pp_bubble", "input"), 0.0)
    )
    assert (steps[1].compute_s, steps[1].dp_s) == (pytest.approx(0.4), 0.0)


def test_exchanges_between_machines_say_nothing_of_one_machine() -> None:
    plan = planned(Layout(dp=4), devices_per_node=2, compute=0.1, dp=0.03)
    assert sorted(predict_by_count(plan)) == [1, 4]


def test_a_plan_that_does_not_tell_its_parts_predicts_no_other_size() -> None:
    plan = planned(Layout(dp=4), compute=0.1)
    bare = plan.prediction.model_copy(update={"step_parts": {}})
    assert predict_by_count(plan.model_copy(update={"prediction": bare})) == {}
    assert fewest_devices(plan.model_copy(update={"facts": None})) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_other_sizes_of_a_plan_are_predicted_as_their_own_plans_would_be(devices: int) -> None:
    card = Device(kind="cuda", name="x", memory_bytes=8 * GIB, fast_precisions=("fp32",))
    here = machine(devices=(card,) * 4)
    four, own = (
        make_plan(job().model_copy(update={"devices": n}), here, profile()) for n in (4, devices)
    )
    step, expected = predict_by_count(four)[devices], own.prediction.step_parts
    # A message more or less is not told apart from other overhead.
    assert step.parts == pytest.approx(expected, rel=1e-2, abs=1e-4)
