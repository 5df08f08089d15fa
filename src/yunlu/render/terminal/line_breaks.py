"""Text in lines: broken between words, where possible between figures; what can be copied stays whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.measure import Measurement
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_UNIT = re.compile(r"\s*(?:(?!  | · ).)*(?:  +| · )?")
"""What is broken only if it is longer than a line: up to two spaces, or a dot between two."""
_WORD = re.compile(
    r"\s*(?:[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]|[^\s\u2e80-\u9fff\uf900-\uffef]+)"
    r"[、。，；：！？）》]*\s*"
)
"""A word and the space after it; Chinese may be broken after every character, but before no mark."""
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
        for match in [unit] if is_whole else _WORD.finditer(plain, unit.start(), unit.end()):
            size = cell_len(match[0].rstrip(" ·") if is_whole else match[0].rstrip())
            is_endless = hang + size > width and used <= _LABEL
            if used and used + size > width and not is_endless:
                offsets.append(match.start())
                used = hang
            used += cell_len(match[0])
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
