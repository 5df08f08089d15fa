import pytest

from yunlu.core.errors import StoreError
from yunlu.core.files import append_lines
from yunlu.jobs import lifecycle
from yunlu.jobs.run_log import MetricRecord, RunUpdate, end_of, follow
from yunlu.runs.events import Event, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Log


@pytest.fixture
def run(make_job):
    return lifecycle.submit(make_job())


def items(updates):
    return [item for update in updates for item in update.items]


def test_everything_comes_in_order_until_the_run_rests(run):
    run.emit(StateChanged(state="planning"))
    append_lines(run.path / Log.METRICS, [{"step": 1, "at": 1.0}])
    watching = follow(run, poll_s=0)
    first = next(watching).items
    assert isinstance(first[0], MetricRecord)
    assert [event.state for event in first[1:]] == ["pending", "planning"]
    assert next(watching).items == ()
    run.emit(StateChanged(state="failed"))
    assert [event.state for event in items(watching)] == ["failed"]


def test_rest_of_an_earlier_life_does_not_end_it(run):
    for state in ("failed", "pending", "planning"):
        run.emit(StateChanged(state=state))
    watching = follow(run, poll_s=0)
    assert len(next(watching).items) == 4
    assert next(watching).items == ()
    run.emit(StateChanged(state="failed"))
    assert len(items(watching)) == 1


def test_what_was_before_the_position_is_left_out(run):
    append_lines(run.path / Log.METRICS, [{"step": 1, "at": 1.0}])
    since = end_of(run)
    run.emit(StateChanged(state="failed"))
    append_lines(run.path / Log.METRICS, [{"step": 2, "at": 2.0}])
    metric, event = items(follow(run, since=since, poll_s=0))
    assert metric.record["step"] == 2
    assert isinstance(event, Event)


def test_cursor_of_an_update_is_where_the_next_one_begins(run):
    append_lines(run.path / Log.METRICS, [{"step": 1, "at": 1.0}])
    first = next(follow(run, poll_s=0))
    append_lines(run.path / Log.METRICS, [{"step": 2, "at": 2.0}])
    (second,) = next(follow(run, since=first.cursor, poll_s=0)).items
    assert second.record["step"] == 2
    assert RunUpdate.model_validate_json(first.model_dump_json()) == first


def test_following_a_resting_run_ends_at_once(run):
    run.emit(StateChanged(state="failed"))
    assert items(follow(run, since=end_of(run), poll_s=0)) == []


def test_half_a_line_is_waited_for(run):
    watching = follow(run, poll_s=0)
    next(watching)
    with (run.path / Log.METRICS).open("a") as file:
        file.write('{"step": 1, "at"')
    assert next(watching).items == ()
    with (run.path / Log.METRICS).open("a") as file:
        file.write(": 5.0}\n")
    assert next(watching).items == (MetricRecord(record={"step": 1, "at": 5.0}),)


def test_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(StoreError, match="is not a run"):
        next(follow(open_run(tmp_path)))
