"""Predicted rows as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from yunlu.core.units import show_bytes, show_duration
from yunlu.render.terminal.page import indented, plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from yunlu.jobs.predict_table import PredictedRow

_TITLES = (
    "row",
    "model",
    "tokens/s a device",
    "10 to 90 %",
    "a step",
    "peak memory",
    "10 to 90 %",
    "fits",
)


def rows_table(rows: Sequence[PredictedRow]) -> RenderableType:
    """One line for each row: its prediction, or why there is none."""
    table = plain_table()
    for title in _TITLES:
        table.add_column(title, justify="left" if title in {"model", "fits"} else "right")
    for row in rows:
        number = str(row.row + 1)
        if row.reason:
            reason = Text(row.reason, style="yellow")
            table.add_row(number, row.model, "–", "", "", "", "", reason)
            continue
        table.add_row(
            number,
            row.model,
            _count(row.tokens_per_s_per_device),
            f"{_count(row.tokens_per_s_per_device_p10)}–{_count(row.tokens_per_s_per_device_p90)}",
            show_duration(row.step_time_s or 0.0),
            show_bytes(row.peak_memory_bytes or 0.0),
            f"{show_bytes(row.peak_memory_bytes_p10 or 0.0)}–"
            f"{show_bytes(row.peak_memory_bytes_p90 or 0.0)}",
            "yes" if row.fits else "no",
        )
    return indented(table)


def _count(value: float | None) -> str:
    return f"{value or 0.0:,.0f}"
