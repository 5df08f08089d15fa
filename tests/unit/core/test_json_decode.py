"""JSON of others: deep, torn, endless, with half characters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.hostile import hostile_bytes
from yunlu.core.errors import ModelError, StoreError
from yunlu.core.files import read_lines
from yunlu.core.limits import JsonError, decode_json, read_json

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = (
    b"[" * 4000,
    b'{"a":' * 4000,
    b"[" * 101 + b"]" * 101,
    b'{"a":' * 101 + b"1" + b"}" * 101,
    rb'{"token": "\ud800"}',
    rb'{"\udfff": 1}',
    rb'["\ud800\ud800"]',
    b"9" * 5000,
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b"",
    b"\xef\xbb\xbf",
    b"{",
    b"nul",
)


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: str(data[:12]))
def test_a_fault_is_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(JsonError):
        decode_json(data)


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: str(data[:12]))
def test_a_hostile_line_in_a_log_is_left_out_or_repaired(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n' + data + b'\n{"a": 2}\n')
    first, *between, last = [record for record, _ in read_lines(path)]
    assert (first, last) == ({"a": 1}, {"a": 2})
    assert len(between) <= 1
    str(between).encode()  # no half characters are left


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: str(data[:12]))
def test_a_hostile_file_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"config\.json is not readable JSON"):
        read_json(path, kind=StoreError)


def test_a_hundred_levels_are_read() -> None:
    assert decode_json("[" * 100 + "]" * 100)


def test_many_values_side_by_side_are_not_deep() -> None:
    assert len(decode_json(json.dumps([[number] for number in range(1000)]))) == 1000


def test_whole_characters_written_as_two_escapes_are_kept() -> None:
    assert decode_json(rb'"\ud83d\ude00"') == "\U0001f600"
    assert decode_json(rb'{"a": ["\ud83d\ude00 \ud83d"]}', replace_lone=True) == {
        "a": ["\U0001f600 \ufffd"]
    }


def test_a_document_above_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YUNLU_LIMITS", "document=100")
    path = tmp_path / "config.json"
    path.write_text(json.dumps("x" * 200))
    with pytest.raises(ModelError, match="larger than 100 bytes") as raised:
        read_json(path)
    assert "YUNLU_LIMITS=document=" in str(raised.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_what_python_writes_is_read(value: Any) -> None:
    assert repr(decode_json(json.dumps(value))) == repr(value)


@given(hostile_bytes())
@example(b"[" * 100_000)
@example(b'{"":' * 100_000)
@example(b'"\\ud800"')
@example(b"NaN")
def test_bytes_are_json_or_one_kind_of_error(data: bytes) -> None:
    try:
        value = decode_json(data)
    except JsonError:
        return
    repr(value).encode()
