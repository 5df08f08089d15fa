"""What the allocator believes about runs, in pools of several types."""

from dataclasses import replace

import numpy as np
import pytest

from tests.sample_events import sample_plan
from yunlu.planning.layouts import Layout, SplitConstraints
from yunlu.planning.plan import Hardware
from yunlu.planning.predict.local import STEP_PARTS
from yunlu.runs.run_store import write_submitted_plan
from yunlu.scheduler.allocation_record import read_allocation
from yunlu.scheduler.policies import open_estimator, open_policy
from yunlu.scheduler.policy.fitting import Fitter
from yunlu.scheduler.policy.goodput import BatchLimits, Observations, StepTiming
from yunlu.scheduler.run_progress import CatalogSpeeds
from yunlu.scheduler.run_status import make_request
from yunlu.spec.job import Job, LayoutSpec

LIMITS = BatchLimits(base=32, most=32, local_most=32, fixed=32)


def seen(*types):
    timings = tuple(
        StepTiming(name, 1, devices, 32 // devices, 0.1 / devices, 0.1 / devices + 0.01)
        for name in types
        for devices in (1, 2)
    )
    return Observations(signature="x", limits=LIMITS, timings=timings)


def rate(model, device_type):
    return float(model.goodput(device_type, np.array([1]), np.array([2]))[0])


def test_one_type_needs_no_comparison():
    assert isinstance(open_estimator(2, ("a100",)), Fitter)


@pytest.mark.parametrize(
    ("other", "least", "most"),
    [("H100", 2.0, 5.0), ("T4", 0.05, 0.4), ("something of ours", 0.999, 1.001)],
)
def test_type_that_was_not_tried_is_told_by_its_arithmetic(other, least, most):
    model = open_estimator(1, ("A100-80GB", other))(seen("A100-80GB"), None)
    assert least < rate(model, other) / rate(model, "A100-80GB") < most


def test_what_was_measured_goes_before_what_the_catalog_says():
    model = open_estimator(1, ("A100-80GB", "H100"))(seen("A100-80GB", "H100"), None)
    assert rate(model, "H100") == pytest.approx(rate(model, "A100-80GB"), rel=0.01)


def test_run_that_nobody_has_seen_is_not_told_in_another_unit():
    assert CatalogSpeeds().samples_per_s(seen(), "H100") is None
    assert CatalogSpeeds().samples_per_s(seen("H100"), "H100") > 1e12


@pytest.mark.parametrize(("asked", "least", "given"), [(1, 1, 1), (4, 1, 4), (3, 1, 2), (1, 2, 2)])
def test_run_of_a_new_program_begins_on_no_more_than_its_owner_asked_for(
    make_world, make_scheduler, asked, least, given
):
    world = make_world({"here": 8}, steps=200)
    run = world.submit("a", least=least, most=8, requested=asked)
    make_scheduler(world, policy=open_policy("yunlu"), make_estimator=open_estimator).step()
    assert read_allocation(run).placement.devices == given


def plan_for(devices, *, exchange_s, **more):
    """On so many devices, a step computes 0.4 s of work together and exchanges for so long."""
    facts = SplitConstraints(
        parameters=1000, trainable=1000, state_bytes=8e3, activation_bytes_per_sample=100, layers=8
    )
    figures = dict.fromkeys(STEP_PARTS, 0.0) | {"compute": 0.4 / devices, "dp": exchange_s}
    step_s = sum(figures.values())
    prediction = {
        "memory_bytes": 1e6, "step_s": step_s, "samples_per_s": 32 / step_s,
        "total_s": 200 * step_s, "dollars": None, "step_parts": figures,
    }  # fmt: skip
    given = {"batch": 32, "micro_batch": 32 // devices, "steps": 200, "room_bytes": 1e6}
    given |= {"devices": devices, "layout": Layout(dp=devices), "facts": facts}
    hardware = Hardware(device="cpu", devices_per_node=devices)
    return sample_plan(hardware=hardware, prediction=prediction, **given, **more)


def test_a_plan_that_scales_well_begins_on_more_devices_than_one_that_does_not(
    make_world, make_scheduler
):
    world = make_world({"here": 8}, steps=200)
    given = {}
    for name, exchange_s in (("well", 0.001), ("badly", 0.6)):
        run = world.submit(name, least=1, most=4, requested=4)
        write_submitted_plan(run, plan_for(4, exchange_s=exchange_s))
        given[name] = run
    make_scheduler(world, policy=open_policy("yunlu"), make_estimator=open_estimator).step()
    devices = {name: read_allocation(run).placement.devices for name, run in given.items()}
    assert devices == {"well": 4, "badly": 1}


def test_what_a_run_measures_goes_before_what_its_plan_expected():
    predicted = tuple(StepTiming("cpu", 1, n, 8, 0.1, 0.1 + 0.3 * (n > 1)) for n in (1, 2, 4))
    measured = tuple(StepTiming("cpu", 1, n, 32 // n, 0.4 / n, 0.4 / n) for n in (1, 2))
    estimate = open_estimator(4, ("cpu",))
    guess = Observations(signature="x", limits=LIMITS, predicted_timings=predicted)
    before = estimate(guess, None)
    assert estimate(guess, before).throughputs is before.throughputs
    after = estimate(replace(guess, timings=measured), before)
    alone = estimate(Observations(signature="x", limits=LIMITS, timings=measured), None)
    assert rate(after, "cpu") == pytest.approx(rate(alone, "cpu"), rel=0.01)
    assert rate(before, "cpu") < 0.5 * rate(after, "cpu")


def test_the_request_of_a_job_without_a_size_is_that_of_its_plan():
    job = Job.model_validate(
        {"task": "tabular-classification", "model": "mlp", "data": "synthetic:x"}
    )
    plan = plan_for(4, exchange_s=0.1)
    request = make_request(job, plan)
    assert (request.least, request.requested, request.is_rigid) == (1, 4, False)
    # 16,000 bytes of weights, gradients and state: two devices of 10,000 hold their shards.
    tight = plan.model_copy(update={"room_bytes": 1e4, "device": "cuda"})
    request = make_request(job, tight)
    assert (request.least, request.requested) == (2, 4)
    assert make_request(job, tight, most=1).least == 1
    pairs = job.model_copy(update={"layout": LayoutSpec(tp=2)})
    larger = tight.model_copy(update={"room_bytes": 5e3})
    request = make_request(pairs, larger, most=3)
    assert (request.least, request.most) == (2, 2)
