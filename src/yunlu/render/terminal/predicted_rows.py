"""Foretold rows as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from yunlu.core.units import show_bytes, show_duration
from yunlu.render.terminal.page import indented, plain_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

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


def rows_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line each: what is foretold, or why it cannot be."""
    table = plain_table()
    for title in _TITLES:
        table.add_column(title, justify="left" if title in {"model", "fits"} else "right")
    for row in rows:
        number, model = str(row["row"] + 1), str(row["model"])
        if row.get("reason"):
            table.add_row(
                number, model, "–", "", "", "", "", Text(str(row["reason"]), style="yellow")
            )
            continue
        pace, memory = "tokens_per_s_per_device", "peak_memory_bytes"
        table.add_row(
            number,
            model,
            f"{row[pace]:,.0f}",
            f"{row[f'{pace}_p10']:,.0f}–{row[f'{pace}_p90']:,.0f}",
            show_duration(row["step_time_s"]),
            show_bytes(row[memory]),
            f"{show_bytes(row[f'{memory}_p10'])}–{show_bytes(row[f'{memory}_p90'])}",
            "yes" if row["fits"] else "no",
        )
    return indented(table)
