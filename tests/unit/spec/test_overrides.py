"""``--set``: values land where they are sent, and mistakes name the flag."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.spec.load import InvalidJobError, apply_overrides, load_job
from yunlu.spec.source import SourceDocument

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("task: seq2seq\nmodel: mlp\ndata: d.csv\ntrain:\n  optimizer: sgd\n  clip: 2\n")
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(InvalidJobError) as caught:
        load_job(path, overrides=overrides)
    return [str(problem) for problem in caught.value.problems]


def test_overrides_reach_through_shorthands_and_keep_them(job_file):
    overrides = ["train.optimizer.lr=1e-1", "model.args.hidden=[64, 32]", "train.clip.value=3"]
    job = load_job(job_file, overrides=overrides)
    assert (job.train.optimizer.name, job.train.optimizer.lr) == ("sgd", 0.1)
    assert (job.model.name, job.model.args) == ("mlp", {"hidden": [64, 32]})
    assert (job.train.clip.norm, job.train.clip.value) == (2.0, 3.0)


def test_a_later_override_wins(job_file):
    job = load_job(job_file, overrides=["train.epochs=3", "train.epochs=5"])
    assert job.train.epochs == 5


def test_text_may_hold_equal_signs_and_quotes_keep_numbers_text(job_file):
    job = load_job(job_file, overrides=["data.train=s3://b/x?a=1", "data.target='1'"])
    assert (job.data.train, job.data.target) == ("s3://b/x?a=1", "1")


def test_an_empty_value_is_null(job_file):
    assert load_job(job_file, overrides=["train.clip.norm="]).train.clip.norm is None


def test_an_override_can_mend_the_file(job_file):
    job_file.write_text(job_file.read_text().replace("clip: 2", "clip: big"))
    assert load_job(job_file, overrides=["train.clip=1"]).train.clip.norm == 1


def test_mistakes_name_the_flag_instead_of_a_line(job_file):
    found = problems_of(
        job_file,
        "train.epoch=3",
        "train.optimizer.lr=fast",
        "train.optimzer.eps=1",
        "train.clip={norm: -1}",
    )
    assert any(
        problem.startswith("--set train.epoch: unknown key; did you mean 'epochs'?")
        for problem in found
    )
    assert "--set train.optimizer.lr: expected a number above 0 or 'auto', got 'fast'" in found
    assert any(
        problem.startswith(
            "--set train.optimzer.eps: train.optimzer: unknown key; did you mean 'opt"
        )
        for problem in found
    )
    assert (
        "--set train.clip: train.clip.norm: expected a number above 0 or 'adaptive', got -1"
        in found
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs", "--set train.epochs: expected KEY=VALUE, such as train.epochs=3"),
        ("=3", "--set =3: expected KEY=VALUE, such as train.epochs=3"),
        ("train..epochs=3", "--set train..epochs: expected KEY=VALUE, such as train.epochs=3"),
        ("train.l1=[1", "--set train.l1: not valid YAML: "),
        ("model.args={a: 1, a: 2}", "--set model.args: duplicate key"),
        ("task.name=x", "--set task.name: task is 'seq2seq', which has no keys; set it whole"),
    ],
)
def test_a_malformed_override_is_refused(job_file, override, expected):
    assert any(problem.startswith(expected) for problem in problems_of(job_file, override))


def test_the_line_of_an_untouched_neighbour_is_kept(job_file):
    job_file.write_text(job_file.read_text() + "  l1: x\n")
    assert problems_of(job_file, "train.optimizer.lr=1") == [
        "line 7, column 7: train.l1: expected a number of at least 0, got 'x'"
    ]


words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
sections = st.recursive(
    st.dictionaries(words, st.integers(), max_size=3),
    lambda inner: st.dictionaries(words, inner, max_size=3),
    max_leaves=4,
)


def as_yaml(value: Any) -> str:
    return json.dumps(value).replace("Infinity", ".inf")


@settings(deadline=None)
@given(
    sections, st.lists(words, min_size=1, max_size=4), values.filter(lambda v: "Inf" not in str(v))
)
def test_what_is_set_is_read_back_and_the_rest_stays(data, path, value):
    document = apply_overrides(SourceDocument(data=data), [f"{'.'.join(path)}={as_yaml(value)}"])
    if document.problems:  # a number stood in the way, and was left alone
        assert document.data == data
        return
    found: Any = document.data
    for key in path:
        found = found[key]
    assert found == value
    assert {k: v for k, v in document.data.items() if k != path[0]} == {
        k: v for k, v in data.items() if k != path[0]
    }
    again = apply_overrides(document, [f"{'.'.join(path)}={as_yaml(value)}"])
    assert again.data == document.data
