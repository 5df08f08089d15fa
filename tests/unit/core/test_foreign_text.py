"""Text that others wrote, before it reaches a terminal or a page."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.security.hostile import PAYLOADS, SURROGATE, control_sequences
from yunlu.core.secrets import clean_for_page, clean_for_terminal, escape_for_json

EVERY = PAYLOADS | {"lone surrogate": SURROGATE}


@pytest.mark.parametrize("name", EVERY)
def test_nothing_that_steers_a_terminal_is_left(name: str) -> None:
    cleaned = clean_for_terminal(EVERY[name])
    assert control_sequences(cleaned, colours=False) == set()
    assert control_sequences(clean_for_page(EVERY[name]), colours=False) == set()
    cleaned.encode()


@pytest.mark.parametrize("name", EVERY)
def test_json_keeps_the_value_and_shows_no_control(name: str) -> None:
    given = {EVERY[name]: [EVERY[name]]}
    text = escape_for_json(json.dumps(given, ensure_ascii=False))
    assert control_sequences(text, colours=False) == set()
    assert json.loads(text) == given
    text.encode()


@pytest.mark.parametrize(
    "text", ["云炉 训练\u3000完成", "naïve café", "a\tb\nc", "👩‍👩‍👧", "می‌خواهم", "x²·½ – “quoted”"]
)
def test_the_languages_of_people_stay_as_they_are(text: str) -> None:
    assert clean_for_terminal(text) == clean_for_page(text) == text


def test_line_ends_of_windows_are_plain_line_ends() -> None:
    assert clean_for_terminal("a\r\nb\rc") == "a\nb·c"


@given(st.text(st.characters()))
def test_cleaning_is_done_once_and_for_all(text: str) -> None:
    cleaned = clean_for_terminal(text)
    assert clean_for_terminal(cleaned) == cleaned
    assert control_sequences(cleaned, colours=False) == set()
    assert json.loads(escape_for_json(json.dumps(text, ensure_ascii=False))) == text
