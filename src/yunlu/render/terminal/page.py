"""What every verb prints with: console, colours, tables, JSON; foreign text cannot steer the terminal."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

from yunlu.core.secrets import clean_for_terminal, escape_for_json
from yunlu.core.settings import read_language, terminal_columns
from yunlu.render.terminal.fitting_table import FittingTable
from yunlu.render.terminal.line_breaks import break_lines
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType

    from yunlu.core.value import Value
    from yunlu.render.i18n import BilingualText


class TerminalConsole(Console):
    """Cleans all text at the last moment before it is written; only its own colours and moves remain.

    Plain strings are shown as they are, without markup: names of others may hold ``[link=...]``.
    """

    def __init__(self, **options: Any) -> None:
        if (columns := terminal_columns()) is not None:
            options.setdefault("width", max(columns, _NARROWEST))
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        self._is_chinese = read_language() == "zh"

    def print(self, *objects: Any, **options: Any) -> None:
        """Print in the user's language."""
        if self._is_chinese:
            objects = tuple(_in_chinese(item) for item in objects)
        super().print(*objects, **options)

    def print_verbatim(self, text: Text) -> None:
        """Print a line of a log as it is: neither wrapped nor translated."""
        before, self._is_chinese = self._is_chinese, False
        try:
            super().print(text, soft_wrap=True)
        finally:
            self._is_chinese = before

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render in the user's language, whoever asks: a live display, the library of the help."""
        if self._is_chinese and not _is_translated(renderable):
            renderable = _in_chinese(renderable, is_ours=False)
        return super().render(renderable, options)

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
    if read_language() == "zh":  # a line alone would not be recognised
        text = _in_chinese(text)
    for paragraph in text.split("\n", allow_blank=True):
        plain = paragraph.plain
        below = len(plain) - len(plain.lstrip()) + 2 if hang is None else hang
        for line in break_lines(paragraph, console.width, hang=below):
            console.print(line, soft_wrap=True)


def print_text(text: str) -> None:
    """Print plain text on standard output."""
    sys.stdout.write(clean_for_terminal(in_language(text)) + "\n")


def print_note(text: str) -> None:
    """Print plain text on standard error, where standard output carries JSON only."""
    sys.stderr.write(clean_for_terminal(in_language(text)) + "\n")


def in_language(text: str, *, is_label: bool = False) -> str:
    """The text in the user's language; ``is_label``: a single word is a word of ours."""
    if read_language() != "zh":
        return text
    from yunlu.render.i18n.chinese import to_chinese  # noqa: PLC0415 (English needs no catalogue)

    return to_chinese(text, is_label=is_label)


def padded_label(label: str, width: int) -> str:
    """A label of ours in the user's language, and spaces up to a number of columns."""
    shown = in_language(label, is_label=True)
    return shown + " " * (width - cell_len(shown))


def spoken(text: BilingualText) -> str:
    """A text of the report in the user's language."""
    return text.zh if read_language() == "zh" else text.en


_HAN = re.compile("[一-鿿]")


def _is_translated(block: Any) -> bool:
    """Whether the parts of a printed block come by again, in Chinese already."""
    text = block.plain if isinstance(block, Text) else block
    return isinstance(text, str) and _HAN.search(text) is not None


def _in_chinese(block: Any, *, is_ours: bool = True) -> Any:
    from yunlu.render.terminal.translation import translate_block  # noqa: PLC0415 (as above)

    return translate_block(block, is_ours=is_ours)


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
    return Text(f"{sign} {in_language(state, is_label=True)}", style=style)


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
