import fcntl
import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sample_events import sample
from yunlu.core.errors import StoreError, TrainingError
from yunlu.executors.worker_process import WorkerProcess, launch_lock, record_worker, this_process
from yunlu.jobs.run import (
    detect_lost,
    error_of,
    log_tail,
    move,
    new_record,
    recent_metrics,
    remaining_s,
    replay,
    worker_of,
)
from yunlu.runs.events import (
    AttemptStarted,
    CheckpointSaved,
    ErrorRaised,
    Evaluated,
    PlanMade,
    StateChanged,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, Log
from yunlu.runs.states import LEGAL_MOVES, RunState, check_move, replay_move

STATES = list(RunState)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "digits-0a1b2c"
    path.mkdir()
    run = open_run(path)
    job = {"name": "digits", "task": "tabular-classification", "model": {"name": "mlp"}}
    (run.path / Document.JOB).write_text(json.dumps(job))
    record_worker(run, this_process())
    run.emit(StateChanged(state="pending", reason="submitted"))
    return run


def dead_process(**changes):
    this = this_process()
    parts = {"pid": 2**22 - 3, "process_started_at": this.process_started_at, "host": this.host}
    return WorkerProcess(**{**parts, "detached": True, **changes})


def begin(run, worker):
    record_worker(run, worker)
    at = worker.process_started_at
    run.emit(sample(AttemptStarted, number=1, pid=worker.pid, process_started_at=at))
    run.emit(StateChanged(state="planning"))
    run.emit(StateChanged(state="running"))


def test_events_fold_into_one_record(run):
    begin(run, this_process())
    run.emit(sample(PlanMade, steps=100, best_metric="f1"))
    metrics = {"accuracy": 0.9, "f1": 0.8}
    run.emit(sample(Evaluated, split="validation", step=40, loss=0.3, metrics=metrics))
    record = detect_lost(run, new_record(run))
    assert (record.state, record.step, record.steps) == (RunState.RUNNING, 40, 100)
    assert (record.metric, record.metric_value) == ("f1", 0.8)
    assert record.progress == 0.4
    assert record.offset == (run.path / Log.EVENTS).stat().st_size
    assert record.pid == os.getpid()


def test_replaying_piece_by_piece_gives_the_same_record(run):
    pieces = new_record(run)
    begin(run, this_process())
    pieces = replay(run, pieces)
    run.emit(sample(CheckpointSaved, step=7, path="x"))
    pieces = replay(run, pieces)
    assert pieces == replay(run, new_record(run))


def test_torn_last_line_is_left_until_it_is_whole(run):
    begin(run, this_process())
    with (run.path / Log.EVENTS).open("a") as file:
        file.write('{"kind": "state", "at": 1.0, "da')
    assert detect_lost(run, new_record(run)).state is RunState.RUNNING
    run.emit(StateChanged(state="finished"))
    assert detect_lost(run, new_record(run)).state is RunState.FINISHED


def test_vanished_worker_is_marked_lost_once(run):
    begin(run, dead_process())
    record = detect_lost(run, new_record(run))
    assert record.state is RunState.LOST
    assert "vanished" in record.error
    detect_lost(run, record)
    lost = [e for e, _ in run.read_events() if isinstance(e, StateChanged) and e.state == "lost"]
    assert len(lost) == 1


def test_pid_that_passed_to_a_stranger_does_not_keep_a_run_alive(run):
    begin(run, dead_process(pid=os.getpid(), process_started_at=1_000_000.0))
    assert detect_lost(run, new_record(run)).state is RunState.LOST


def test_worker_on_another_host_is_not_judged(run):
    begin(run, dead_process(host=f"not-{socket.gethostname()}"))
    assert detect_lost(run, new_record(run)).state is RunState.RUNNING


def test_held_worker_lock_keeps_a_run_alive_whatever_its_pid_says(run):
    begin(run, dead_process())
    with (run.path / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert detect_lost(run, new_record(run)).state is RunState.RUNNING
    assert detect_lost(run, new_record(run)).state is RunState.LOST


def test_run_that_is_being_started_is_not_buried(run):
    record_worker(run, dead_process())
    with launch_lock(run, wait=False):
        assert detect_lost(run, new_record(run)).state is RunState.PENDING
    assert detect_lost(run, new_record(run)).state is RunState.LOST


def test_submitter_that_died_before_starting_a_worker_loses_the_run(run):
    record_worker(run, dead_process(detached=False))
    record = detect_lost(run, new_record(run))
    assert record.state is RunState.LOST
    assert "before its worker was started" in record.error


def test_worker_that_vanished_while_stopping_has_stopped(run):
    begin(run, dead_process())
    run.emit(StateChanged(state="stopping"))
    assert detect_lost(run, new_record(run)).state is RunState.STOPPED


def test_new_life_clears_the_error_and_undoes_later_steps(run):
    begin(run, this_process())
    run.emit(sample(CheckpointSaved, step=30, path="x"))
    run.emit(ErrorRaised(code="training", message="The loss is not finite."))
    run.emit(StateChanged(state="failed"))
    failed = detect_lost(run, new_record(run))
    assert (failed.state, failed.error) == (RunState.FAILED, "The loss is not finite.")
    run.emit(StateChanged(state="pending"))
    run.emit(StateChanged(state="planning"))
    run.emit(StateChanged(state="running", resumed_from_step=20))
    again = replay(run, failed)
    assert (again.state, again.error, again.step) == (RunState.RUNNING, None, 20)


def test_illegal_move_is_refused_and_leaves_no_event(run):
    begin(run, this_process())
    run.emit(StateChanged(state="finished"))
    before = (run.path / Log.EVENTS).read_bytes()
    with pytest.raises(StoreError, match="finished cannot become pending"):
        move(run, detect_lost(run, new_record(run)), RunState.PENDING)
    assert (run.path / Log.EVENTS).read_bytes() == before


def test_replaced_log_is_read_from_its_start(run):
    begin(run, this_process())
    record = detect_lost(run, new_record(run))
    (run.path / Log.EVENTS).unlink()
    run.emit(StateChanged(state="pending"))
    assert replay(run, record).state is RunState.PENDING


def test_worker_is_known_by_the_launchers_measure_when_its_own_differs(run):
    this = this_process()
    record_worker(run, this)
    run.emit(sample(AttemptStarted, number=1, pid=this.pid, process_started_at=12345.0))
    assert worker_of(run, detect_lost(run, new_record(run))) == this


def test_error_comes_back_as_the_class_its_code_names():
    data = {"code": "training", "message": "m", "hint": "h", "traceback": "T"}
    events = [
        ErrorRaised(at=1, **data),
        StateChanged(at=2, state="failed"),
    ]
    error = error_of(events)
    assert isinstance(error, TrainingError)
    assert (error.message, error.hint) == ("m", "h")
    assert "T" in str(error.__cause__)
    assert error_of([*events, StateChanged(at=3, state="pending")]) is None


def test_unknown_error_code_is_kept():
    error = error_of([ErrorRaised(at=1, code="internal", message="m")])
    assert error is not None
    assert error.code == "internal"


def test_remaining_time_follows_the_recent_pace(run):
    begin(run, this_process())
    run.emit(sample(PlanMade, steps=100))
    lines = [json.dumps({"step": step, "at": 1000.0 + 2 * step}) for step in range(1, 11)]
    (run.path / Log.METRICS).write_text("\n".join(lines) + '\n{"step": 11, "a')
    record = detect_lost(run, new_record(run))
    assert record.step == 10
    assert remaining_s(run, record) == pytest.approx(180.0)


def test_only_the_end_of_long_metrics_is_read(run):
    lines = [json.dumps({"step": step, "at": float(step)}) for step in range(1, 5000)]
    (run.path / Log.METRICS).write_text("\n".join(lines) + "\n")
    recent = recent_metrics(run)
    assert recent[-1]["step"] == 4999
    assert len(recent) < 4999


def test_log_tail_of_a_worker_that_never_printed_is_empty(run):
    assert log_tail(run) == []


@given(st.lists(st.sampled_from(STATES), max_size=12))
def test_finished_is_final_whatever_the_log_says_afterwards(told):
    state = RunState.FINISHED
    for each in told:
        state = replay_move(state, each)
    assert state is RunState.FINISHED


@given(st.data())
def test_losing_one_line_of_a_legal_log_does_not_change_where_it_ends(data):
    path = [RunState.PENDING]
    for _ in range(data.draw(st.integers(2, 12))):
        moves = sorted(LEGAL_MOVES[path[-1]])
        if not moves:
            break
        path.append(data.draw(st.sampled_from(moves)))
    # Not a PENDING: no worker is started before that line stands. Not the last: nothing is after it.
    lines = [i for i, told in enumerate(path[:-1]) if told is not RunState.PENDING]
    torn = data.draw(st.sampled_from([None, *lines]))
    state = RunState.PENDING
    for place, told in enumerate(path):
        if place != torn:
            state = replay_move(state, told)
    assert state is path[-1]


@given(st.sampled_from(STATES), st.sampled_from(STATES))
def test_every_move_outside_the_table_is_refused(current, wanted):
    if wanted in LEGAL_MOVES[current]:
        check_move(current, wanted)
    else:
        with pytest.raises(StoreError, match="cannot become"):
            check_move(current, wanted)


def test_verdict_of_others_does_not_wake_a_resting_run():
    assert replay_move(RunState.STOPPED, RunState.LOST) is RunState.STOPPED
    assert replay_move(RunState.FAILED, RunState.STOPPING) is RunState.FAILED
    assert replay_move(RunState.LOST, RunState.RUNNING) is RunState.RUNNING
