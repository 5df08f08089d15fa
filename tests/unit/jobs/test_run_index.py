import shutil
import sqlite3
from contextlib import closing

import pytest

from tests.sample_events import sample
from yunlu.core.errors import StoreError
from yunlu.jobs import lifecycle
from yunlu.jobs.run_index import RunIndex
from yunlu.runs.events import Evaluated, StateChanged
from yunlu.runs.states import RunState


def test_submitted_run_is_in_the_index(own_home, make_job):
    run = lifecycle.submit(make_job())
    with RunIndex(own_home) as store:
        record = store.get(run.id)
    assert record is not None
    assert (record.name, record.task, record.model) == ("digits", "tabular-classification", "mlp")
    assert record.state is RunState.PENDING


def test_deleted_index_is_rebuilt_from_the_run_directories(own_home, make_job):
    for name in ("a", "b", "c"):
        run = lifecycle.submit(make_job(name=name))
        run.emit(StateChanged(state="failed"))
    before = lifecycle.list_runs()
    (own_home / "index.sqlite").unlink()
    assert lifecycle.list_runs() == before
    assert [record.state for record in before] == [RunState.FAILED] * 3


def test_log_of_a_deleted_index_is_not_replayed_into_the_new_one(own_home, make_job):
    lifecycle.submit(make_job())
    store = RunIndex(own_home)  # stays open: its write-ahead log is left behind
    store.records()
    shutil.copy(own_home / "index.sqlite-wal", own_home / "kept")
    (own_home / "index.sqlite").unlink()
    (own_home / "kept").replace(own_home / "index.sqlite-wal")
    assert len(lifecycle.list_runs()) == 1
    store.close()


def test_damaged_index_is_put_aside_and_rebuilt(own_home, make_job):
    run = lifecycle.submit(make_job())
    (own_home / "index.sqlite").write_bytes(b"this is no database, by any reading" * 100)
    assert [record.id for record in lifecycle.list_runs()] == [run.id]
    assert list(own_home.glob("index.damaged-*"))


def test_damaged_row_is_read_afresh_from_its_run(own_home, make_job):
    run = lifecycle.submit(make_job())
    before = lifecycle.list_runs()
    with sqlite3.connect(own_home / "index.sqlite") as database:
        database.execute("UPDATE runs SET state = 'runnimg'")
    database.close()
    assert lifecycle.list_runs() == before
    with RunIndex(own_home) as store:
        assert store.get(run.id) == before[0]


def test_index_of_a_newer_yunlu_is_refused_before_a_run_is_made(own_home, make_job):
    with RunIndex(own_home):
        pass
    connection = sqlite3.connect(own_home / "index.sqlite")
    connection.execute("PRAGMA user_version = 9999")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="newer Yunlu") as caught:
        lifecycle.submit(make_job())
    assert "rebuilt" in (caught.value.hint or "")
    assert not [path for path in own_home.iterdir() if path.is_dir() and path.name[0] != "."]


def test_index_of_an_older_yunlu_is_made_anew(own_home, make_job):
    run = lifecycle.submit(make_job())
    before = lifecycle.list_runs()
    with closing(sqlite3.connect(own_home / "index.sqlite")) as connection:
        connection.execute("DROP TABLE runs")
        connection.execute("CREATE TABLE runs (id TEXT, something TEXT)")
        connection.execute("PRAGMA user_version = 1")
    assert lifecycle.list_runs() == before
    assert [record.id for record in before] == [run.id]


def test_home_that_is_a_file_is_refused_in_words(own_home, make_job):
    own_home.write_text("not a directory")
    with pytest.raises(StoreError, match="cannot be used"):
        lifecycle.submit(make_job())


def test_directory_that_is_no_run_is_passed_over(own_home, make_job):
    run = lifecycle.submit(make_job())
    (own_home / "notes").mkdir()
    (own_home / "torn").mkdir()
    (own_home / "torn" / "job.json").write_text('{"task": ')
    assert [record.id for record in lifecycle.list_runs()] == [run.id]


def test_removed_run_is_forgotten(own_home, make_job):
    run = lifecycle.submit(make_job())
    shutil.rmtree(run.path)
    assert lifecycle.list_runs() == []
    with RunIndex(own_home) as store:
        assert store.records() == []


def test_slow_reader_does_not_turn_the_index_back(own_home, make_job):
    run = lifecycle.submit(make_job())
    with RunIndex(own_home) as store:
        old = store.get(run.id)
        run.emit(StateChanged(state="failed"))
        new = store.refresh(run)
        store._put(old)
        assert store.get(run.id) == new


def test_figure_that_is_not_finite_is_kept(own_home, make_job):
    run = lifecycle.submit(make_job())
    run.emit(sample(Evaluated, split="test", step=1, loss=float("inf"), metrics={}))
    with RunIndex(own_home) as store:
        store.refresh(run)
        assert store.get(run.id).metric_value == float("inf")
        run.emit(sample(Evaluated, split="test", step=2, loss=float("nan"), metrics={}))
        assert store.refresh(run).metric_value is None


def test_run_woken_behind_the_indexs_back_is_noticed(own_home, make_job):
    run = lifecycle.submit(make_job())
    run.emit(StateChanged(state="failed"))
    assert lifecycle.list_runs()[0].state is RunState.FAILED
    run.emit(StateChanged(state="pending"))
    assert lifecycle.list_runs()[0].state is RunState.PENDING
