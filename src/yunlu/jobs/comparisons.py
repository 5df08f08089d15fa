"""Estimated, predicted and measured figures of a run, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.jobs.report_model import Comparison
from yunlu.jobs.run_log import points, samples_of_steps, step_s

if TYPE_CHECKING:
    from yunlu.jobs.run_log import RunLog
    from yunlu.planning.plan import Plan

_TOTALS = ("total_s", "dollars")
_QUANTITIES = ("memory_bytes", "step_s", "samples_per_s", *_TOTALS)


def compare(log: RunLog, plan: Plan | None, *, complete: bool) -> tuple[Comparison, ...]:
    """Every quantity of a prediction, where known."""
    predicted = plan.prediction.model_dump() if plan else {}
    estimate = plan.estimate.model_dump() if plan and plan.estimate else {}
    intervals = estimate.get("intervals", {})
    measured = _measured(log, predicted)
    estimate = {
        # Without an interval the total has a part that was not predicted: start-up.
        quantity: value
        for quantity, value in estimate.items()
        if quantity not in _TOTALS or quantity in intervals
    }
    rows: list[Comparison] = []
    for quantity in _QUANTITIES:
        expected, seen = predicted.get(quantity), measured.get(quantity)
        so_far, interval = quantity in _TOTALS and not complete, intervals.get(quantity)
        ratio = seen / expected if expected and seen is not None and not so_far else None
        inside = None
        if interval is not None and seen is not None and not so_far:
            inside = interval[0] <= seen <= interval[1]
        rows.append(
            Comparison(
                quantity=quantity,
                estimated=estimate.get(quantity),
                interval=interval,
                predicted=expected,
                measured=seen,
                ratio=ratio,
                inside=inside,
                so_far=so_far,
            )
        )
    return tuple(rows)


def _measured(log: RunLog, predicted: dict[str, Any]) -> dict[str, float | None]:
    """Measured by the worker; before it reports, computed from its records."""
    if log.view.measured is not None:
        return log.view.measured.model_dump()
    memory = [value for _, value in points(log.records, "memory_bytes")]
    samples = samples_of_steps(log.records)
    # As in the worker: a step consists of data wait and compute; a stall is not part of it.
    busy = sorted(step_s(record) for record in log.records)
    busy_s = sum(busy)
    total_s = log.wall_s or None
    price, planned_s = predicted.get("dollars"), predicted.get("total_s")
    return {
        "memory_bytes": max(memory, default=None),
        "step_s": busy[len(busy) // 2] if busy_s else None,
        "samples_per_s": sum(samples.values()) / busy_s if busy_s and samples else None,
        "total_s": total_s,
        "dollars": price * total_s / planned_s if price and planned_s and total_s else None,
    }
