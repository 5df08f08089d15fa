"""Many processes at once, crashes at any moment: the store stays whole, or is rebuilt."""

import random
import sqlite3
import subprocess
import sys
import time

import pytest

from tests.waiting import LIMIT_S
from yunlu.core.errors import StoreError
from yunlu.jobs import lifecycle, run_index
from yunlu.jobs.run_index import SCHEMA, RunIndex
from yunlu.runs.states import RunState
from yunlu.spec.job import Job

SUBMIT = """
import sys
from yunlu.jobs import lifecycle
from yunlu.spec.job import Job
job = Job.model_validate({"task": "tabular-classification", "model": "mlp", "data": "synthetic:x"})
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[1])):
    run = lifecycle.submit(job.model_copy(update={"name": sys.argv[2]}))
    lifecycle.list_runs() if number % 10 == 9 else None
    print(run.id, flush=True)
"""


def start_submitter(count, name):
    return subprocess.Popen(
        [sys.executable, "-c", SUBMIT, str(count), name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def go(*processes):
    """Let processes that have imported everything start at the same moment."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def finish(process):
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    return out.split()


def check_integrity(home):
    connection = sqlite3.connect(home / "index.sqlite")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.slow
def test_two_processes_submit_fifty_runs_each_at_once(own_home):
    pair = [start_submitter(50, name) for name in ("one", "two")]
    go(*pair)
    submitted = {run_id for process in pair for run_id in finish(process)}
    assert len(submitted) == 100
    with RunIndex(own_home) as store:
        assert {record.id for record in store.records()} == submitted
    # Their submitters ended without starting a worker: that is noticed, once for each.
    assert {record.state for record in lifecycle.list_runs()} == {RunState.LOST}
    check_integrity(own_home)


@pytest.mark.slow
def test_killed_at_any_moment_the_store_opens_and_tells_the_truth(own_home):
    chance = random.Random(7)
    for _ in range(5):
        process = start_submitter(1000, "doomed")
        go(process)
        for _ in range(chance.randint(1, 6)):
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.03))  # somewhere inside the next submit
        process.kill()
        submitted = process.communicate(timeout=LIMIT_S)[0].split()
        records = {record.id: record for record in lifecycle.list_runs()}
        assert set(submitted) <= records.keys()
        for run_id in records:
            job = Job.model_validate_json((own_home / run_id / "job.json").read_bytes())
            assert job.name == "doomed"
        check_integrity(own_home)


@pytest.mark.slow
def test_index_deleted_under_two_writers_is_rebuilt_whole(own_home):
    pair = [start_submitter(15, name) for name in ("one", "two")]
    go(*pair)
    for _ in range(3):
        pair[0].stdout.readline()
        (own_home / "index.sqlite").unlink(missing_ok=True)
    for process in pair:
        finish(process)
    assert len(lifecycle.list_runs()) == 30
    with RunIndex(own_home) as store:
        assert len(store.records()) == 30
    check_integrity(own_home)


@pytest.mark.slow
def test_processes_that_open_a_new_store_at_once_migrate_it_once(own_home):
    many = [start_submitter(1, f"run{number}") for number in range(4)]
    go(*many)
    for process in many:
        finish(process)
    connection = sqlite3.connect(own_home / "index.sqlite")
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
    assert connection.execute("SELECT count(*) FROM runs").fetchone() == (4,)
    connection.close()


def test_crash_while_the_table_is_made_leaves_it_to_the_next(own_home, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(run_index, "_MAKE", (*run_index._MAKE[:-1], "CREATE TABLE runs (id)"))
        patched.setattr(run_index, "_PAUSES_S", ())
        with pytest.raises(StoreError, match="already exists"):
            RunIndex(own_home)
    with RunIndex(own_home) as store:
        assert store.records() == []
