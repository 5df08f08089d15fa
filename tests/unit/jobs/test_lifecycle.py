import fcntl
import time

import psutil
import pytest

from yunlu.core.errors import StoreError, TrainingError
from yunlu.executors.worker_process import recorded_worker
from yunlu.jobs import lifecycle
from yunlu.jobs.run_log import follow
from yunlu.runs.events import StateChanged
from yunlu.runs.run_store import Document, Log
from yunlu.runs.states import RunState
from yunlu.spec.job import Job

pytestmark = pytest.mark.usefixtures("fake_worker")


def until_rest(run):
    for _ in follow(run, poll_s=0.02):
        pass
    worker = recorded_worker(run)
    while worker.detached and worker.exit_code() is None:  # reaped: no child is left behind
        time.sleep(0.01)
    return lifecycle.read_record(run)


def until(run, kind, **data):
    for update in follow(run, poll_s=0.02):
        for event in update.items:
            if isinstance(event, kind) and data.items() <= dict(event).items():
                return
    raise AssertionError(f"the run rests without {kind} {data}")


def states(run):
    return [e.state for e, _ in run.read_events() if isinstance(e, StateChanged)]


def test_submit_makes_a_whole_run_with_a_readable_id(own_home, make_job, tmp_path):
    source = tmp_path / "digits.yaml"
    source.write_text("task: x  # as the user wrote it\n")
    run = lifecycle.submit(make_job(name="My.Digits"), source=source)
    prefix, _, suffix = run.id.rpartition("-")
    assert prefix == "my-digits"
    assert len(suffix) == 6
    assert int(suffix, 16) >= 0
    assert Job.model_validate_json((run.path / Document.JOB).read_bytes()).name == "My.Digits"
    assert (run.path / Document.JOB_SOURCE).read_text() == source.read_text()
    assert states(run) == ["pending"]
    assert not list(own_home.glob(".new-*"))


def test_unnamed_job_gets_a_name_a_job_may_have(make_job):
    run = lifecycle.submit(make_job(name=None, task="my_tasks:Odd"))
    assert Job.model_validate_json((run.path / Document.JOB).read_bytes()).name == "my-tasks-odd"


def test_failed_submit_leaves_nothing_behind(own_home, make_job, tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        lifecycle.submit(make_job(), source=tmp_path / "gone.yaml")
    assert not [path for path in own_home.iterdir() if path.is_dir() and path.name[0] != "."]


def test_started_run_goes_from_pending_to_finished(make_job):
    run = lifecycle.submit(make_job())
    lifecycle.start(run)
    record = until_rest(run)
    assert states(run) == ["pending", "planning", "running", "finished"]
    assert (record.step, record.steps, record.metric_value) == (20, 20, 0.9)


def test_worker_runs_where_the_job_was_submitted(make_job, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = lifecycle.submit(make_job("wait"))
    monkeypatch.chdir(tmp_path)
    worker = lifecycle.start(run)
    assert psutil.Process(worker.pid).cwd() == str(tmp_path / "here")
    lifecycle.stop(run, now=True)


def test_run_is_started_once(make_job):
    run = lifecycle.submit(make_job("wait"))
    lifecycle.start(run)
    with pytest.raises(StoreError, match="started before"):
        lifecycle.start(run)
    lifecycle.stop(run, now=True)


def test_stopped_run_saves_and_resumes_to_the_end(make_job):
    run = lifecycle.submit(make_job("wait"))
    lifecycle.start(run)
    until(run, StateChanged, state="running")
    assert lifecycle.stop(run.id).state is RunState.STOPPED
    until_rest(run)
    assert lifecycle.resume(run.id[:8]).path == run.path
    assert until_rest(run).state is RunState.FINISHED
    assert states(run) == [
        "pending", "planning", "running", "stopping", "stopped",
        "pending", "planning", "running", "finished",
    ]  # fmt: skip


def test_run_ended_at_once_has_stopped_and_can_resume(make_job):
    run = lifecycle.submit(make_job("wait"))
    lifecycle.start(run)
    until(run, StateChanged, state="running")
    record = lifecycle.stop(run, now=True)
    assert record.state is RunState.STOPPED
    assert record.state.can_resume


def test_stop_before_the_worker_listens_still_ends_stopped(make_job):
    run = lifecycle.submit(make_job("wait"))
    lifecycle.start(run)  # the interpreter is only starting
    assert lifecycle.stop(run).state is RunState.STOPPED


def test_stop_of_a_run_that_was_never_started(make_job):
    run = lifecycle.submit(make_job())
    assert lifecycle.stop(run).state is RunState.STOPPED
    with pytest.raises(StoreError, match="it is stopped"):
        lifecycle.start(run)


def test_stop_of_a_resting_run_changes_nothing(make_job):
    run = lifecycle.submit(make_job())
    lifecycle.start(run)
    until_rest(run)
    before = (run.path / Log.EVENTS).read_bytes()
    assert lifecycle.stop(run).state is RunState.FINISHED
    assert (run.path / Log.EVENTS).read_bytes() == before


def test_worker_that_dies_without_a_word_leaves_a_lost_run(make_job):
    run = lifecycle.submit(make_job("die at once"))
    lifecycle.start(run)
    record = until_rest(run)
    assert record.state is RunState.LOST
    assert "exit code 3" in record.error


def test_finished_run_is_not_resumed(make_job):
    run = lifecycle.submit(make_job())
    lifecycle.start(run)
    until_rest(run)
    with pytest.raises(StoreError, match="is finished"):
        lifecycle.resume(run.id)


def test_running_run_is_not_resumed(make_job):
    run = lifecycle.submit(make_job("wait"))
    lifecycle.start(run)
    until(run, StateChanged, state="running")
    with pytest.raises(StoreError, match="has a worker"):
        lifecycle.resume(run.id)
    lifecycle.stop(run, now=True)


def test_held_worker_lock_forbids_a_second_worker(make_job, monkeypatch):
    monkeypatch.setattr(lifecycle, "_WORKER_EXIT_S", 0)
    run = lifecycle.submit(make_job())
    run.emit(StateChanged(state="failed"))
    with (run.path / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="has a worker"):
            lifecycle.resume(run)
    assert states(run) == ["pending", "failed"]


def test_run_of_live_objects_is_resumed_only_from_python(make_job):
    run = lifecycle.submit(make_job(task=lifecycle.IN_PROCESS))
    run.emit(StateChanged(state="stopped"))
    with pytest.raises(StoreError, match="only Python"):
        lifecycle.resume(run)


def test_program_that_trains_in_itself_is_not_signalled(make_job):
    run = lifecycle.submit(make_job(task=lifecycle.IN_PROCESS))
    run.emit(StateChanged(state="planning"))
    run.emit(StateChanged(state="running"))
    with pytest.raises(StoreError, match="inside the Python process") as caught:
        lifecycle.stop(run, now=True)
    assert "Ctrl-C" in (caught.value.hint or "")


def test_resume_whose_directory_is_gone_rests_again(make_job, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = lifecycle.submit(make_job())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rmdir()
    with pytest.raises(StoreError, match="no longer there"):
        lifecycle.start(run)
    assert lifecycle.read_record(run).state is RunState.FAILED


def test_find_takes_an_id_a_unique_beginning_or_last(make_job):
    first = lifecycle.submit(make_job(name="alpha"))
    second = lifecycle.submit(make_job(name="beta"))
    assert lifecycle.find(first.id).path == first.path
    assert lifecycle.find("al").path == first.path
    assert lifecycle.find("last").path == lifecycle.find("latest").path == second.path


def test_find_says_what_it_cannot_decide(make_job):
    with pytest.raises(StoreError, match="no runs"):
        lifecycle.find("last")
    lifecycle.submit(make_job())
    lifecycle.submit(make_job())
    with pytest.raises(StoreError, match="prefix of 2 runs"):
        lifecycle.find("digits")
    with pytest.raises(StoreError, match="no run 'x'"):
        lifecycle.find("x")


def test_listing_runs_makes_no_home(own_home):
    assert lifecycle.list_runs() == []
    assert not own_home.exists()


def test_plan_is_made_without_leaving_a_run(own_home, make_job):
    seen = []
    plan = lifecycle.make_plan(make_job(), on_event=lambda event: seen.append(event.kind))
    assert plan.steps == 20
    assert "progress" in seen
    assert not own_home.exists()


def test_planner_that_dies_is_quoted(make_job):
    with pytest.raises(TrainingError, match="a library is missing"):
        lifecycle.make_plan(make_job("die at once"))
