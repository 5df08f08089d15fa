"""A run that somebody sent is read, or refused in our words: logs and documents."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.hostile import hostile_bytes
from yunlu.core.errors import StoreError, YunluError
from yunlu.core.files import read_lines
from yunlu.runs.events import event_fields, parse_event, to_record
from yunlu.runs.home import open_run
from yunlu.runs.run_store import (
    Document,
    Log,
    last_record,
    read_job,
    read_json,
    read_number,
    read_plan,
    read_raw_job,
)

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

LINES = (
    *(b'{"v": 1, "kind": "state", "at": 1, "state": "running"}\n', b'"kind": "data", ', b'"at": '),
    *(b'{"v": 1, "kind": "warning", "at": 1e999, "message": "x"}\n', b'"kind": ["a"], "at": {}'),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    return open_run(tmp_path_factory.mktemp("home") / "a-run")


def _place(run: RunStore, name: str) -> Path:
    from pathlib import Path

    path = Path(run.location(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@given(hostile_bytes(*LINES))
@example(b"[" * 100_000 + b"\n")
@example(b'{"v": 1, "kind": "\\ud800", "at": 1}\n')
@example(b'{"v": 1, "kind": "x", "at": NaN}\n')
@example(b'{"v": 1, "kind": "x", "at": ' + b"9" * 4000 + b"}\n")
@example(b'{"v": 1, "kind": "plan", "at": 1, "plan": {"a": ' + b"[" * 90 + b"]" * 90 + b"}}\n")
def test_lines_of_a_log_are_events_or_left_out(run: RunStore, data: bytes) -> None:
    for log in (Log.EVENTS, Log.METRICS):
        _place(run, log).write_bytes(data)
    for event, after in run.read_events():
        assert 0 < after <= len(data)
        event_fields(event)
        json.dumps(to_record(event))
    list(run.read_metrics())
    last_record(run, Log.EVENTS)
    for _, after in read_lines(_place(run, Log.EVENTS)):
        assert after <= len(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KINDS = ("state", "data", "model", "plan", "evaluation", "checkpoint", "warning", "error", "x")


@given(st.fixed_dictionaries({"kind": st.sampled_from(KINDS) | JSON}, optional={"at": JSON}), JSON)
def test_any_record_is_an_event_or_none(record: dict[str, Any], more: Any) -> None:
    content = record | (more if isinstance(more, dict) else {"message": more, "plan": more})
    event = parse_event(content)
    if event is not None:
        event_fields(event)


@given(hostile_bytes(b'{"task": "t", "model": "m", "data": "d"}', b'{"task": ', b'"model": {'))
@example(b"[" * 100_000)
@example(b'{"task": "\\ud800", "model": "m", "data": "d"}')
@example(b'{"task": "t", "model": "m", "data": "d", "devices": ' + b"9" * 5000 + b"}")
@example(b'{"task": "t", "model": "m", "data": "d", "train": {"steps": NaN}}')
def test_documents_are_values_or_errors_of_ours(run: RunStore, data: bytes) -> None:
    for document in (Document.JOB, Document.PLAN, Document.TARGET_BATCH):
        _place(run, document).write_bytes(data)
    for read in (read_job, read_plan, read_raw_job):
        try:
            read(run)
        except YunluError as error:
            str(error).encode()
    read_json(run, Document.JOB)
    read_number(run, Document.TARGET_BATCH)


def test_a_damaged_job_is_named_with_its_fault(run: RunStore) -> None:
    _place(run, Document.JOB).write_text('{"task": "t", "model": "m"}')
    with pytest.raises(StoreError, match=r"its job\.json is damaged: data: Field required"):
        read_job(run)
