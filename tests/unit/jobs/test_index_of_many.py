"""Many runs: a list touches those that changed, and no other. Counted, never timed."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.sample_events import sample
from yunlu.cli.main import main
from yunlu.core.errors import StoreError
from yunlu.jobs import lifecycle
from yunlu.jobs.run_index import RunIndex
from yunlu.jobs.run_listing import list_home
from yunlu.runs import changes
from yunlu.runs.events import Evaluated, StateChanged, WorkerGroupFormed
from yunlu.runs.home import new_run, open_run
from yunlu.runs.run_store import write_job
from yunlu.runs.states import RunState
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

COUNT = 40

_watched: list[tuple[str, set[str]]] = []


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event in {"open", "os.listdir", "os.scandir"}:
        home, seen = _watched[-1]
        path = arguments[0]
        if isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(f"{home}/"):
            seen.add(os.fsdecode(path)[len(home) + 1 :].split("/")[0])


sys.addaudithook(_look)  # cannot be taken back: it does nothing while nobody watches


@contextmanager
def opened_in(home: Path) -> Iterator[set[str]]:
    """Names of the runs in which something is opened."""
    seen = set[str]()
    _watched.append((str(home), seen))
    try:
        yield seen
    finally:
        _watched.pop()
        seen -= {name for name in seen if not name.startswith("run-")}


def add_run(home: Path, name: str, *states: RunState) -> RunStore:
    job = {"name": name, "task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
    with new_run(home, name) as run:
        write_job(run, Job.model_validate(job))
    run = open_run(home / name)
    for number, state in enumerate((RunState.PENDING, *states)):
        run.emit(StateChanged(state=state, at=1000.0 + int(name[-3:]) + number / 10))
    return run


@pytest.fixture
def home(own_home: Path) -> Path:
    own_home.mkdir(mode=0o700, exist_ok=True)
    for number in range(COUNT):
        add_run(own_home, f"run-{number:03d}", RunState.FAILED)
    return own_home


def states(home: Path, *, most: int | None = None) -> dict[str, RunState]:
    return {run.id: run.state for run in list_home(home, most=most).runs}


def test_a_list_opens_no_run_that_has_not_changed(home: Path) -> None:
    with opened_in(home) as opened:
        first = states(home)
    assert len(opened) == len(first) == COUNT
    with opened_in(home) as opened:
        assert states(home) == first
        assert [*states(home, most=3)] == ["run-039", "run-038", "run-037"]
    assert opened == set()


def test_a_list_opens_what_changed(home: Path) -> None:
    states(home)
    open_run(home / "run-005").emit(StateChanged(state=RunState.PENDING))
    add_run(home, "run-900", RunState.STOPPED)
    shutil.rmtree(home / "run-007")
    with opened_in(home) as opened:
        now = states(home)
    assert opened == {"run-005", "run-900"}
    assert "run-007" not in now
    assert now["run-900"] is RunState.STOPPED
    assert now["run-005"] is RunState.LOST  # nobody works on it


def test_an_old_run_that_was_woken_is_among_the_newest(home: Path) -> None:
    states(home)
    run = open_run(home / "run-001")
    run.emit(StateChanged(state=RunState.PENDING))
    with run.claim(lifecycle_claim(), wait=False):
        listed = list_home(home, most=2)
        assert [one.id for one in listed.runs] == ["run-039", "run-038", "run-001"]
        assert listed.older == COUNT - 3
        with opened_in(home) as opened:
            list_home(home, most=2)
    assert opened == {"run-001"}


def lifecycle_claim() -> Any:
    from yunlu.runs.run_store import Claim

    return Claim.WORKER


def test_what_was_written_behind_the_marks_is_found_when_it_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states(home)
    with monkeypatch.context() as patched:
        patched.setattr("yunlu.runs.home.mark_changed", lambda *_: None)
        run = open_run(home / "run-039")
        run.emit(sample(Evaluated, split="test", step=9, loss=0.5, metrics={}))
    (newest,) = list_home(home, most=1).runs
    assert (newest.step, newest.metric_value) == (9, 0.5)


def test_a_reader_that_dies_leaves_the_change_to_the_next(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states(home)
    open_run(home / "run-000").emit(sample(Evaluated, split="test", step=7, loss=0.5, metrics={}))
    with monkeypatch.context() as patched, RunIndex(home) as index:
        patched.setattr(index, "_put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            index.update()
    with RunIndex(home) as index:
        index.update()
        record = index.get("run-000")
    assert record is not None
    assert record.step == 7
    assert not [*(home / ".changed").iterdir()]


def test_without_marks_every_run_is_read_once(home: Path) -> None:
    states(home)
    shutil.rmtree(home / ".changed")
    open_run(home / "run-000").emit(sample(Evaluated, split="test", step=7, loss=0.5, metrics={}))
    with opened_in(home) as opened:
        states(home, most=1)
    assert len(opened) == COUNT
    with RunIndex(home) as index:
        assert index.get("run-000").step == 7  # pyright: ignore[reportOptionalMemberAccess]


def test_marks_are_left_where_an_index_is(tmp_path: Path) -> None:
    run = add_run(tmp_path, "run-001")
    assert {path.name for path in tmp_path.iterdir()} == {"run-001"}
    changes.open_marks(tmp_path)
    run.emit(StateChanged(state=RunState.FAILED))
    assert changes.take_marks(tmp_path) == {"run-001"}
    run.emit(sample(Evaluated, split="test", step=7, loss=0.5, metrics={}))
    changes.drop_marks(tmp_path, {"run-001"})
    assert changes.take_marks(tmp_path) == {"run-001"}  # marked again meanwhile


def test_a_link_in_place_of_the_marks_is_refused(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir(mode=0o700)
    elsewhere.mkdir()
    (home / ".changed").symlink_to(elsewhere)
    add_run(home, "run-001")
    assert not [*elsewhere.iterdir()]
    with pytest.raises(StoreError, match="symbolic link"):
        list_home(home)


def test_a_run_is_found_by_its_id_without_a_look_at_others(home: Path) -> None:
    with opened_in(home) as opened:
        assert lifecycle.find("run-013").id == "run-013"
    assert opened == {"run-013"}
    assert lifecycle.find("last").id == "run-039"
    with pytest.raises(StoreError, match="prefix of 10 runs"):
        lifecycle.find("run-02")


def test_workers_are_listed_without_their_logs(home: Path) -> None:
    run = open_run(home / "run-003")
    ranks = [{"rank": 0}, {"rank": 1}]
    run.emit(sample(WorkerGroupFormed, generation=1, layout="dp2", from_step=0, ranks=ranks))
    (listed,) = (one for one in list_home(home).runs if one.id == "run-003")
    assert (listed.layout, listed.workers) == ("dp2", 2)


def test_json_lists_every_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["id"] for line in lines] == [f"run-{n:03d}" for n in reversed(range(COUNT))]
    assert main(["ps"]) == 0
    assert f"{COUNT - 20} older" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (sqlite3.SQLITE_FULL, "database or disk is full"),
        (sqlite3.SQLITE_IOERR | 19 << 8, "disk I/O error"),
    ],
)
def test_a_disk_that_takes_nothing_more_hides_no_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    expected = states(home)
    add_run(home, "run-99", RunState.FAILED)

    def refuse(*_: Any) -> None:
        error = sqlite3.OperationalError(text)
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr("yunlu.jobs.run_index._PAUSES_S", ())
    monkeypatch.setattr(RunIndex, "_connect", refuse)
    assert states(home) == expected | {"run-99": RunState.FAILED}
