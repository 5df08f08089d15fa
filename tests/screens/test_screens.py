"""Every screen at every width: as stored, not wider than the terminal, and no column too narrow to read.

``make screens`` stores them anew; look at the difference before you commit it.
"""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table

from tests.screens.canned import NOW, CannedClient
from tests.screens.commands import (
    COMMANDS,
    ENDING_WITH_ONE,
    FILES,
    WITHOUT_OUTPUT,
    Screen,
    every_command,
    every_screen,
)
from yunlu.cli.main import main

STORED = Path(__file__).with_name("stored")
WIDTHS = (40, 80, 120, 200, None)
"""Columns; None: a pipe, where nothing says how many."""
PLACE = "/home/you/project"
_WORD = re.compile(r"'[^']*'|[^\s']+")
_LABEL = 18
"""Letters that may stand before a word that fills a line."""
_LEAST = 10
"""Characters of a column's longest cell that must stand side by side."""


class NarrowColumns:
    """Watches how wide Rich makes the columns of all tables: those that nobody can read."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = Table._render

        def watched(
            table: Table, console: Console, options: ConsoleOptions, widths: list[int]
        ) -> Any:
            endless = options.update(max_width=10_000)
            for column, width in zip(table.columns, widths, strict=True):
                cells = [column.header if table.show_header else "", *column.cells]
                natural = max(Measurement.get(console, endless, cell).maximum for cell in cells)
                if width < min(natural, _LEAST):
                    first = next(iter(column.cells), "")
                    self.found.append(f"{width} columns for {column.header or first!s}")
            return draw(table, console, options, widths)

        monkeypatch.setattr(Table, "_render", watched)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose path is always as long, an own clock, and the canned client."""
    place = Path(tempfile.mkdtemp(prefix="yunlu-", dir="/tmp"))
    assert len(str(place)) == len("/tmp/yunlu-12345678")
    for name, text in FILES.items():
        (place / name).write_text(text)
    monkeypatch.chdir(place)
    monkeypatch.setenv("YUNLU_HOME", str(place / "runs"))
    monkeypatch.setenv("YUNLU_CONFIG", str(place / "config"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(CannedClient, "home", place / "runs")
    monkeypatch.setattr("yunlu.client.local.LocalClient", CannedClient)
    for name in ("TERM", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    yield place
    shutil.rmtree(place)
    monkeypatch.undo()
    time.tzset()


def take(
    screen: Screen,
    columns: int | None,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What a command writes, with the place of the test by a name that stays."""
    shutil.rmtree(here / "runs", ignore_errors=True)
    shutil.rmtree(here / "config", ignore_errors=True)
    (here / "runs").mkdir()
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    if screen.name == "catalog remove":
        main(["catalog", "add", "lab.yaml"])
        capsys.readouterr()
    code = screen.show()
    assert not code or screen.name in ENDING_WITH_ONE or screen.name.startswith("error ")
    shown = capsys.readouterr()
    text = shown.out + shown.err
    return text.replace(str(here), PLACE.ljust(len(str(here)), "s"))


def too_wide(text: str, columns: int) -> list[str]:
    """Lines beyond the columns that could have been broken."""
    return [line for line in text.splitlines() if cell_len(line) > columns and can_break(line)]


def can_break(line: str) -> bool:
    """Whether more than a label and one long word (a path, a quoted setting) stands on the line."""
    words = sorted(_WORD.findall(line), key=cell_len)
    return cell_len(" ".join(words[:-1])) > _LABEL


@pytest.mark.parametrize("screen", every_screen(), ids=lambda screen: screen.name)
def test_screen_is_as_stored_and_fits(
    screen: Screen,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    narrow = NarrowColumns()
    narrow.watch(monkeypatch)
    parts: list[str] = []
    before = ""
    for columns in WIDTHS:
        narrow.found.clear()
        text = take(screen, columns, here, capsys, monkeypatch)
        assert "\x1b" not in text
        assert "Traceback" not in text
        assert "unexpected" not in text
        if columns is not None and not request.config.getoption("--write-screens"):
            assert not too_wide(text, columns)
            assert not narrow.found
        title = f"━━━ {columns} columns" if columns else "━━━ piped"
        parts.append(f"{title}\n{'(the same)' if text == before else text.rstrip()}\n")
        before = text
    file = STORED / f"{screen.name.replace(' ', '-')}.txt"
    whole = "\n".join(parts)
    if request.config.getoption("--write-screens"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(whole)
    assert file.is_file(), "a new screen: make screens"
    assert whole == file.read_text(), (
        "if it should look so: make screens, and look at the difference"
    )


def test_every_command_has_a_screen() -> None:
    shown = {" ".join(tokens[:2]) for tokens in COMMANDS.values()}
    shown |= {tokens[0] for tokens in COMMANDS.values()}
    assert set(every_command()) - shown == WITHOUT_OUTPUT


def test_nothing_else_is_stored() -> None:
    names = {f"{screen.name.replace(' ', '-')}.txt" for screen in every_screen()}
    assert {file.name for file in STORED.iterdir()} == names


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("error: there is no file of this name in the directory", True),
        (" report      /home/you/project/yunlu-runs/digits-20260921/report.html", False),
        ("""    --set 'layout={"dp": 1, "fsdp": 8, "tp": 1, "pp": 1}' \\""", False),
    ],
)
def test_what_can_be_broken_is_known(line: str, *, expected: bool) -> None:
    assert can_break(line) is expected


def test_a_narrow_column_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = NarrowColumns()
    narrow.watch(monkeypatch)
    table: Any = Table("one", "two")
    table.add_row("a sentence that goes on for a while", "another one that does so, too")
    Console(width=14, file=io.StringIO()).print(table)
    assert narrow.found
