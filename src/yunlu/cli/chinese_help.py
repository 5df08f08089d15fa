"""Help pages in Chinese: the library's own words, which no catalogue of a console reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts.help import DefaultFormatter
from rich.text import Text

from yunlu.render.i18n.chinese import to_chinese

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions


class ChineseHelp(DefaultFormatter):
    """Says in Chinese what a parameter is, its default, and that it is required."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one panel."""
        entries = [_translate(entry) for entry in panel.entries]
        super().__call__(console, options, panel.copy(entries=entries))


def _translate(entry: HelpEntry) -> HelpEntry:
    described = getattr(entry.description, "primary_renderable", entry.description)
    text = to_chinese(described.plain if isinstance(described, Text) else str(described or ""))
    if entry.default is not None:
        text += f"（默认：{entry.default}）"
    if entry.required:
        text += "（必需）"
    return entry.copy(description=Text(text), default=None, required=False)
