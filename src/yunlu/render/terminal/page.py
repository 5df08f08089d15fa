"""What every verb prints with: console, colours, tables, JSON; foreign text cannot steer the terminal."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

from yunlu.core.secrets import clean_for_terminal, escape_for_json
from yunlu.core.settings import terminal_columns
from yunlu.render.terminal.fitting_table import FittingTable
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from yunlu.core.value import Value


class TerminalConsole(Console):
    """Cleans all text at the last moment before it is written; only its own colours and moves remain.

    Plain strings are shown as they are, without markup: names of others may hold ``[link=...]``.
    """

    def __init__(self, **options: Any) -> None:
        if (columns := terminal_columns()) is not None:
            options.setdefault("width", max(columns, _NARROWEST))
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        text = super()._render_buffer(map(_clean, buffer))
        # Tables are padded to the width of the page: of no use in a file.
        return text if self.is_terminal else re.sub(r" +(?=\n)", "", text)


def has_width(console: Console) -> bool:
    """Whether lines are to keep to a width: on a terminal, and where ``COLUMNS`` asks for it."""
    return console.is_terminal or terminal_columns() is not None


def print_lines(console: Console, text: Text, *, hang: int | None = None) -> None:
    """Print text whose words can be copied: broken between words only, and not at all in a file.

    ``hang``: spaces before the second and later lines of each paragraph; by default two more than before
    its first.
    """
    if not has_width(console):
        console.print(text, soft_wrap=True)
        return
    for paragraph in text.split("\n", allow_blank=True):
        plain = paragraph.plain
        below = len(plain) - len(plain.lstrip()) + 2 if hang is None else hang
        for line in break_lines(paragraph, console.width, hang=below):
            console.print(line, soft_wrap=True)


_UNIT = re.compile(r"\s*(?:(?!  | · ).)*(?:  +| · )?")
"""What is broken only if it is longer than a line: up to two spaces, or a dot between two."""
_WORD = re.compile(
    r"\s*(?:[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]|[^\s\u2e80-\u9fff\uf900-\uffef]+)\s*"
)
"""A word and the space after it; Chinese may be broken after every character."""
_LABEL = 18
"""A word that is longer than a line stays on that of its label."""


def break_lines(text: Text, width: int, *, hang: int = 0) -> list[Text]:
    """Lines of whole words, where possible of whole figures; what is longer, such as a path, is not cut."""
    lines: list[Text] = []
    for paragraph in text.split("\n", allow_blank=True):
        offsets = _find_breaks(paragraph.plain, width, hang=hang)
        parts = list(paragraph.divide(offsets)) or [Text()]
        for index, line in enumerate(parts):
            line.rstrip()
            if index < len(parts) - 1 and line.plain.endswith(" ·"):
                line.right_crop(2)
            if index:
                line.pad_left(hang)
        lines += parts
    return lines


def _find_breaks(plain: str, width: int, *, hang: int) -> list[int]:
    offsets: list[int] = []
    used = 0
    for unit in _UNIT.finditer(plain.rstrip()):
        is_whole = hang + cell_len(unit[0].rstrip(" ·")) <= width
        for found in [unit] if is_whole else _WORD.finditer(plain, unit.start(), unit.end()):
            size = cell_len(found[0].rstrip(" ·") if is_whole else found[0].rstrip())
            is_endless = hang + size > width and used <= _LABEL
            if used and used + size > width and not is_endless:
                offsets.append(found.start())
                used = hang
            used += cell_len(found[0])
    return offsets


@dataclass(frozen=True, slots=True)
class Hanging:
    """Text whose second and later lines begin further to the right; words stay whole."""

    text: Text
    hang: int = 3

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines that fit."""
        lines = break_lines(self.text, options.max_width, hang=self.hang)
        for line in lines:
            line.overflow = "fold"  # a word that is longer than a line: nothing is cut off
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as its longest line."""
        return Measurement.get(console, options, self.text)


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
_NARROWEST = 20


def make_console(*, stderr: bool = False) -> TerminalConsole:
    """Standard output or error: as wide as the terminal or ``COLUMNS`` says, else as reads well in a file."""
    console = TerminalConsole(stderr=stderr)
    if console.is_terminal or terminal_columns() is not None:
        return console
    return TerminalConsole(stderr=stderr, width=_PAGE)


def plain_table(**fitting: Any) -> FittingTable:
    """A table with a rule under its head and no frame; ``fitting``: what happens where it does not fit."""
    return FittingTable(
        **fitting,
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
