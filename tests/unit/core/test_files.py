from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from yunlu.core.errors import YunluError
from yunlu.core.files import append_lines, read_lines, write_atomically
from yunlu.core.settings import read_settings
from yunlu.core.units import show_bytes, show_count, show_duration, show_number


def records(path: Path) -> list[object]:
    return [record for record, _ in read_lines(path)]


def test_a_half_written_last_line_is_left_for_later_and_spoils_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append_lines(log, [{"n": 1}])
    with log.open("ab") as file:
        file.write(b'{"n": 2, "te')  # a crash in the middle of a write
    assert records(log) == [{"n": 1}]
    append_lines(log, [{"n": 3}])
    assert records(log) == [{"n": 1}, {"n": 3}]


def test_reading_goes_on_from_an_offset(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append_lines(log, [{"n": 1}, {"n": 2}])
    (_, offset), _ = read_lines(log)
    append_lines(log, [{"n": 3}])
    assert [record for record, _ in read_lines(log, offset=offset)] == [{"n": 2}, {"n": 3}]


def _append_many(path: Path, writer: int) -> None:
    for number in range(200):
        append_lines(path, [{"writer": writer, "number": number, "filler": "x" * 300}])


def test_two_writers_never_mix_within_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_append_many, args=(log, writer)) for writer in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        writer.close()
    found = [(record["writer"], record["number"]) for record, _ in read_lines(log)]
    assert sorted(found) == [(writer, number) for writer in range(2) for number in range(200)]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, 5)  # pyright: ignore[reportArgumentType]
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["value.json"]


@pytest.mark.parametrize("text", ["free", "-1", "inf", "nan"])
def test_a_price_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", text)
    with pytest.raises(YunluError, match="not a price"):
        read_settings()


@pytest.mark.parametrize("text", ["much", "0", "-2", "inf", "nan"])
def test_patience_that_is_no_factor_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNLU_PATIENCE", text)
    with pytest.raises(YunluError, match="not a factor"):
        read_settings()


def test_numbers_read_well() -> None:
    assert [show_bytes(n) for n in (12, 1536, 3 << 30)] == ["12 B", "1.5 KiB", "3.0 GiB"]
    assert [show_duration(s) for s in (2e-6, 0.0021, 5, 75, 7260)] == [
        "2 µs", "2.1 ms", "5.0 s", "1 min 15 s", "2 h 01 min",
    ]  # fmt: skip
    assert [show_duration(3600 * hours) for hours in (47, 48, 15579.5, 30_000)] == [
        "47 h 00 min", "2 d 0 h", "649 d", "3.4 years",
    ]  # fmt: skip
    assert [show_count(n) for n in (7, 1234, 12_300_000)] == ["7", "1.2k", "12.3M"]
    assert [show_number(x) for x in (0.97234, 1e-5, 12345.6)] == ["0.9723", "1.000e-05", "12,345.6"]
