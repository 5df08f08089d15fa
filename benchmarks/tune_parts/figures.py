"""What a part found, and its table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of a table."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    """To be at or below this; where neither bound is given, it is only told."""
    at_least: float | None = None
    compared: str = ""
    """With what, in words."""

    @property
    def is_met(self) -> bool | None:
        """None where nothing is asked."""
        if self.at_most is None and self.at_least is None:
            return None
        above = self.at_most is not None and not self.value <= self.at_most
        below = self.at_least is not None and not self.value >= self.at_least
        return not (above or below)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"is_met": self.is_met}


def make_table(title: str, figures: Sequence[Figure]) -> Table:
    """For people."""
    table = Table(
        "figure", "found", "to reach", "compared with", "", title=title, title_justify="left"
    )
    for figure in figures:
        goals = [
            f"{sign} {show(goal)}"
            for sign, goal in (("≤", figure.at_most), ("≥", figure.at_least))
            if goal is not None
        ]
        mark = {None: "", True: "✓", False: "✗"}[figure.is_met]
        found = f"{show(figure.value)} {figure.unit}".rstrip()
        table.add_row(figure.name, found, ", ".join(goals), figure.compared, mark)
    return table


def show(value: float) -> str:
    """With three figures or so."""
    if abs(value) >= 100:
        return f"{value:,.1f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"
