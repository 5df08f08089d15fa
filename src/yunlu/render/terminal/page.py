"""What every verb prints with: the page, its colours, its tables, its JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from yunlu.core.foreign_text import escape_for_json
from yunlu.render.terminal.console import TerminalConsole
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from yunlu.core.value import Value

ACCENT = "dark_orange"
STATE_STYLES = {
    RunState.PENDING: ("○", "cyan"),
    RunState.PLANNING: ("◔", "cyan"),
    RunState.RUNNING: ("●", "bold green"),
    RunState.STOPPING: ("◑", "yellow"),
    RunState.FINISHED: ("✔", "green"),
    RunState.STOPPED: ("■", "yellow"),
    RunState.FAILED: ("✘", "bold red"),
    RunState.LOST: ("?", "bold magenta"),
}
_PAGE = 140


def make_console() -> TerminalConsole:
    """Standard output, at a width that reads well where no terminal says its own."""
    console = TerminalConsole()
    return console if console.is_terminal else TerminalConsole(width=_PAGE)


def plain_table() -> Table:
    """A table with a rule under its head and no frame."""
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        header_style="dim",
        border_style="bright_black",
    )


def indented(block: RenderableType) -> RenderableType:
    """One space from the edge, as everything else."""
    return Padding(block, (0, 0, 0, 1), expand=False)


def title_text(name: str, about: str) -> Text:
    """First line of a run or study."""
    mark = ("\n 云炉", f"bold {ACCENT}")
    return Text.assemble(mark, "  ", (name, "bold"), "  ", (about, "dim"))


def state_text(state: RunState) -> Text:
    """The state with its sign and colour."""
    sign, style = STATE_STYLES[state]
    return Text(f"{sign} {state}", style=style)


def print_value(value: Value, *, indent: int | None = None, **extra: Any) -> None:
    """Print a value, and what else belongs to it, as one JSON object."""
    print_json({**value.model_dump(mode="json"), **extra}, indent=indent)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print strict JSON: one line, or indented."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)
    print_json_text(text)


def print_json_text(text: str) -> None:
    """Print a JSON document that is text already."""
    sys.stdout.write(escape_for_json(text) + "\n")


def to_json(value: Any) -> str:
    """Strict JSON: numbers that are not finite become text."""
    return escape_for_json(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
