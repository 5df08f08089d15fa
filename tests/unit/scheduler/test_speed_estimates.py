"""What the allocator believes about runs, in pools of several types."""

import numpy as np
import pytest

from yunlu.scheduler.allocation_record import read_allocation
from yunlu.scheduler.policies import open_estimator, open_policy
from yunlu.scheduler.policy.fitting import Fitter
from yunlu.scheduler.policy.goodput import BatchLimits, Observations, StepTiming
from yunlu.scheduler.run_progress import CatalogSpeeds

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
