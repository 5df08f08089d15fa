"""Refinement: what measurements changed in a plan that was made before the run, and why. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.units import show_bytes, show_duration
from yunlu.hardware.offer import HERE
from yunlu.planning.explain import show_interval
from yunlu.planning.plan import PlanChange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.planning.plan import Choice, Plan

_FIGURES = {
    "memory_bytes": ("memory", show_bytes),
    "step_s": ("step time", show_duration),
    "total_s": ("total time", show_duration),
}


def refine(planned: Plan, measured: Plan) -> Plan:
    """The measured plan, with the differences from the one that was submitted.

    What the submitted plan pinned and the worker kept keeps its reason.
    """
    before = {choice.name: choice for choice in planned.choices}
    choices = tuple(_keep_reason(before.get(item.name), item) for item in measured.choices)
    changes = (*_changed_choices(planned, measured), *_changed_figures(planned, measured))
    return measured.model_copy(update={"choices": choices, "refinements": changes})


def _keep_reason(planned: Choice | None, now: Choice) -> Choice:
    is_handed_over = planned is not None and now.pinned and not planned.pinned
    if planned is None or not is_handed_over or planned.value != now.value:
        return now
    return now.model_copy(update={"reason": f"as planned: {planned.reason}"})


def _changed_choices(planned: Plan, measured: Plan) -> Iterator[PlanChange]:
    """Decisions of both plans that differ; what only a worker can decide was never planned."""
    before = {choice.name: choice.value for choice in planned.choices}
    # The catalog and the driver name one device differently.
    is_same_device = planned.hardware.cloud == HERE and planned.device == measured.device
    for choice in measured.choices:
        was = before.get(choice.name, choice.value)
        if was != choice.value and not (choice.name == "device" and is_same_device):
            yield PlanChange(
                name=choice.name, planned=was, refined=choice.value, reason=choice.reason
            )


def _changed_figures(planned: Plan, measured: Plan) -> Iterator[PlanChange]:
    """Predicted figures that lie outside the interval that was shown."""
    for quantity, (name, show) in _FIGURES.items():
        interval, now = getattr(planned, quantity), getattr(measured.prediction, quantity)
        if not interval.low <= now <= interval.high:
            yield PlanChange(
                name=name,
                planned=show_interval(interval, show),
                refined=show(now),
                reason="from passes that the worker timed",
            )
