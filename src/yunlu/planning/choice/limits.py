"""Budget and deadline: who meets them, and what to say where nobody does. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.core.units import show_duration

if TYPE_CHECKING:
    from yunlu.planning.choice.options import Option
    from yunlu.planning.foretell.points import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be spent."""

    budget: float | None = None
    deadline_s: float | None = None

    def excess(self, total_s: Column, dollars: Column) -> Column:
        """How many times the tighter limit each takes; at most 1 where both are met."""
        worst = np.zeros(len(total_s))
        if self.budget is not None:  # what has no price cannot be known to meet it
            worst = np.maximum(worst, np.where(np.isnan(dollars), np.inf, dollars / self.budget))
        if self.deadline_s is not None:
            worst = np.maximum(worst, total_s / self.deadline_s)
        return worst


def tell_excess(limits: Limits, nearest: Option) -> tuple[str, ...]:
    """Which limit the nearest option breaks, and by how much."""
    told: list[str] = []
    where = f"{nearest.hardware} ({nearest.hardware.devices} x {nearest.hardware.device})"
    dollars = nearest.dollars
    if limits.budget is not None and (dollars is None or dollars.value > limits.budget):
        cost = "has no known price" if dollars is None else f"costs ${dollars.value:,.2f}"
        told.append(
            f"goal.budget: nothing fits ${limits.budget:,.2f}; the nearest, {where}, {cost} "
            f"and takes {show_duration(nearest.total_s.value)}."
        )
    if limits.deadline_s is not None and nearest.total_s.value > limits.deadline_s:
        cost = "" if dollars is None else f" and costs ${dollars.value:,.2f}"
        told.append(
            f"goal.deadline: nothing is done within {show_duration(limits.deadline_s)}; the "
            f"nearest, {where}, takes {show_duration(nearest.total_s.value)}{cost}."
        )
    return tuple(told)
