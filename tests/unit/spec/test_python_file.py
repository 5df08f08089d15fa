"""Jobs written in Python."""

from __future__ import annotations

import sys

import pytest

from yunlu.core.errors import JobError
from yunlu.spec.load import InvalidJobError, load_job

FILE = """\
from yunlu import Job
from yunlu.spec.train import TrainSpec

base = dict(task="seq2seq", model="mlp", data="d.csv")

def job():
    return Job(**base)

small = Job(**base, train=TrainSpec(steps=5))

def wrong():
    return Job(
        **base, train=TrainSpec(batch="many")
    )

def unknown_task():
    return Job(task="seq2sec", model="m", data="d")

def broken():
    return 1 / 0

def leaves():
    raise SystemExit("gone")

number = 3
"""


@pytest.fixture
def recipes(tmp_path):
    path = tmp_path / "recipes.py"
    path.write_text(FILE)
    return path


def test_the_function_called_job_is_the_default_and_the_file_names_it(recipes):
    assert load_job(recipes).name == "recipes"


def test_a_named_job_takes_overrides_like_yaml(recipes):
    job = load_job(f"{recipes}:small", overrides=["train.optimizer=sgd", "train.steps=7"])
    assert (job.name, job.train.steps, job.train.optimizer.name) == ("recipes-small", 7, "sgd")


def test_a_refused_section_is_told_in_words_with_the_line_that_made_it(recipes):
    with pytest.raises(InvalidJobError) as caught:
        load_job(f"{recipes}:wrong")
    (problem,) = caught.value.problems
    assert str(problem) == (
        "line 13: train.batch: expected a whole number above 0 or 'auto', got 'many'"
    )


def test_names_are_checked_as_in_yaml(recipes):
    with pytest.raises(InvalidJobError, match="did you mean 'seq2seq'"):
        load_job(f"{recipes}:unknown_task")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", "line 20: ZeroDivisionError: division by zero"),
        ("leaves", "line 23: SystemExit: gone"),
        ("number", "'number' is int; expected a yunlu.Job"),
        ("smal", "has no 'smal'; did you mean 'small'"),
    ],
)
def test_a_file_that_gives_no_job_is_told_why(recipes, name, expected):
    with pytest.raises(JobError) as caught:
        load_job(f"{recipes}:{name}")
    assert expected in caught.value.message


def test_a_syntax_error_has_its_line_and_column(tmp_path):
    path = tmp_path / "job.py"
    path.write_text("x = 1\njob = (\n")
    with pytest.raises(InvalidJobError, match=r"line 2, column 7: not valid Python"):
        load_job(path)


def test_the_file_may_import_its_neighbours_and_leaves_no_trace(tmp_path):
    (tmp_path / "neighbour_of_job.py").write_text("MODEL = 'mlp'\n")
    path = tmp_path / "job.py"
    path.write_text(
        "from neighbour_of_job import MODEL\nfrom yunlu import Job\n"
        "job = Job(task='seq2seq', model=MODEL, data='d')\n"
    )
    before = list(sys.path)
    assert load_job(path).model.name == "mlp"
    assert sys.path == before
    assert "yunlu_job_job" not in sys.modules
