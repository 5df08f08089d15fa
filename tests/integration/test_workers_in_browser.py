"""The page's section about several workers, in a real Chromium."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.integration.chromium import BROWSER_MARKS, open_browser
from yunlu.render.run_report import write_report
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__)
RUNS: dict[str, Any] = runpy.run_path(
    str(HERE.parents[1] / "unit" / "jobs" / "test_worker_groups.py")
)

pytestmark = BROWSER_MARKS


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home, addresses = tmp_path_factory.mktemp("runs"), dict[str, str]()
    for kind in ("write_group_run", "write_staged"):
        run = RUNS[kind](home / kind)
        write_report(run)
        addresses[kind] = (run.path / Document.REPORT_PAGE).as_uri()
    return addresses


@pytest.fixture
def page(browser: Browser, addresses: dict[str, str]) -> Iterator[Page]:
    page, complaints = browser.new_page(viewport={"width": 1280, "height": 900}), list[str]()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(addresses["write_group_run"])
    yield page
    assert complaints == []
    page.close()


def test_tiles_stand_where_their_ranks_stand(page: Page) -> None:
    tiles = page.locator(".layout-map:not(.small) .tile")
    expect(tiles).to_have_count(4)
    boxes = [tiles.nth(i).bounding_box() for i in range(4)]
    (top_left, top_right, low_left, _) = ((box["x"], box["y"]) for box in boxes if box)

    assert top_left[1] == top_right[1] < low_left[1]  # cuts side by side, shards below each other
    assert top_left[0] == low_left[0] < top_right[0]
    for i, box in enumerate(boxes):
        assert box is not None
        inside = tiles.nth(i).evaluate("tile => tile.scrollWidth <= tile.clientWidth + 4")
        assert inside  # no text runs out of its tile


def test_hovering_over_time_reads_out_step_and_layout(page: Page) -> None:
    page.locator("#chart-progress .plot").hover()
    tip = page.locator("#tip")

    expect(tip).to_contain_text(re.compile(r"time\s*5\d\.\d s"))
    expect(tip).to_contain_text(re.compile(r"Layout\s*dp3"))
    expect(tip).to_contain_text(re.compile(r"Step\s*2\d\d"))


def test_bars_begin_at_one_line(page: Page) -> None:
    bars = page.locator(".bars i:first-child")
    lefts = {round(box["x"]) for bar in bars.all() if (box := bar.bounding_box())}

    assert len(lefts) == 1


@pytest.mark.parametrize("kind", ["write_group_run", "write_staged"])
@pytest.mark.parametrize("language", ["English", "中文"])
def test_a_phone_shows_it_without_scrolling_sideways(
    browser: Browser, addresses: dict[str, str], kind: str, language: str
) -> None:
    page = browser.new_page(viewport={"width": 320, "height": 800})
    page.goto(addresses[kind])
    page.get_by_role("button", name=language).click()

    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert page.evaluate("window.hacked") is None
    page.close()
