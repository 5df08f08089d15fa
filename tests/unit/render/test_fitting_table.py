"""A table that does not fit leaves columns out, or becomes blocks; text is broken between words."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import RenderableType
from rich.text import Text

from yunlu.render.terminal.fitting_table import FittingTable
from yunlu.render.terminal.line_breaks import Hanging, break_lines
from yunlu.render.terminal.page import TerminalConsole, make_console, plain_table, print_lines


def shown(block: RenderableType, width: int) -> list[str]:
    console = TerminalConsole(file=io.StringIO(), width=width)
    console.print(block)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def runs(**fitting: Any) -> FittingTable:
    table = plain_table(**fitting)
    for title in ("run", "task", "reason"):
        table.add_column(title, no_wrap=title != "reason")
    table.add_row("digits-1", "image-classification", "the fastest that fits into the memory")
    table.add_row("reviews-2", "–", "")
    return table


def test_what_fits_is_a_table() -> None:
    assert shown(runs(), 80)[0].split() == ["run", "task", "reason"]


def test_what_does_not_fit_is_a_block_for_each_row() -> None:
    assert shown(runs(prose=("reason",)), 40) == [
        "digits-1  task image-classification",
        "  the fastest that fits into the memory",
        "reviews-2",
    ]


def test_columns_are_left_out_before_and_named() -> None:
    lines = shown(runs(drop=("task",), dropped_note="yunlu show RUN"), 40)
    assert lines[0].split() == ["run", "reason"]
    assert lines[-1] == "no room for: task; yunlu show RUN"
    assert "image" not in "".join(lines)


def test_what_makes_no_sense_as_blocks_says_so() -> None:
    table = FittingTable(instead="it is in the report", heading="Confusion")
    for label in range(12):
        table.add_column(str(label), no_wrap=True)
    table.add_row(*("18",) * 12)
    assert [line.strip() for line in shown(table, 30) if line] == [
        "Confusion",
        "it is in the report",
    ]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    assert max(map(len, shown(runs(prose=("reason",)), width))) <= width


def test_figures_stay_whole_where_a_line_has_room_for_them() -> None:
    text = Text("step 3/10  loss 0.25  samples/s 3.2k · 26 s in all")
    lines = [line.plain for line in break_lines(text, 24, hang=2)]
    assert lines == ["step 3/10  loss 0.25", "  samples/s 3.2k", "  26 s in all"]


def test_a_word_that_is_longer_than_a_line_is_not_cut_where_it_can_be_copied() -> None:
    path = "/a/path/" + 40 * "x"
    lines = [line.plain for line in break_lines(Text(f" report  {path} is written"), 30)]
    assert f" report  {path}" in lines
    assert "".join(shown(Hanging(Text(path)), 30)) == path


def test_chinese_is_broken_after_any_character() -> None:
    lines = break_lines(Text("训练在检查点保存后停止，可以随时继续"), 12)
    assert all(line.cell_len <= 12 for line in lines)
    assert "".join(line.plain for line in lines) == "训练在检查点保存后停止，可以随时继续"


@pytest.mark.parametrize("columns", [None, "40"])
def test_a_file_gets_whole_lines_unless_it_says_how_wide(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    print_lines(make_console(), Text(f" {'word ' * 30}"))
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines) > 1) is (columns is not None)
    assert all(line.startswith("   ") for line in lines[1:])
