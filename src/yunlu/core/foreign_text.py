"""Text that others wrote, made harmless: names, labels, messages and logs can carry anything.

A terminal obeys control characters (title, clipboard, colours, cursor); and bidirectional overrides
show a text in another order than it is read. One function for terminals, one for JSON that may be
shown there, one for pages.
"""

from __future__ import annotations

import re

MARK = "·"
"""Stands for a character that was taken out."""

_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f"  # C0 without tab and newline: ESC, BEL, BS, CR
    "\x7f-\x9f"  # DEL and C1: CSI and OSC as one character
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks, overrides, isolates
    "\u2028\u2029"  # line ends that only some programs know
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags: text that nobody sees
    "\ud800-\udfff"  # lone surrogates: no encoding has them
    "]"
)


def clean_for_terminal(text: str) -> str:
    """Replace every character that would steer the terminal or reorder the text by a mark."""
    return _CONTROLS.sub(MARK, text.replace("\r\n", "\n"))


def clean_for_page(text: str) -> str:
    """Replace the same characters: pages may not hold them either; HTML is escaped by the templates."""
    return clean_for_terminal(text)


def escape_for_json(text: str) -> str:
    """JSON text with the same characters written as escapes: the same values, safe to print."""
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(
        f"\\u{int.from_bytes(units[at : at + 2], 'big'):04x}" for at in range(0, len(units), 2)
    )
