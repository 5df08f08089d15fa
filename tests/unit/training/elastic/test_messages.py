"""Frames: whole messages or an error, never code, never too much."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.layout import Layout
from yunlu.runs.worker_group import FrameDecoder, FrameError, encode_frame
from yunlu.training.elastic.messages import (
    Assignment,
    Heartbeat,
    LayoutsPlanned,
    RankAssignment,
    Restore,
    frame,
    read_message,
)


@given(st.lists(st.dictionaries(st.text(), st.integers()), max_size=5), st.data())
def test_messages_survive_any_cutting_of_the_stream(
    messages: list[dict[str, int]], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(message) for message in messages)
    unpacker, found = FrameDecoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += list(unpacker.feed(stream[:size]))
        stream = stream[size:]
    assert found == messages


def test_an_assignment_arrives_as_it_was_sent() -> None:
    sent = Assignment(
        generation=3,
        layout=Layout(dp=2),
        rank=1,
        workers=(
            RankAssignment(worker=4, host="a", pid=1),
            RankAssignment(worker=5, host="b", pid=2),
        ),
        handoff_rank=1,
        restore=Restore(kind="start"),
    )
    (found,) = FrameDecoder().feed(frame(sent))
    assert read_message(found) == sent


def test_layouts_by_count_and_steps_arrive_as_they_were_sent() -> None:
    for sent in (LayoutsPlanned(layouts={2: Layout(tp=2)}), Heartbeat(steps=((1, 0.5, 0.1),))):
        (found,) = FrameDecoder().feed(frame(sent))
        assert read_message(found) == sent


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError):
        list(FrameDecoder(100).feed((101).to_bytes(4, "big")))


@pytest.mark.parametrize("body", [b"{", b"[]", b"\x80\x04.", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameDecoder().feed(len(body).to_bytes(4, "big") + body))


@pytest.mark.parametrize(
    "data", [{}, {"kind": "shell"}, {"kind": "halt"}, {"kind": "ping", "x": 1}]
)
def test_what_is_no_message_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        read_message(json.loads(json.dumps(data)))
