"""What the parts answer: figures with what they are meant to reach."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table; smaller is better."""

    name: str
    value: float
    unit: str = "s"
    target: float | None = None
    """To be at or below this; None is only told."""
    exact: float | None = None
    """To be this, to the last digit shown."""
    compared: str = ""
    """With what, in words."""

    @property
    def is_met(self) -> bool | None:
        """None where nothing is asked."""
        if self.exact is not None:
            return abs(self.value - self.exact) < 0.05 + 1e-9
        return None if self.target is None else self.value <= self.target

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"is_met": self.is_met}


def make_table(title: str, figures: Sequence[Figure]) -> Table:
    """For people."""
    table = Table(
        "figure", "found", "to reach", "compared with", "", title=title, title_justify="left"
    )
    for figure in figures:
        goal = figure.exact if figure.exact is not None else figure.target
        sign = "" if goal is None else ("= " if figure.exact is not None else "≤ ") + _show(goal)
        mark = {None: "", True: "✓", False: "✗"}[figure.is_met]
        found = f"{_show(figure.value)} {figure.unit}".rstrip()
        table.add_row(figure.name, found, sign, figure.compared, mark)
    return table


def _show(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.1f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"
