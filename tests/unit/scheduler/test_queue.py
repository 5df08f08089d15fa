"""Verbs on queued runs; no pool is up."""

import json
import subprocess
import sys
import time

import pytest

from yunlu.cli.main import main
from yunlu.core.errors import JobError, StoreError
from yunlu.jobs import lifecycle
from yunlu.runs.events import StateChanged
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState
from yunlu.scheduler import queue
from yunlu.scheduler.pool_store import PoolSettings, PoolStore, ServiceRecord
from yunlu.scheduler.pool_view import explain
from yunlu.scheduler.queue import SubmitOptions, enqueue, read_entry
from yunlu.spec.job import Job

JOB = {"name": "digits", "task": "tabular-classification", "data": "synthetic:x", "model": "mlp"}


def make_job(**parts):
    return Job.model_validate({**JOB, **parts})


def test_queued_run_waits_although_whoever_submitted_it_is_gone(own_home):
    run = enqueue(
        make_job(train={"steps": 10, "batch": 4}), SubmitOptions(priority=3, team="vision")
    )
    worker = lifecycle.recorded_worker(run)
    assert worker is not None
    assert not worker.detached
    assert worker.host == "(queue)"
    assert lifecycle.read_record(run).state is RunState.PENDING
    assert lifecycle.list_runs()[0].state is RunState.PENDING
    entry = read_entry(run)
    assert (entry.priority, entry.team, entry.samples, entry.wish) == (3, "vision", 40.0, "run")


def test_wishes_of_the_job_are_heard():
    goal = {"deadline": "2h", "budget": 5}
    entry = read_entry(enqueue(make_job(goal=goal)))
    assert entry.deadline_at == pytest.approx(entry.submitted_at + 7200)
    assert entry.budget_dollars == 5
    assert read_entry(enqueue(make_job(goal=goal), SubmitOptions(deadline_s=60))).deadline_at < (
        entry.submitted_at + 600
    )


def test_stop_takes_a_waiting_run_out_and_resume_puts_it_back(own_home):
    run = enqueue(make_job())
    queue.withdraw(run)
    assert lifecycle.stop(run).state is RunState.STOPPED
    assert read_entry(run).wish == "stop"
    entry = queue.requeue(run)
    assert (entry.wish, entry.ticket) == ("run", 2)
    assert "no pool is up" in explain(own_home, run).standing


def test_pause_of_a_waiting_run():
    run = enqueue(make_job())
    queue.pause(run)
    assert read_entry(run).wish == "pause"
    assert lifecycle.read_record(run).state is RunState.STOPPED


def test_terms_of_a_queued_run_can_be_changed():
    run = enqueue(make_job(), SubmitOptions(priority=1, max_devices=4))
    before = read_entry(run)
    after = queue.change_terms(run, deadline="2h", budget="12.50", min_devices=2)
    assert after == read_entry(run)
    assert after.deadline_at - time.time() == pytest.approx(7200, abs=600)
    assert after.budget_dollars == 12.5
    assert (after.request.least, after.request.most) == (2, 4)
    assert (after.priority, after.ticket) == (1, before.ticket)
    free = queue.change_terms(run, deadline="none", budget="none", priority=3)
    assert (free.deadline_at, free.budget_dollars, free.priority) == (None, None, 3)
    with pytest.raises(JobError, match="between 9 and 4"):
        queue.change_terms(run, min_devices=9)
    assert read_entry(run) == free


def test_run_outside_of_the_queue_has_no_priority(own_home):
    run = lifecycle.submit(make_job())
    with pytest.raises(StoreError, match="not in the queue"):
        queue.change_terms(run, priority=1)
    with pytest.raises(StoreError, match="not in the queue"):
        explain(own_home, run)
    queue.withdraw(run)  # whoever stops any run may say so
    assert read_entry(run) is None


def test_entry_of_another_version_is_refused_with_a_hint():
    run = enqueue(make_job())
    (run.path / Document.QUEUE_ENTRY).write_text('{"from": "the future"}')
    with pytest.raises(StoreError, match=r"queue\.json cannot be read") as caught:
        read_entry(run)
    assert "submit the job again" in caught.value.hint


def test_jobs_that_are_equally_fast_have_one_signature():
    one, other = make_job(train={"steps": 10}), make_job(name="x", train={"steps": 99})
    assert queue.job_signature(one) == queue.job_signature(other)
    assert queue.job_signature(one) != queue.job_signature(
        make_job(model={"name": "mlp", "args": {"hidden": [9]}})
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["submit", "{job}", "--deadline", "soon"], "'soon' is not a time"),
        (["submit", "{job}", "--min-devices", "0"], "0 is not a number of devices"),
        (["submit", "{job}", "--budget", "-1"], "is not above 0"),
        (["submit", "{job}", "--min-devices", "4", "--max-devices", "2"], "between 4 and 2"),
        (["pool", "up", "--policy", "fairest"], "There is no policy 'fairest'"),
        (["pool", "up", "--devices", "0"], "0 is not a number of devices"),
        (["pool", "up", "--quota", "vision"], "not a team and a number"),
        (["pool", "up", "--devices", "1", "--slurm", "x"], "exclude each other"),
        (["pool", "why"], "not in the queue"),
        (["priority", "last", "3"], "not in the queue"),
        (["pool", "change", "last", "--budget", "5"], "not in the queue"),
        (["pool", "change", "last", "--budget", "much"], "not a sum of dollars"),
        (["pool", "change", "last"], "nothing is to be changed"),
        (["pool", "up", "--weight", "vision=0"], "not a team and a number"),
        (["pool", "up", "--idle", "-1"], "--idle: -1 is below 0"),
        (["pool", "up", "--price", "a100"], "not a machine and a number"),
        (["pool", "up", "--team-dollars", "vision=much"], "not a team and a number"),
        (["pool", "up", "--slurm", "main?cpus=0"], "cpus is not a whole number above 0"),
        (["pool", "up", "--ray", "127.0.0.1:9"], "no connection to the Ray cluster"),
        (["submit", "{job}", "--priority", "99999999"], "99999999 is out of bounds"),
        (["priority", "last", "-99999999"], "-99999999 is out of bounds"),
    ],
)
def test_wrong_words_are_answered(own_home, tmp_path, capsys, words, expected):
    job = tmp_path / "job.yaml"
    job.write_text("task: tabular-classification\nmodel: mlp\ndata: synthetic:x\n")
    lifecycle.submit(make_job())
    assert main([word.format(job=job) for word in words]) == 1
    assert expected in " ".join(capsys.readouterr().err.split())


def test_team_that_is_nearly_one_with_a_quota_is_asked_about(own_home, tmp_path, capsys):
    job = tmp_path / "job.yaml"
    job.write_text("task: tabular-classification\nmodel: mlp\ndata: synthetic:x\n")
    pool_store = PoolStore(own_home)
    pool_store.path.mkdir(parents=True)
    pool_store.settings.write_text(PoolSettings(quotas={"vision": 2}).model_dump_json())
    for team, is_asked in (("vison", True), ("vision", False), ("speech", False)):
        assert main(["submit", str(job), "--team", team]) == 0
        assert ("did you mean 'vision'" in capsys.readouterr().out) == is_asked


def test_queue_is_shown_without_a_pool(own_home, tmp_path, capsys):
    job = tmp_path / "job.yaml"
    job.write_text("task: tabular-classification\nmodel: mlp\ndata: synthetic:x\n")
    assert main(["submit", str(job), "--name", "mine", "--priority", "2"]) == 0
    assert "no pool is up yet" in capsys.readouterr().out
    assert main(["priority", "last", "7"]) == 0
    assert "priority 7" in capsys.readouterr().out
    assert main(["pool", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "no pool is up" in shown
    assert "mine-" in shown
    assert main(["pool", "--json"]) == 0
    assert '"is_up": false' in capsys.readouterr().out
    assert main(["pause", "last"]) == 0
    assert "is paused" in " ".join(capsys.readouterr().out.split())
    assert main(["pool", "why", "last"]) == 0
    assert "paused" in capsys.readouterr().out
    assert main(["stop", "last"]) == 0
    assert main(["pool", "down"]) == 0
    assert "no pool was up" in capsys.readouterr().out


def test_run_that_cannot_be_read_does_not_hide_the_queue(own_home, capsys):
    torn, whole = enqueue(make_job(name="torn")), enqueue(make_job(name="whole"))
    (torn.path / Document.QUEUE_ENTRY).write_text("{")
    assert main(["pool", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [run["id"] for run in shown["runs"]] == [whole.id]
    assert "cannot be read" in shown["troubles"][torn.id]


def test_runs_that_go_on_without_a_service_are_shown_as_they_are(own_home, capsys):
    run = enqueue(make_job())
    run.emit(StateChanged(state="planning"))
    assert main(["pool", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["phase"] == "starting"


def test_finished_run_cannot_be_withdrawn(own_home):
    run = enqueue(make_job())
    for state in ("planning", "running", "finished"):
        run.emit(StateChanged(state=state))
    queue.withdraw(run)
    assert read_entry(run).wish == "run"
    assert explain(own_home, run).standing == "finished"


def test_pool_comes_up_as_it_was_unless_something_is_said(own_home, capsys, monkeypatch):
    came: list[PoolSettings] = []

    def bring_up(home, settings):
        PoolStore(home).write_settings(settings)
        came.append(settings)
        return ServiceRecord(pid=1, process_started_at=0.0, host="here", began_at=0.0)

    monkeypatch.setattr("yunlu.scheduler.pool_view.bring_up", bring_up)
    assert main(["pool", "up", "--devices", "3", "--quota", "vision=2"]) == 0
    assert main(["pool", "up"]) == 0
    assert "as it was last: local://?devices=3" in capsys.readouterr().out
    assert came[1] == came[0]
    assert main(["pool", "up", "--policy", "fifo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "fifo"
    assert (came[2].executor, came[2].quotas) == ("local", {})
    PoolStore(own_home).settings.write_text("{")
    assert main(["pool", "up"]) == 0
    assert came[3] == PoolSettings(dollars_per_hour=came[3].dollars_per_hour)


def test_verbs_answer_in_json(own_home, capsys):
    run = enqueue(make_job())
    for words, expected in (
        (["priority", "last", "4"], {"priority": 4}),
        (["pool", "change", "last", "--max-devices", "2"], {"priority": 4, "wish": "run"}),
        (["pause", "last"], {"state": "stopped"}),
        (["stop", "last"], {"state": "stopped"}),
    ):
        assert main([*words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["run"] == run.id
        assert expected.items() <= told.items()
    assert main(["pool", "down", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"was_up": False, "stopped_jobs": False}


@pytest.mark.parametrize(
    ("modules", "strangers"),
    [
        ("yunlu.cli.pool", {"torch", "numpy", "scipy", "sqlalchemy"}),
        # A database that is locked cannot hold up what never opens it.
        ("yunlu.scheduler.service", {"torch", "sqlalchemy"}),
    ],
)
def test_verbs_start_at_once_and_the_service_needs_no_database(tmp_path, modules, strangers):
    code = f"import sys, {modules}\nprint(sorted({strangers} & set(sys.modules)))"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert told.stdout.strip() == "[]"
