"""A table as HTML, for notebooks: values of every room can show themselves without the room that draws pages."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from yunlu.core.secrets import clean_for_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def html_table(
    rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), title: str = "", note: str = ""
) -> str:
    """The table; the first column is set in bold, and a note stands below."""
    parts = [f"<p><b>{_clean(title)}</b></p>"] if title else []
    parts.append('<table style="font-size:12px">')
    if head:
        cells = "".join(f'<th style="text-align:left">{_clean(name)}</th>' for name in head)
        parts.append(f"<thead><tr>{cells}</tr></thead>")
    parts.append("<tbody>")
    for first, *others in rows:
        cells = "".join(f'<td style="text-align:left">{_clean(cell)}</td>' for cell in others)
        parts.append(f'<tr><td style="text-align:left"><b>{_clean(first)}</b></td>{cells}</tr>')
    parts.append("</tbody></table>")
    parts += [f"<p>{_clean(note)}</p>"] if note else []
    return "".join(parts)


def _clean(text: str) -> str:
    return escape(clean_for_page(text))
