"""FileLimits on foreign files: how they are set, and what they refuse."""

from __future__ import annotations

import gzip
import io
import zipfile
from typing import TYPE_CHECKING

import pytest

from yunlu.core.errors import DataError, ModelError, YunluError
from yunlu.core.limits import (
    FileLimits,
    check_archive,
    check_memory,
    check_sample_rate,
    check_unpacked,
    over_limit,
    parse_limits,
    read_bounded,
    read_limits,
    usable_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = FileLimits(memory=1 << 20, ratio=100, ratio_from=1 << 10)


def test_without_a_setting_half_of_the_memory_is_for_data() -> None:
    assert parse_limits("").memory == usable_memory() // 2


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("memory=64GiB", "memory", 64 << 30),
        ("memory=2gb", "memory", 2_000_000_000),
        ("memory=1.5MiB", "memory", 3 << 19),
        ("pixels=500M", "pixels", 500_000_000),
        ("pixels = 7", "pixels", 7),
        ("ratio=0.5", "ratio", 0.5),
        ("memory=1k, samples=1_000_000", "samples", 1_000_000),
        ("memory=1k samples=9", "samples", 9),
        ("depth=3,", "depth", 3),
    ],
)
def test_limits_are_read_as_people_write_them(text: str, name: str, value: float) -> None:
    assert getattr(parse_limits(text), name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory", "'memory' is not a limit"),
        ("memory=", "is not a limit"),
        ("memory=-1", "is not a limit"),
        ("memory=inf", "is not a limit"),
        ("memory=1 furlong", "is not a limit"),
        ("pixel=3", "there is no limit 'pixel'"),
    ],
)
def test_what_is_no_limit_is_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(YunluError, match=message) as raised:
        parse_limits(text)
    assert raised.value.hint is not None


def test_the_environment_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNLU_LIMITS", "pixels=12")
    assert read_limits().pixels == 12
    monkeypatch.delenv("YUNLU_LIMITS")
    assert read_limits().pixels == 80_000_000


def test_the_hint_names_a_setting_that_would_admit_it() -> None:
    error = over_limit("x is too large", "memory", 3 << 30)
    assert "YUNLU_LIMITS=memory=3072MiB" in str(error)
    assert parse_limits("memory=3072MiB").memory == 3 << 30


@pytest.mark.parametrize(
    ("unpacked", "packed", "message"),
    [
        (2 << 20, 1 << 20, "takes at least 2.0 MiB in memory"),
        (200_000, 1_000, "above 100 to 1"),
        (5_000, 0, "above 100 to 1"),
    ],
)
def test_too_much_and_too_dense_are_refused(unpacked: int, packed: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_unpacked("x", unpacked, packed, LIMITS)


@pytest.mark.parametrize(
    ("unpacked", "packed"), [(1 << 20, 1 << 20), (99_000, 1_000), (1_000, 0), (0, 0)]
)
def test_what_is_small_or_packs_as_text_does_is_read(unpacked: int, packed: int) -> None:
    check_unpacked("x", unpacked, packed, LIMITS)
    check_memory("x", unpacked, LIMITS)


@pytest.mark.parametrize("rate", [-1, 0, 1, 999, 768_001, 4_000_000_000])
def test_rates_that_no_converter_has_are_refused(rate: int) -> None:
    with pytest.raises(DataError, match="samples per second"):
        check_sample_rate("x", rate, LIMITS)


def test_a_bomb_is_not_unpacked_beyond_its_limit() -> None:
    packed = io.BytesIO(gzip.compress(bytes(64 << 20)))
    with gzip.GzipFile(fileobj=packed) as stream:
        with pytest.raises(DataError, match="above 100 to 1"):
            read_bounded(stream, "x", LIMITS, packed=packed.tell)
        assert stream.tell() <= 2 << 20


def test_a_long_honest_beginning_does_not_hide_a_bomb() -> None:
    honest = bytes(range(256)) * 2_000
    packed = io.BytesIO(gzip.compress(honest, 0) + gzip.compress(bytes(64 << 20)))
    limits = FileLimits(memory=1 << 30, ratio=20, ratio_from=1 << 10)
    with gzip.GzipFile(fileobj=packed) as stream, pytest.raises(DataError, match="above 20 to 1"):
        read_bounded(stream, "x", limits, packed=packed.tell)


def test_a_stream_without_an_end_ends_at_the_limit() -> None:
    class Endless:
        def read(self, size: int = -1, /) -> bytes:
            return bytes(size)

    with pytest.raises(DataError, match="in memory"):
        read_bounded(Endless(), "/dev/zero", LIMITS)


def _archive(fill: Callable[[zipfile.ZipFile], None]) -> zipfile.ZipFile:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        fill(archive)
    return zipfile.ZipFile(content)


def _dense(archive: zipfile.ZipFile) -> None:
    archive.writestr("a", bytes(900_000))


def _large(archive: zipfile.ZipFile) -> None:
    archive.writestr("a", bytes(2 << 20))


def _many(archive: zipfile.ZipFile) -> None:
    for number in range(30):
        archive.writestr(str(number), b"")


@pytest.mark.parametrize(
    ("fill", "message"),
    [(_dense, "above 100 to 1"), (_large, "in memory"), (_many, "has 30 members; at most 20")],
)
def test_archives_are_judged_by_their_directory(
    fill: Callable[[zipfile.ZipFile], None], message: str
) -> None:
    limits = FileLimits(memory=1 << 20, ratio=100, ratio_from=1 << 10, columns=20)
    with pytest.raises(ModelError, match=message), _archive(fill) as archive:
        check_archive(archive, "x", limits, kind=ModelError)
