"""The verbs around the job file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from yunlu.cli.main import main
from yunlu.spec.load import load_job
from yunlu.spec.schema import job_schema

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("task: tabular-classification\nmodel: mlp\ndata: sklearn:digits\n")


def test_a_valid_job_is_summed_up(capsys):
    overrides = ["--set", "model.args.hidden=[64]", "--set", "train.optimizer.lr=1e-2"]
    assert main(["validate", "job.yaml", *overrides]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    shown = {line[0]: line[1] for line in lines}
    assert shown["job.yaml"] == "is valid."
    assert shown["task"] == "tabular-classification"
    assert shown["model"] == "mlp (hidden [64])"
    assert shown["data"].startswith("sklearn:digits, 10 % held out for validation")
    assert shown["goal"].startswith("10 epochs, batch auto")
    assert shown["optimiser"] == "adamw (lr 0.01)"


def test_an_invalid_job_ends_with_one_and_all_its_problems(capsys):
    assert main(["validate", "job.yaml", "--set", "train.epoch=1", "--set", "train.l1=x"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: job.yaml: 2 problems\n")
    assert "--set train.epoch: unknown key; did you mean 'epochs'?" in shown


def test_json_lists_problems_with_their_places(capsys):
    Path("job.yaml").write_text("task: seq2seq\nmodel: m\ndata: d\ntrain:\n  batch: many\n")
    assert main(["validate", "job.yaml", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "valid": False,
        "problems": [
            {
                "file": "job.yaml",
                "line": 5,
                "column": 10,
                "key": "train.batch",
                "message": "expected a whole number above 0 or 'auto', got 'many'",
                "override": None,
            }
        ],
    }


def test_json_answers_for_valid_and_for_absent_files_too(capsys):
    assert main(["validate", "job.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "problems": []}
    assert main(["validate", "absent.yaml", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "There is no job file absent.yaml" in problem["message"]
    assert problem["line"] is None


def test_schema_prints_json_or_writes_a_file(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == job_schema()
    assert main(["schema", "-o", "s.json"]) == 0
    assert json.loads(Path("s.json").read_text()) == job_schema()


def test_schema_into_a_folder_that_is_not_there_is_a_clear_error(capsys):
    assert main(["schema", "-o", "no/such/s.json"]) == 1
    assert "Cannot write no/such/s.json" in capsys.readouterr().err


def test_init_writes_a_job_that_loads_and_says_what_is_next(capsys):
    assert main(["init", "text-classification", "reviews.tsv", "-o", "new.yaml"]) == 0
    assert load_job("new.yaml").data.train == "reviews.tsv"
    shown = capsys.readouterr().out
    assert "yunlu train new.yaml" in shown
    assert "reviews.tsv does not exist yet" in shown


def test_init_never_replaces_a_file_unless_forced(capsys):
    before = Path("job.yaml").read_text()
    assert main(["init", "seq2seq", "pairs.csv"]) == 1
    assert "--force" in capsys.readouterr().err
    assert Path("job.yaml").read_text() == before
    assert main(["init", "seq2seq", "pairs.csv", "--force"]) == 0
    assert load_job("job.yaml").task == "seq2seq"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["init", "seq2sec", "d"], "did you mean 'seq2seq'"),
        (["init", "seq2seq", "d", "-o", "job.txt"], "must end in .yaml"),
        (["init", "seq2seq", "d", "-o", "no/such/job.yaml"], "Cannot write"),
        (["init", "seq2seq", ""], "The data has no name"),
    ],
)
def test_init_refuses_what_it_cannot_write(capsys, command, expected):
    assert main(command) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path):
    assert main(["validate", str(path)]) == 0


def test_a_job_is_drafted_from_another_tools_file(capsys):
    Path("training_args.json").write_text('{"num_train_epochs": 3, "output_dir": "out"}')
    given = ["text-classification", "data.tsv", "--from", "training_args.json", "-o", "draft.yaml"]
    assert main(["init", *given]) == 0
    job = load_job("draft.yaml")
    assert (job.task, job.data.train, job.train.epochs) == ("text-classification", "data.tsv", 3)
    shown = capsys.readouterr().out
    assert "Not taken over: 1 setting, listed with reasons in the file." in shown
    assert "Next: yunlu validate draft.yaml" in shown


def test_a_draft_says_what_to_fill_in(capsys):
    Path("script.py").write_text("import torch\ntorch.manual_seed(3)\n")
    assert main(["init", "--from", "script.py", "-o", "draft.yaml"]) == 0
    assert "fill in task, model, data, then: yunlu validate draft.yaml" in capsys.readouterr().out
    assert main(["validate", "draft.yaml"]) == 1
    assert "unknown task 'TASK'" in capsys.readouterr().err


def test_init_without_anything_says_what_it_needs(capsys):
    assert main(["init"]) == 1
    assert "yunlu init --from trainer.py" in capsys.readouterr().err
