"""A real Chromium that is waited for, however busy the machine."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LIMIT_MS = 1000 * LIMIT_S
SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BROWSER_MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor google-chrome is installed"),
]


@contextmanager
def open_browser() -> Generator[Browser]:
    """Pages and contexts of this browser wait as long as tests do."""
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(
            executable_path=CHROMIUM, args=SWITCHES, timeout=LIMIT_MS
        )
        browser.new_page = _patient(browser.new_page)
        browser.new_context = _patient(browser.new_context)
        yield browser
        browser.close()


def _patient(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_patient(**options: Any) -> Any:
        made = make(**options)
        made.set_default_timeout(LIMIT_MS)
        return made

    return make_patient
