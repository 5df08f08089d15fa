"""Messages arrive as they were sent; anything else is refused."""

from __future__ import annotations

import io
import json

import pytest

from yunlu.core.framing import FrameError, FrameReader
from yunlu.planning.layouts import Layout
from yunlu.training.elastic.messages import (
    Assignment,
    Heartbeat,
    LayoutsPlanned,
    Message,
    RankAssignment,
    Restore,
    frame,
    read_message,
)


def arrived(data: bytes) -> Message:
    source, reader = io.BytesIO(data), FrameReader()
    while (found := reader.read(source.readinto)) is None:
        pass
    return read_message(found.control)


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
    assert arrived(frame(sent)) == sent


def test_layouts_by_count_and_steps_arrive_as_they_were_sent() -> None:
    for sent in (LayoutsPlanned(layouts={2: Layout(tp=2)}), Heartbeat(steps=((1, 0.5, 0.1),))):
        assert arrived(frame(sent)) == sent


@pytest.mark.parametrize(
    "data", [{}, {"kind": "shell"}, {"kind": "halt"}, {"kind": "ping", "x": 1}]
)
def test_what_is_no_message_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        read_message(json.loads(json.dumps(data)))
