"""What the terminal shows, in Chinese: texts, tables and groups are translated as they are printed.

A single word is translated where it is ours for sure: in the head of a table, in its title, in a column
without a head. Elsewhere it may be a name of the user's.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from yunlu.render.i18n.chinese import to_chinese, translate
from yunlu.render.terminal.fitting_table import FittingTable, Flowing
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.verbatim import Verbatim

if TYPE_CHECKING:
    from collections.abc import Iterable


def translate_block(  # noqa: PLR0911, PLR0912 (one for each kind)
    block: Any, *, is_label: bool = False, is_ours: bool = True
) -> Any:
    """The same block with its texts in Chinese; blocks of unknown kinds stay as they are.

    ``is_label``: a single word is translated, too. ``is_ours``: whether a table is, or of a library.
    """
    match block:
        case str():
            return to_chinese(block, is_label=is_label)
        case Verbatim():
            return block
        case Text():
            return _translate_text(block, is_label=is_label)
        case Table():
            return _translate_table(block, is_ours=is_ours)
        case Group():
            return Group(
                *(translate_block(part, is_ours=is_ours) for part in block.renderables),
                fit=block.fit,
            )
        case Columns():
            block = copy(block)
            block.renderables = [
                translate_block(part, is_ours=is_ours) for part in block.renderables
            ]
            return block
        case Padding():
            block = copy(block)
            block.renderable = translate_block(block.renderable, is_ours=is_ours)
            return block
        case Panel():
            block = copy(block)
            block.renderable = translate_block(block.renderable, is_ours=is_ours)
            block.title = translate_block(block.title, is_label=True)
            return block
        case Rule():
            block = copy(block)
            block.title = translate_block(block.title, is_label=True)
            return block
        case Hanging():
            return replace(block, text=_translate_text(block.text, is_label=False))
        case Flowing():
            items = [_translate_text(item, is_label=False) for item in block.items]
            return replace(block, items=items)
        case Spinner():
            block.text = translate_block(block.text)  # a copy would begin to turn anew
            return block
        case _:
            return block


def _translate_text(text: Text, *, is_label: bool) -> Text:
    pieces = translate(text.plain, is_label=is_label)
    if pieces is None:
        return text
    result = text.blank_copy()
    for piece in pieces:
        if piece.is_copy:
            part = text[piece.start : piece.start + len(piece.text)] if piece.text else Text()
        else:
            part = Text(piece.text)
            for span in text.spans:
                if span.start <= piece.start < span.end:
                    part.stylize(span.style)
        result.append_text(part)
    return result


def _translate_table(table: Table, *, is_ours: bool) -> Table:
    table = copy(table)
    if isinstance(table, FittingTable):
        table.speak(partial(to_chinese, is_label=True))
    table.title = translate_block(table.title, is_label=True)
    table.caption = translate_block(table.caption)
    columns = [
        replace(
            column,
            header=translate_block(column.header, is_label=True),
            _cells=list(
                _translate_cells(
                    column.cells, is_label=is_ours and not (table.show_header and column.header)
                )
            ),
        )
        for column in table.columns
    ]
    table.columns = columns
    return table


def _translate_cells(cells: Iterable[Any], *, is_label: bool) -> Iterable[Any]:
    return (translate_block(cell, is_label=is_label) for cell in cells)
