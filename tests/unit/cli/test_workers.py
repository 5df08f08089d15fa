"""Several workers of one run, as the command line shows them."""

import io
import json
import runpy
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from tests.sample_events import sample
from yunlu.cli.main import main
from yunlu.jobs import lifecycle
from yunlu.jobs.run_log import MetricRecord
from yunlu.render.terminal.run_display import LiveDisplay, PlainDisplay
from yunlu.runs.events import (
    ErrorRaised,
    PlanMade,
    StragglerSeen,
    WorkerGroupFormed,
    WorkerLost,
)
from yunlu.runs.run_store import Area

RUNS = runpy.run_path(str(Path(__file__).parents[1] / "jobs" / "test_worker_groups.py"))
TRACEBACK = "Traceback (most recent call last):\n  File loop.py, line 3\nValueError: no such label"


def group_formed(generation, layout, members, **data):
    ranks = [
        {
            "rank": rank,
            "worker": str(member),
            "host": f"node-{'ab'[member % 2]}",
            "pid": 10 + member,
        }
        for rank, member in enumerate(members)
    ]
    data = {"generation": generation, "layout": layout, "ranks": ranks, **data}
    return sample(WorkerGroupFormed, at=1000.0, **data)


def fault(what, member, **data):
    data = {"cause": what, "rank": member, "host": "node-b", "step": 120, **data}
    return WorkerLost(at=1000.0, worker=str(member), **data)


def story():
    yield group_formed(1, "dp2 x tp2", [0, 1, 2, 3], reason="start", from_step=0)
    yield fault("killed", 3)
    yield group_formed(2, "dp3", [0, 1, 2], reason="killed", from_step=120, lost_s=0.4)
    yield group_formed(3, "dp3", [0, 1, 4], from_step=130, redone_steps=2, lost_s=3.0)
    data = {"rank": 2, "worker": "4", "host": "node-a", "ratio": 1.84, "step": 140}
    yield StragglerSeen(at=1000.0, **data)
    data = {**data, "ratio": 1.0, "step": 150, "recovered": True}
    yield StragglerSeen(at=1000.0, **data)


def shown(happenings):
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=140))
    for happening in happenings:
        display.show(happening)
    return out.getvalue().splitlines()


@pytest.fixture
def run(own_home):
    """A run of several workers in the store, with a log of each."""
    run = RUNS["write_group_run"](own_home / "group-1")
    (run.path / Area.LOGS).mkdir()
    for member in range(5):
        (run.path / Area.LOGS / f"worker-{member}.log").write_text(
            f"first\nworker {member} says hello\n"
        )
    return lifecycle.find("group-1")


def test_a_fault_and_a_change_are_one_line_each():
    assert shown(story()) == [
        " workers     dp2 x tp2 · 4 workers · 2 hosts",
        " lost        worker 3 (rank 3 on node-b) was killed at step 120",
        " workers     dp2 x tp2 → dp3, 3 workers, from step 120; 400.0 ms lost, no sample lost  killed",
        " workers     still dp3, 3 workers, from step 130; 3.0 s lost, 2 steps again, no sample lost",
        " slow        step 140: the others wait for worker 4 (rank 2 on node-a), 1.8 × slower",
        " slow        step 150: worker 4 (rank 2 on node-a) keeps up again",
    ]


def test_the_first_failure_is_told_with_worker_and_traceback():
    failed = fault("failed", 2, detail="no such label\n(expected 3)")
    who = {key: getattr(failed, key) for key in ("rank", "worker", "host")}
    data = {"code": "training", "message": "no such label", "traceback": TRACEBACK, **who}
    lines = shown([failed, ErrorRaised(at=1000.0, **data)])
    assert lines == [
        " lost        worker 2 (rank 2 on node-b) failed at step 120: no such label",
        *(f"             {line}" for line in TRACEBACK.splitlines()),
    ]


def test_the_error_of_a_plain_worker_is_left_to_the_end():
    data = {"code": "training", "message": "no such label", "traceback": TRACEBACK}
    assert shown([ErrorRaised(at=1000.0, **data)]) == []


def test_the_bar_names_the_layout_and_the_workers():
    plan = sample(PlanMade, at=1.0, steps=200, best_metric="accuracy")
    step = MetricRecord(record={"step": 121, "at": 1001.0, "epoch": 2.0, "loss": 0.5, "samples": 9})
    happenings = [plan, *story(), step]
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=120))
    for happening in happenings:
        display.show(happening)
    moving = io.StringIO()
    Console(file=moving, width=120).print(display._moving())
    display.close()
    assert "step 121/200" in moving.getvalue()
    assert "dp3 · 3 workers" in moving.getvalue()
    assert "dp3 · 3 workers" in shown(happenings)[-1]


def test_ps_and_show_name_workers_and_layout(run, capsys):
    assert main(["ps"]) == 0
    assert "4 fsdp2 x tp2" in capsys.readouterr().out
    main(["ps", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert (listed["layout"], listed["workers"]) == ("fsdp2 x tp2", 4)
    assert main(["show", run.id]) == 0
    out = capsys.readouterr().out
    assert "workers: fsdp2 x tp2" in out
    assert "worker 3 (rank 3 on node-b) was killed at step 120" in out
    main(["show", run.id, "--json"])
    assert json.loads(capsys.readouterr().out)["worker_group"]["generation"] == 3


def test_ps_without_a_worker_group_has_no_column_for_it(own_home, capsys):
    RUNS["RUNS"]["write_classification"](own_home / "digits-1")
    assert main(["ps"]) == 0
    assert "workers" not in capsys.readouterr().out
    main(["ps", "--json"])
    assert json.loads(capsys.readouterr().out)["workers"] is None


@pytest.mark.parametrize(
    ("words", "member"),
    [
        (["--rank", "3"], 4),  # the newest layout: worker 3 is gone, worker 4 has its rank
        (["--worker", "3"], 3),
        (["--rank", "2", "--worker", "2"], 2),
        (["--rank", "0", "--follow"], 0),
    ],
)
def test_logs_of_one_worker(run, capsys, words, member):
    assert main(["logs", run.id, *words]) == 0
    assert capsys.readouterr().out == f"first\nworker {member} says hello\n"


def test_logs_of_one_worker_as_json_lines(run, capsys):
    assert main(["logs", run.id, "--rank", "3", "--json", "--lines", "1", "-f"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    text = "worker 4 says hello"
    assert line == {"event": "output", "run": run.id, "rank": 3, "text": text}


def test_logs_of_one_worker_are_cut_to_the_last_lines(run, capsys):
    assert main(["logs", run.id, "--rank", "1", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "worker 1 says hello\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "7"], "it has the ranks 0 to 3"),
        (["--rank", "0", "--worker", "2"], "rank 0 is worker 0, not 2"),
        (["--worker", "9"], "there are: 0, 1, 2, 3, 4"),
        (["--worker", "../../job"], "there are: 0, 1, 2, 3, 4"),
    ],
)
def test_a_worker_that_is_not_there_is_said_in_words(run, capsys, words, said):
    assert main(["logs", run.id, *words]) == 1
    assert said in capsys.readouterr().err


def test_a_plain_run_has_no_ranks(own_home, capsys):
    RUNS["RUNS"]["write_classification"](own_home / "digits-1")
    assert main(["logs", "digits-1", "--rank", "0"]) == 1
    assert "one worker trains it" in capsys.readouterr().err


def test_logs_show_the_worker_group_line_by_line(run, capsys):
    shutil.rmtree(run.path / Area.LOGS)
    assert main(["logs", run.id]) == 0
    out = capsys.readouterr().out
    assert "dp2 x tp2 · 4 workers" in out
    assert "dp2 x tp2 → dp3, 3 workers, from step 120; 400.0 ms lost" in out
    assert "was killed at step 120" in out
    assert "the others wait for worker 2" in out
