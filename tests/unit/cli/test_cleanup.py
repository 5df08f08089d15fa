"""``yunlu rm``, ``prune``, ``du``: the question, both languages, JSON; and ``--json`` of resize and join."""

import io
import json
import sys

import pytest
from rich.cells import cell_len

from tests.canned_runs import make_ended_run
from yunlu.cli import runs
from yunlu.cli.main import main
from yunlu.client.local import LocalClient
from yunlu.jobs.cleanup import KeepReason, RemovalReason
from yunlu.jobs.lifecycle import WorkerResize
from yunlu.jobs.run_view import JoinTarget
from yunlu.jobs.space import SpaceKind
from yunlu.render.i18n import text

SCORES = {10: {"accuracy": 0.7}, 20: {"accuracy": 0.9}}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def answer(monkeypatch):
    """What a person at a terminal types."""
    return lambda typed: monkeypatch.setattr(sys, "stdin", Terminal(typed))


@pytest.mark.parametrize(("typed", "is_gone"), [("y\n", True), ("\n", False), ("", False)])
def test_rm_asks_before_it_removes(own_home, capsys, answer, typed, is_gone):
    run = make_ended_run(state="finished", has_model=True)
    answer(typed)
    assert main(["rm", run.id[:-2]]) == 0
    out = capsys.readouterr().out
    assert run.id in out
    assert "no other run has a model named digits" in out
    assert "Remove 1, " in out
    assert "[y/N]" in out
    assert run.path.exists() is not is_gone
    assert ("removed 1, " if is_gone else "nothing was removed") in out


def test_several_runs_go_without_a_question(capsys):
    first, second = (make_ended_run(state="failed") for _ in range(2))
    assert main(["rm", first.id, second.id, "--yes", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [item["run"] for item in result["removed"]] == [first.id, second.id]
    assert result["bytes"] > 0
    assert main(["rm", first.id, "-y"]) == 1
    assert "there are no runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rm"], "no run is named"),
        (["rm", "last"], "there is no terminal to ask at"),
        (["prune", "--json"], "with --json nobody is asked"),
        (["prune", "--older", "soon", "--yes"], "'soon' is not a time"),
        (["rm", "nobody", "--yes"], "there is no run 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(capsys, monkeypatch, words, said):
    run = make_ended_run(state="failed")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(words) == 1
    err = capsys.readouterr().err
    assert said in err
    assert "→" in err
    assert run.path.exists()


def test_a_dry_run_removes_nothing(own_home, capsys):
    run = make_ended_run(state="finished", checkpoints=SCORES, has_model=True)
    assert main(["prune", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"{run.id} step 10" in out
    assert "2 would go, " in out
    assert "its model is exported" in out
    assert main(["prune", "--dry-run", "--keep-best", "--json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert item["path"].endswith("step-0000000010")
    assert len(run.names("checkpoints")) == 2
    assert main(["prune", "--yes"]) == 0
    assert "removed 2, " in capsys.readouterr().out
    assert main(["prune", "--yes"]) == 0
    assert f"nothing to remove in {own_home}" in capsys.readouterr().out


def test_what_stays_is_said_and_fails(capsys, monkeypatch):
    run = make_ended_run(state="failed")
    plan = LocalClient().plan_prune()
    monkeypatch.setattr(LocalClient, "plan_prune", lambda *_, **__: plan)
    with run.claim("worker.lock", wait=False):
        assert main(["prune", "--yes"]) == 1
        assert "its worker has not" in " ".join(capsys.readouterr().out.split())
        assert main(["prune", "--yes", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["skipped"]


def test_long_lists_are_cut_and_say_so(capsys):
    for _ in range(23):
        make_ended_run(state="failed")
    main(["prune", "--dry-run"])
    assert "and 3 more, " in capsys.readouterr().out
    main(["prune", "--dry-run", "--all"])
    assert capsys.readouterr().out.count("digits-") == 23
    main(["du"])
    assert "3 smaller runs: yunlu du --all" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["du"], ["prune", "--dry-run"], ["rm", "last", "--dry-run"]])
def test_chinese_is_spoken_where_it_is_asked_for(capsys, monkeypatch, words):
    make_ended_run(state="finished", checkpoints=SCORES, has_model=True)
    monkeypatch.setenv("YUNLU_LANG", "zh")
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "大小" in out
    assert " size" not in out


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("words", [["du"], ["prune", "--dry-run"]])
def test_tables_fit_a_terminal(capsys, monkeypatch, words, width):
    make_ended_run("a-name-that-is-rather-long-for-one", state="finished", checkpoints=SCORES,
                   has_model=True)  # fmt: skip
    monkeypatch.setattr("yunlu.render.terminal.page._PAGE", width)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(words) == 0
    out = capsys.readouterr().out
    assert max(map(cell_len, out.splitlines())) <= width


def test_du_prints_every_run_as_json(own_home, capsys):
    made = [make_ended_run(state="failed") for _ in range(22)]
    assert main(["du", "--json"]) == 0
    usage = json.loads(capsys.readouterr().out)
    assert {run["id"] for run in usage["runs"]} == {run.id for run in made}
    assert usage["bytes"] > 0
    assert usage["home"] == str(own_home)


@pytest.mark.parametrize(
    "key",
    [
        *(f"cleanup.reason.{reason}" for reason in RemovalReason.__args__),
        *(f"cleanup.keep.{reason}" for reason in KeepReason.__args__),
        *(f"space.kind.{kind}" for kind in SpaceKind.__args__),
    ],
)
def test_every_reason_has_its_words(key):
    assert text(key, by="x").zh


def test_resize_answers_in_json(capsys, monkeypatch):
    run = make_ended_run(state="failed")
    resized = WorkerResize(text="3 workers from now on", layout="dp3")
    monkeypatch.setattr(LocalClient, "resize", lambda *_, **__: resized)
    assert main(["resize", run.id, "--devices", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "run": run.id, "devices": 3, "text": "3 workers from now on", "layout": "dp3",
    }  # fmt: skip


def test_join_says_in_json_when_it_came_and_left(tmp_path, capsys, monkeypatch):
    (tmp_path / "token").write_text("t")
    target = JoinTarget(run="digits-1", dir="somewhere", node="here-7")
    monkeypatch.setattr(LocalClient, "find_group", lambda *_, **__: target)
    monkeypatch.setattr(LocalClient, "join", lambda *_, **__: 4)
    assert runs.join("host:1", token_file=tmp_path / "token", json=True, devices=2) == 4
    came, left = map(json.loads, capsys.readouterr().out.splitlines())
    assert (came["event"], came["node"], came["devices"]) == ("joined", "here-7", 2)
    assert (left["event"], left["run"], left["exit_code"]) == ("left", "digits-1", 4)
