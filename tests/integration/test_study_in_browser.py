"""The page of a study in a real Chromium: what a reader sees, in the light, in the dark and on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.integration.chromium import BROWSER_MARKS, open_browser
from tests.unit.tuning.made_studies import LR, make_living, make_pareto, make_study
from yunlu.render.study_report import write_report

MAKERS = {"full": make_study, "living": make_living, "pareto": make_pareto}

pytestmark = BROWSER_MARKS


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("studies")
    found: dict[str, str] = {}
    for name, make in MAKERS.items():
        (home / name).mkdir()
        found[name] = write_report(make(home / name)).as_uri()
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(params=list(MAKERS))
def page(
    request: pytest.FixtureRequest, browser: Browser, addresses: dict[str, str]
) -> Iterator[Page]:
    """The page, opened; at the end no complaint and no request beyond the file may have come."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page, requests, complaints = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    address = addresses[request.param]
    page.goto(address)
    yield page
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} == {address}
    context.close()


full = pytest.mark.parametrize("page", ["full"], indirect=True)


def test_every_picture_has_a_size_and_marks_inside_it(page: Page) -> None:
    pictures = page.locator(".picture")
    assert pictures.count() >= 8
    for place in range(pictures.count()):
        drawn = pictures.nth(place)
        box = drawn.locator(".plot").bounding_box()
        assert box is not None
        assert box["width"] > 100
        assert box["height"] > 80
        mark = drawn.locator("path[data-trial]").first.bounding_box()
        assert mark is not None
        assert box["x"] - 8 <= mark["x"] <= box["x"] + box["width"] + 8
        assert box["y"] - 8 <= mark["y"] <= box["y"] + box["height"] + 8


def test_hostile_text_does_not_run(page: Page) -> None:
    assert page.evaluate("window.hacked") is None


def test_dark_follows_the_system_and_the_switch(page: Page) -> None:
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    page.emulate_media(color_scheme="dark")
    dark = background()
    assert dark != light
    page.locator("#theme").click()
    assert background() == light


def test_the_language_switch_changes_the_words(page: Page) -> None:
    title = page.locator("#progress h2")
    expect(title).to_have_text("Progress", use_inner_text=True)
    page.get_by_role("button", name="中文").click()
    expect(title).to_have_text("进展", use_inner_text=True)


@pytest.mark.parametrize("width", [320, 390, 768])
def test_no_width_makes_the_page_scroll_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@full
def test_pointing_at_a_trial_lights_it_up_everywhere(page: Page) -> None:
    tip = page.locator("#tip")
    expect(tip).to_be_hidden()
    plot = page.locator(f"[id='picture-slice-{LR}'] .plot")
    plot.scroll_into_view_if_needed()
    spot = page.locator(f"[id='picture-slice-{LR}'] path.spot").first
    number = spot.get_attribute("data-trial")
    at = spot.bounding_box()
    assert at is not None
    page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    expect(tip).to_contain_text(f"#{number}")
    expect(tip).to_contain_text(re.compile(r"lr\s*\S+"))
    lit = page.locator(".lit")
    assert {lit.nth(i).get_attribute("data-trial") for i in range(lit.count())} == {number}
    assert page.locator("#picture-parallel path.lit").count() == 1
    assert page.locator("#trials tr.lit").count() == 1
    page.mouse.move(2, 2)
    expect(tip).to_be_hidden()
    assert page.locator(".lit").count() == 0


@full
def test_arrow_keys_go_from_trial_to_trial(page: Page) -> None:
    page.locator("#picture-curves .plot").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("#0")
    page.keyboard.press("PageDown")
    expect(page.locator("#tip")).to_contain_text("#10")


def test_everything_can_be_read_without_scripts(
    browser: Browser, addresses: dict[str, str]
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(addresses["full"])
    expect(page.locator("#picture-parallel path.q-best")).to_be_visible()
    expect(page.locator("#best pre")).to_contain_text("yunlu train examples/tune_digits.yaml")
    expect(page.locator(".switches")).to_be_hidden()
    context.close()


def test_links_lead_to_the_runs(browser: Browser, tmp_path: Path) -> None:
    study, run = tmp_path / "studies" / "s", tmp_path / "digits-001"
    study.mkdir(parents=True)
    run.mkdir()
    (run / "report.html").write_text("<title>the run</title>")
    page = browser.new_page()
    page.goto(write_report(make_study(study, 3)).as_uri())
    page.locator("#trials a", has_text="digits-001").click()
    expect(page).to_have_title("the run")
    page.close()
