"""The worker's plan says where it departs from the one that was submitted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.planning.test_options import choose, make_ask
from yunlu.planning.plan import Choice, Hardware, Plan, refine

PLANNED = choose(make_ask()).best
HERE = Hardware(device="T4")


def with_choices(plan: Plan, **values: str) -> Plan:
    """The plan with other values, as a worker that measured would choose them."""
    choices = [
        choice.model_copy(update={"value": values[choice.name], "reason": "measured"})
        if choice.name in values
        else choice
        for choice in plan.choices
    ]
    return plan.model_copy(update={"choices": tuple(choices)})


def figures(plan: Plan, **values: float) -> Plan:
    prediction = plan.prediction.model_copy(update=values)
    return plan.model_copy(update={"prediction": prediction})


def test_a_plan_that_holds_is_not_changed() -> None:
    assert refine(PLANNED, PLANNED) == PLANNED


def test_every_decision_that_differs_is_told_with_its_reason() -> None:
    refined = refine(PLANNED, with_choices(PLANNED, precision="fp32", steps="7"))
    told = {change.name: change for change in refined.refinements}
    assert set(told) == {"precision", "steps"}
    assert (told["precision"].planned, told["precision"].refined) == (PLANNED.precision, "fp32")
    assert told["steps"].reason == "measured"


def test_what_only_a_worker_decides_is_no_change() -> None:
    own = Choice(name="optimiser kernel", value="fused", reason="timed")
    measured = PLANNED.model_copy(update={"choices": (*PLANNED.choices, own)})
    assert refine(PLANNED, measured).refinements == ()


@pytest.mark.parametrize(
    ("quantity", "name"),
    [("step_s", "step time"), ("memory_bytes", "memory"), ("total_s", "total time")],
)
def test_a_figure_counts_once_it_leaves_its_interval(quantity: str, name: str) -> None:
    low, high = PLANNED.prediction.intervals[quantity]
    inside: dict[str, Any] = {quantity: (low + high) / 2}
    assert refine(PLANNED, figures(PLANNED, **inside)).refinements == ()
    (change,) = refine(PLANNED, figures(PLANNED, **{quantity: 1.01 * high})).refinements
    assert change.name == name


def test_a_device_of_this_machine_may_have_two_names_but_not_be_of_two_kinds() -> None:
    here = PLANNED.model_copy(update={"hardware": HERE})
    other = with_choices(here, device="cuda (Tesla T4)")
    assert refine(here, other).refinements == ()
    assert refine(PLANNED, other).refinements[0].name == "device"
    processor = with_choices(here, device="cpu (Xeon)").model_copy(update={"device": "cpu"})
    assert refine(here, processor).refinements[0].name == "device"


def test_what_the_submitted_plan_pinned_keeps_its_reason() -> None:
    pinned = tuple(
        choice.model_copy(update={"pinned": True, "reason": "set in the job"})
        for choice in PLANNED.choices
    )
    refined = refine(PLANNED, PLANNED.model_copy(update={"choices": pinned}))
    for before, now in zip(PLANNED.choices, refined.choices, strict=True):
        expected = before.reason if before.pinned else f"as planned: {before.reason}"
        assert now.reason == ("set in the job" if before.pinned else expected)
