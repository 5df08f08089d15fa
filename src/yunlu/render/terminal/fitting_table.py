"""A table that leaves columns out, or becomes one block per row, where it would be too narrow to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Group
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Column

READABLE = 16
"""A column of prose is not made narrower."""
_ENDLESS = 10_000
_LONG = 30
"""A longer cell of prose gets lines of its own in a block."""
_INDENT = 2


class FittingTable(Table):
    """Columns where they fit; else of each row its first cells as a heading, and then ``title value``."""

    def __init__(
        self,
        *,
        lead: int = 1,
        prose: Sequence[str] = (),
        drop: Sequence[str] = (),
        dropped_note: str = "",
        instead: str = "",
        heading: str = "",
        **options: Any,
    ) -> None:
        """What happens where it does not fit.

        ``drop``: titles of columns that are left out, in this order, if that is enough; ``dropped_note``
        says where they can be seen. If not, blocks: ``lead`` cells are the heading of one, and columns in
        ``prose`` need no title there. ``instead``: what is said where blocks would make no sense. ``heading``:
        above it, and not broken where the table is narrow.
        """
        super().__init__(**options)
        self._options = options
        self._lead, self._prose = lead, {"", *prose}
        self._drop, self._dropped_note, self._instead = drop, dropped_note, instead
        self._heading = heading
        self._say: Callable[[str], str] = str

    def speak(self, say: Callable[[str], str]) -> None:
        """Put its own words, which are not in cells, into another language: titles as its columns have them."""
        self._say, self._heading = say, say(self._heading)
        self._drop, self._prose = [say(title) for title in self._drop], set(map(say, self._prose))
        self._dropped_note, self._instead = say(self._dropped_note), say(self._instead)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Columns, fewer columns, or blocks."""
        if self._heading:
            yield Text(self._heading, style="bold")
        if self.is_readable(console, options):
            yield from super().__rich_console__(console, options)
        elif (smaller := self._fewer(console, options)) is not None:
            yield smaller
            left_out = [title for title in self._drop if title not in smaller._titles()]
            left_out = [title for title in left_out if title in self._titles()]
            note = f"no room for: {', '.join(left_out)}"
            if self._dropped_note:
                note = f"no room for: {', '.join(left_out)}; {self._dropped_note}"
            yield Text(self._say(note), style="dim")
        elif self._instead:
            yield Padding(Text(self._instead, style="dim"), (0, 0, 1, _INDENT), expand=False)
        else:
            yield Group(*self._blocks(console, options))

    def is_readable(self, console: Console, options: ConsoleOptions) -> bool:
        """Whether every column has room for its longest cell, or for some words of prose."""
        between = self.padding[1] + (0 if self.collapse_padding else self.padding[3])
        between += 1 if self.box is not None else 0
        edges = 2 * between if self.show_edge and self.box is not None else 0
        endless = options.update(max_width=_ENDLESS)
        headers = [column.header if self.show_header else "" for column in self.columns]
        needed = sum(
            _needed(
                column,
                [Measurement.get(console, endless, cell) for cell in (header, *column.cells)],
            )
            for header, column in zip(headers, self.columns, strict=True)
        )
        return needed + between * (len(self.columns) - 1) + edges <= options.max_width

    def _titles(self) -> list[str]:
        return [str(column.header) for column in self.columns]

    def _fewer(self, console: Console, options: ConsoleOptions) -> FittingTable | None:
        """The table without as few columns as are enough; None where that is not enough."""
        for count in range(1, len(self._drop) + 1):
            smaller = self.without(self._drop[:count])
            if smaller.is_readable(console, options):
                return smaller
        return None

    def without(self, titles: Sequence[str]) -> FittingTable:
        """The same table with some columns less."""
        table = FittingTable(**self._options)
        table.collapse_padding = self.collapse_padding
        table.caption = self.caption
        columns = [column for column in self.columns if str(column.header) not in titles]
        for column in columns:
            table.add_column(
                column.header, justify=column.justify, style=column.style, no_wrap=column.no_wrap,
                overflow=column.overflow, min_width=column.min_width, max_width=column.max_width,
            )  # fmt: skip
        for row, *cells in zip(self.rows, *(column.cells for column in columns), strict=True):
            table.add_row(*cells, style=row.style)
        return table

    def _blocks(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        edge = 2 if self.show_edge and self.box is not None else 0
        if self._heading:
            yield Text()
        columns = [(str(column.header), column, list(column.cells)) for column in self.columns]
        for index, row in enumerate(self.rows):
            heading = Text("  ").join(
                text
                for _, column, cells in columns[: self._lead]
                if (text := _as_text(cells[index], console, options, style=column.style)).plain
            )
            heading.stylize(row.style or "")
            items: list[Text] = [heading]
            for title, column, cells in columns[self._lead :]:
                cell = _as_text(cells[index], console, options)
                if cell.plain in {"", "–"}:
                    continue
                cell.stylize(row.style or "")
                is_prose = title in self._prose
                pair = cell if is_prose else Text.assemble((title, "dim"), " ", cell)
                is_long = not column.no_wrap and cell_len(pair.plain) > _LONG
                if not is_long and "\n" not in pair.plain:
                    items.append(pair)
                    continue
                yield from _indented(items, options.max_width, edge)
                yield Padding(pair, (0, 0, 0, edge + _INDENT), expand=False)
                items = [Text()]
            yield from _indented(items, options.max_width, edge)
        if self.show_edge and self.box is not None:
            yield Text()
        if self.caption:
            caption = Text(str(self.caption).strip(), style=self.caption_style or "")
            yield Padding(caption, (0, 0, 0, edge), expand=False)


def _needed(column: Column, sizes: Sequence[Measurement]) -> int:
    natural = max(size.maximum for size in sizes)
    if column.max_width is not None:
        natural = min(natural, column.max_width)
    if column.no_wrap:
        return natural
    # Words stay whole, unless they are as long as paths.
    longest_word = max(size.minimum for size in sizes)
    return min(natural, max(READABLE, min(longest_word, _LONG)))


def _as_text(
    cell: RenderableType, console: Console, options: ConsoleOptions, *, style: Any = ""
) -> Text:
    """Any cell as text: a bar keeps its colours."""
    if isinstance(cell, str):
        return Text(cell, style=style)
    if isinstance(cell, Text):
        text = cell.copy()
        text.stylize_before(style)
        return text
    width = Measurement.get(console, options.update(max_width=_ENDLESS), cell).maximum
    lines = console.render_lines(cell, options.update(width=width), pad=False)
    text = Text(" ").join(
        Text.assemble(*((part, style or "") for part, style, _ in Segment.simplify(line)))
        for line in lines
    )
    text.rstrip()
    return text


def _indented(items: Sequence[Text], width: int, edge: int) -> Iterator[RenderableType]:
    """The first item further to the left than the lines below it."""
    if not items[0]:
        below = _flow(items[1:], width - edge - _INDENT, " · ") if items[1:] else ()
    else:
        first, *below = _flow(items, width - edge)
        yield Padding(first, (0, 0, 0, edge), expand=False)
    for line in below:
        yield Padding(line, (0, 0, 0, edge + _INDENT), expand=False)


def _flow(items: Sequence[Text], width: int, separator: str = "") -> Iterator[Text]:
    """As many items on a line as fit; none is broken that fits on a line of its own."""
    line, between, room = items[0], separator or "  ", width
    for item in items[1:]:
        if cell_len(line.plain) + len(between) + cell_len(item.plain) > room:
            yield line
            line, room = item, width - (0 if separator else _INDENT)
        else:
            line = Text.assemble(line, (between, "dim"), item)
        between = separator or " · "
    yield line


@dataclass(frozen=True, slots=True)
class Flowing:
    """Items in lines: as many as fit, each of them whole."""

    items: Sequence[Text]
    separator: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines."""
        if self.items:
            yield from _flow(self.items, options.max_width, self.separator)
