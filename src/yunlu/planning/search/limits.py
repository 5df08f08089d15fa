"""Budget and deadline limits, and the error text when no option meets them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.core.units import show_duration

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.planning.predict.query_batch import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalLimits:
    """Budget and deadline."""

    budget: float | None = None
    deadline_s: float | None = None

    def excess(self, total_s: Column, dollars: Column) -> Column:
        """Ratio to the tighter limit; at most 1 where both are met."""
        worst = np.zeros(len(total_s))
        if self.budget is not None:  # without a price it is unknown whether it meets the budget
            worst = np.maximum(worst, np.where(np.isnan(dollars), np.inf, dollars / self.budget))
        if self.deadline_s is not None:
            worst = np.maximum(worst, total_s / self.deadline_s)
        return worst


def explain_excess(
    limits: GoalLimits, nearest: Plan, *, total_s: Column, dollars: Column
) -> tuple[str, ...]:
    """Which limit no option meets, or that none meets both, and how near the nearest comes."""
    hardware, cost = nearest.hardware, nearest.dollars
    price = "has no known price" if cost is None else f"costs ${cost.value:,.2f}"
    result = (
        f"the nearest, {hardware} ({hardware.devices} x {hardware.device}), {price} "
        f"and takes {show_duration(nearest.total_s.value)}."
    )
    results: list[str] = []
    budget, deadline_s = limits.budget, limits.deadline_s
    if budget is not None and not (dollars <= budget).any():
        results.append(f"goal.budget: nothing fits ${budget:,.2f}; {result}")
    if deadline_s is not None and not (total_s <= deadline_s).any():
        results.append(
            f"goal.deadline: nothing is done within {show_duration(deadline_s)}; {result}"
        )
    if not results and budget is not None and deadline_s is not None:
        both = f"${budget:,.2f} and {show_duration(deadline_s)}"
        results.append(f"goal.budget, goal.deadline: nothing keeps to {both} at once; {result}")
    return tuple(results)
