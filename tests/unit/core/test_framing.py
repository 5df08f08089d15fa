"""Frames: whole messages or an error, never code, never too much."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any, cast

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from yunlu.core import framing
from yunlu.core.framing import (
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameReader,
    Header,
    encode_body,
    encode_frame,
    encode_header,
)

JSON_OBJECTS = st.dictionaries(st.text(), st.integers())


def read_all(
    data: bytes, pieces: int = 7, reader: FrameReader | None = None, **limits: int
) -> list[Frame]:
    reader = reader or FrameReader(**cast("dict[str, Any]", limits))
    place, frames = 0, list[Frame]()

    def fill(into: memoryview) -> int:
        nonlocal place
        part = data[place : place + min(pieces, len(into))]
        into[: len(part)] = part
        place += len(part)
        return len(part)

    with suppress(EOFError):
        while True:
            frame = reader.read(fill)
            if frame is not None:
                frames.append(frame)
    return frames


def joined(control: Any, body: bytes = b"") -> bytes:
    return b"".join(encode_frame(control, body))


def frame_of(control: bytes) -> bytes:
    """A frame that is right but for what it holds."""
    return encode_header(len(control), 0, xxhash.xxh3_64_intdigest(control)) + control


@given(st.lists(st.tuples(JSON_OBJECTS, st.binary()), max_size=4), st.integers(1, 50))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    sent: list[tuple[dict[str, int], bytes]], pieces: int
) -> None:
    data = b"".join(joined(control, body) for control, body in sent)
    found = read_all(data, pieces, body_bytes=999)
    assert [(frame.control, bytes(frame.body)) for frame in found] == sent


@given(st.data())
def test_a_damaged_frame_never_comes_out(data: st.DataObject) -> None:
    whole = bytearray(joined({"a": 1}, b"12345678"))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        read_all(bytes(whole), body_bytes=999)


@pytest.mark.parametrize(
    "data",
    [
        joined({"a": 1}, bytes(100)),
        joined({"a": "x" * 1000}),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(HEADER_BYTES),
    ],
)
def test_frames_too_long_or_not_ours_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        read_all(data, control_bytes=500, body_bytes=99)


@pytest.mark.parametrize(
    "control", [b"{", b"[]", b"[1, 2]", b"NaN", b"\x80\x04.", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_what_is_not_a_json_object_is_refused(control: bytes) -> None:
    with pytest.raises(FrameError):
        read_all(frame_of(control))


@pytest.mark.parametrize("lengths", [(1 << 30, 0), (2, 1 << 60)])
def test_a_frame_that_is_too_long_is_refused_before_memory_is_set_aside(
    lengths: tuple[int, int],
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            read_all(encode_header(*lengths, 0), body_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_message_that_no_reader_takes_is_not_sent() -> None:
    with pytest.raises(FrameError):
        encode_frame({"a": "x" * framing.CONTROL_BYTES})


def test_a_body_arrives_where_its_reader_wants_it() -> None:
    into, asked = bytearray(8), list[Header]()

    def place(header: Header) -> memoryview:
        asked.append(header)
        return memoryview(into)

    sent = b"".join(encode_body(memoryview(b"gradient"), channel=3, tag=77))
    (found,) = read_all(sent, reader=FrameReader(control_bytes=0, allocate=place))
    assert (into, found.control, cast("Any", found.body).obj) == (b"gradient", {}, into)
    assert (asked[0].channel, asked[0].tag) == (3, 77)
