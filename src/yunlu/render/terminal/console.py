"""The console that every verb prints with: foreign text cannot steer the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segment

from yunlu.core.foreign_text import clean_for_terminal

if TYPE_CHECKING:
    from collections.abc import Iterable


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
