"""The report page in a real Chromium: what a reader sees, and what a hostile data set cannot do."""

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

RUNS: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[1] / "unit" / "jobs" / "test_report_builder.py")
)

pytestmark = BROWSER_MARKS


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = RUNS["write_classification"](tmp_path_factory.mktemp("runs") / "digits-1")
    write_report(run)
    return (run.path / Document.REPORT_PAGE).as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The page, opened; at the end no complaint and no request beyond the file may have come."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page, requests, complaints = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    yield page
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} == {address}
    context.close()


@pytest.fixture(scope="module")
def tuned_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = RUNS["write_tuned"](tmp_path_factory.mktemp("runs") / "tuned-1")
    write_report(run)
    return (run.path / Document.REPORT_PAGE).as_uri()


def background(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize(
    ("curve", "points"),
    [
        ("train_loss", 400),
        ("train_loss_smoothed", 400),
        ("validation_loss", 9),
        ("validation/accuracy", 9),
        ("lr", 400),
        ("grad_norm", 400),
        ("samples_per_s", 400),
        ("memory_bytes", 400),
    ],
)
def test_each_curve_is_drawn(page: Page, curve: str, points: int) -> None:
    path = page.locator(f'.frame.linear path[data-key="{curve}"]')

    assert len(re.findall("[ML]", path.get_attribute("d") or "")) > points
    box = path.bounding_box()
    assert box is not None
    assert box["width"] > 200
    assert box["height"] > 5


def test_time_is_drawn_in_layers(page: Page) -> None:
    assert page.locator("#chart-time path.layer").count() == 6


def test_the_confusion_matrix_shows_the_counts(page: Page) -> None:
    counts = RUNS["confusion_of"]([str(i) for i in range(10)])["counts"]
    rows = page.locator(".heat tbody tr")

    shown = [[int(cell) for cell in rows.nth(i).locator("td").all_inner_texts()] for i in range(10)]
    assert shown == counts


def test_hostile_text_does_not_run(page: Page) -> None:
    assert page.evaluate("window.hacked") is None
    expect(page.locator(".heat tbody th").last).to_have_text(RUNS["SCRIPT"])


def test_an_injected_script_is_refused_by_the_page_itself(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hacked=1>')")
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'hacked = 2'}))"
    )

    assert page.evaluate("typeof hacked") == "undefined"
    page.close()


def test_the_language_switch_changes_the_words(page: Page) -> None:
    title = page.locator("#curves h2")
    expect(title).to_have_text(re.compile("Curves"), use_inner_text=True)

    page.get_by_role("button", name="中文").click()
    expect(title).to_have_text("曲线", use_inner_text=True)
    assert page.evaluate("document.documentElement.lang") == "zh-CN"

    page.reload()  # the choice is remembered
    expect(title).to_have_text("曲线", use_inner_text=True)
    page.get_by_role("button", name="English").click()
    expect(title).to_have_text("Curves", use_inner_text=True)


def test_dark_follows_the_system_and_the_switch(page: Page) -> None:
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert dark != light

    page.locator("#theme").click()
    assert background(page) == light
    page.locator("#theme").click()
    assert background(page) == dark


def test_hovering_and_arrow_keys_read_out_values(page: Page) -> None:
    tip = page.locator("#tip")
    expect(tip).to_be_hidden()

    page.locator("#chart-train_loss .linear .plot").hover()
    expect(tip).to_contain_text("225")
    expect(tip).to_contain_text(re.compile(r"Training\s*0\.\d+"))

    page.locator("#chart-lr .plot").focus()
    page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text("449")


def test_the_loss_has_a_log_scale(page: Page) -> None:
    linear, log = (page.locator(f"#chart-train_loss .frame.{scale}") for scale in ("linear", "log"))
    expect(log).to_be_hidden()

    page.locator("#chart-train_loss .scales input").check()
    expect(linear).to_be_hidden()
    box = log.locator("path[data-key=train_loss]").bounding_box()
    assert box is not None
    assert box["height"] > 100


@pytest.mark.parametrize("width", [320, 390, 768])
def test_no_width_makes_the_page_scroll_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_can_be_read_without_scripts(browser: Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)

    expect(page.locator('.frame.linear path[data-key="train_loss"]')).to_be_visible()
    expect(page.locator("#plan")).to_contain_text("this CPU has no faster arithmetic")
    expect(page.locator(".switches")).to_be_hidden()
    context.close()


def test_a_mark_is_seen_and_read_out(browser: Browser, tuned_address: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(tuned_address)
    plot = page.locator("#chart-train_loss .linear .plot")
    box, low, high = plot.bounding_box(), 1, 450
    assert box is not None

    mark = page.locator("#chart-train_loss .linear path.mark.rollback").bounding_box()
    assert mark is not None
    share = (210 - low) / (high - low)
    assert mark["x"] == pytest.approx(box["x"] + share * box["width"], abs=2)

    plot.hover(position={"x": share * box["width"], "y": 20})
    expect(page.locator("#tip")).to_contain_text(re.compile(r"Rolled back\s*210"))
    plot.hover(position={"x": 0.8 * box["width"], "y": 20})
    expect(page.locator("#tip")).not_to_contain_text("Rolled back")
    assert page.evaluate("window.hacked") is None
    page.close()


def test_what_spans_decades_is_shown_on_a_log_scale_first(
    browser: Browser, tuned_address: str
) -> None:
    page = browser.new_page()
    page.goto(tuned_address)

    expect(page.locator("#chart-noise_scale .frame.log")).to_be_visible()
    page.locator("#chart-noise_scale .scales input").uncheck()
    expect(page.locator("#chart-noise_scale .frame.linear")).to_be_visible()
    page.close()


@pytest.mark.parametrize("language", ["English", "中文"])
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_trials_incidents_and_trace_without_scrolling_sideways(
    browser: Browser, tuned_address: str, width: int, language: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(tuned_address)
    page.get_by_role("button", name=language).click()

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
