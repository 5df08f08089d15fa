"""A worker between two supervisors loses no word."""

from __future__ import annotations

import selectors
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from yunlu.planning.layouts import Layout
from yunlu.runs.home import open_run
from yunlu.training.elastic.messages import (
    Assignment,
    Failed,
    LeaveNotice,
    Paused,
    RankAssignment,
    Restore,
    WorkerHello,
)
from yunlu.training.elastic.worker_agent import WorkerAgent


def test_what_is_said_while_the_line_is_made_is_not_lost(tmp_path: Path) -> None:
    worker = WorkerAgent(0, node="local", run=open_run(tmp_path))
    workers = (RankAssignment(worker=0, host="here", pid=1),)
    worker.assignment = Assignment(
        generation=3,
        layout=Layout(),
        rank=0,
        workers=workers,
        handoff_rank=0,
        restore=Restore(kind="start"),
    )
    worker._enqueue(Paused(generation=2, step=1))
    worker._enqueue(LeaveNotice())
    outbox = worker._outbox
    ours, theirs = socket.socketpair()
    hellos: list[WorkerHello] = []

    class Line:
        connection = ours

        def connect(self, hello: WorkerHello) -> bool:
            hellos.append(hello)
            worker.report_paused(5, live=False)
            return True

    line: Any = Line()
    worker._client = line
    with ours, theirs, closing(worker._signals), selectors.DefaultSelector() as selector:
        assert worker._reconnect(selector)
    assert not hellos[0].is_ready
    assert worker._outbox is outbox
    assert [message.kind for message in outbox] == ["leave_notice", "paused"]
    assert outbox[1].step == 5


def test_a_worker_out_of_memory_says_so_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerAgent(0, node="local", run=open_run(tmp_path))
    monkeypatch.setattr("yunlu.training.elastic.worker_agent._FLUSH_S", 0.0)
    with closing(worker._signals):
        worker.report_failure(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    (words,) = worker._outbox
    assert isinstance(words, Failed)
    assert words.code == "training"
    assert words.message.startswith("Memory ran out")
    assert "micro_batch" in str(words.hint)
