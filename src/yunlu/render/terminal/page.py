"""What every verb prints with: console, colours, tables, JSON; foreign text cannot steer the terminal."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from yunlu.core.secrets import clean_for_terminal, escape_for_json
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from yunlu.core.value import Value


class TerminalConsole(Console):
    """Cleans all text at the last moment before it is written; only its own colours and moves remain.

    Plain strings are shown as they are, without markup: names of others may hold ``[link=...]``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(map(_clean, buffer))


def print_text(text: str) -> None:
    """Print plain text on standard output."""
    sys.stdout.write(clean_for_terminal(text) + "\n")


def print_note(text: str) -> None:
    """Print plain text on standard error, where standard output carries JSON only."""
    sys.stderr.write(clean_for_terminal(text) + "\n")


def _clean(segment: Segment) -> Segment:
    text, style, control = segment
    if control:  # moves of a live display, made by Rich itself
        return segment
    if (
        style is not None and style.link is not None
    ):  # from coloured logs: shows one thing, opens another
        style = style.update_link(None)
    return Segment(clean_for_terminal(text), style)


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


def make_console(*, stderr: bool = False) -> TerminalConsole:
    """Standard output or error, at a width that reads well where no terminal says its own."""
    console = TerminalConsole(stderr=stderr)
    return console if console.is_terminal else TerminalConsole(stderr=stderr, width=_PAGE)


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
