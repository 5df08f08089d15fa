"""Pages of runs and studies whose every text was made to do harm."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.security.hostile import ALL, PAYLOADS, control_sequences, make_hostile_run
from tests.unit.tuning.made_studies import make_study
from yunlu.cli.main import main
from yunlu.render import html_page
from yunlu.render.study_report import render_page
from yunlu.render.terminal.page import TerminalConsole
from yunlu.render.terminal.study_tables import study_page
from yunlu.runs.run_store import Document


class Elements(HTMLParser):
    """Names of elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts = 0
        self.handlers: list[str] = []
        self.images: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.images += [tag] if tag == "img" else []
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def check_page(page: str, harmless: str) -> None:
    elements = Elements(page)
    assert elements.scripts == Elements(harmless).scripts  # our own
    assert elements.handlers == elements.images == []
    assert control_sequences(page, colours=False) == set()
    assert "{{ 7*7 }}" in page  # as text
    page.encode()


@pytest.mark.parametrize("ends", ["failed", "finished"])
def test_the_page_of_a_run_holds_its_texts_as_text(ends: str, own_home: Path) -> None:
    pages: list[str] = []
    for name, text in (("evil-000000", ALL), ("fine-000000", "fine")):
        path = make_hostile_run(own_home, text, name=name, ends=ends)
        assert main(["report", name]) == 0
        pages.append((path / Document.REPORT_PAGE).read_text())
    check_page(*pages)


def test_the_page_and_table_of_a_study_hold_its_texts_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "studies" / "made"
    view, harmless = (
        make_study(place, 8, metric=text, reason=text, name=text) for text in (ALL, "fine")
    )
    check_page(render_page(view, now=1_790_001_000.0), render_page(harmless, now=1_790_001_000.0))
    console = TerminalConsole(width=200, force_terminal=True)
    console.print(study_page(view, now=1_790_001_000.0, width=200, rows=None))
    assert control_sequences(capsys.readouterr().out) == set()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_every_value_of_a_template_is_cleaned(payload: str) -> None:

    environment = html_page._environment()
    page = environment.from_string("<p title='{{ x }}'>{{ x }}</p>").render(x=PAYLOADS[payload])
    assert control_sequences(page, colours=False) == set()
    assert Elements(page).scripts == 0
    assert Elements(page).images == []
