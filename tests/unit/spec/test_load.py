"""Reading jobs: what works as it stands, and what is said when it does not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.core.errors import JobError
from yunlu.spec.job import SHORTHANDS, Job
from yunlu.spec.load import InvalidJobError, job_from_mapping, load_job

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
task: tabular-classification
model: mlp
data: sklearn:digits
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "bad.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(InvalidJobError) as caught:
        load_job(path, overrides=overrides)
    return [str(problem) for problem in caught.value.problems]


def test_three_lines_are_a_job_and_the_file_names_it(write):
    job = load_job(write(GOOD, "first try!.yaml"))
    assert job == Job(
        name="first-try",
        task="tabular-classification",
        model={"name": "mlp"},
        data={"train": "sklearn:digits"},
    )


def test_a_file_name_without_latin_letters_still_names_the_job(write):
    assert load_job(write(GOOD, "数字.yaml")).name == "job"


def test_a_name_in_the_file_wins(write):
    assert load_job(write(GOOD + "name: mine\n")).name == "mine"


def test_numbers_in_exponent_form_are_numbers_everywhere(write):
    text = "task: a:B\nmodel: {name: mlp, args: {dropout: 1e-3}}\ndata: d\n"
    job = load_job(write(text + "train: {steps: 1e3, optimizer: {lr: 1e-3, eps: 1E-8}}\n"))
    assert job.model.args == {"dropout": 1e-3}
    assert (job.train.steps, job.train.optimizer.lr, job.train.optimizer.eps) == (1000, 1e-3, 1e-8)


def test_words_that_older_yaml_turns_into_switches_and_dates_stay_text(write):
    text = "task: a:B\nmodel: {name: mlp, args: {a: no, b: 2024-01-02, c: 1:30}}\ndata: d\n"
    assert load_job(write(text)).model.args == {"a": "no", "b": "2024-01-02", "c": "1:30"}


def test_json_with_tabs_and_rare_characters_loads(write):
    data = {"task": "seq2seq", "model": "mlp", "data": {"train": "火\U0001f525.csv"}}
    job = load_job(write(json.dumps(data, indent="\t"), "job.json"))
    assert job.data.train == "火\U0001f525.csv"


def test_anchors_and_merged_mappings_work_and_own_keys_win(write):
    text = GOOD + "train:\n  optimizer: &o {lr: 0.1, eps: 1e-3}\n  schedule: cosine\n"
    text = text.replace(
        "model: mlp", "model:\n  name: mlp\n  args: {a: &b {x: 1, y: 2}, c: {<<: *b, y: 3}}"
    )
    assert load_job(write(text)).model.args == {"a": {"x": 1, "y": 2}, "c": {"x": 1, "y": 3}}


def test_every_problem_is_told_at_once_with_its_line_and_column(write):
    path = write(
        "task: tabular-classification\n"
        "model: mlp\n"
        "data: sklearn:digits\n"
        "train:\n"
        "  epoch: 3\n"
        "  schedule: cosine\n"
        "  batch: many\n"
    )
    with pytest.raises(InvalidJobError) as caught:
        load_job(path)
    lines = caught.value.message.splitlines()
    assert lines[0] == f"{path}: 2 problems"
    assert lines[1].startswith(
        "  line 5, column 3: train.epoch: unknown key; did you mean 'epochs'? ("
    )
    assert lines[2] == (
        "  line 7, column 10: train.batch: expected a whole number above 0 or 'auto', got 'many'"
    )
    first = caught.value.problems[0]
    assert (first.line, first.column, first.key) == (5, 3, "train.epoch")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("epochs: true", "epochs: expected a number above 0, got true"),
        ("epochs: .inf", "epochs: expected a number above 0, got inf"),
        ("steps: 1.5", "steps: expected a whole number above 0, got 1.5"),
        ("l1: -1", "l1: expected a number of at least 0, got -1"),
        ("ema: 1", "ema: expected a number of at least 0 and below 1, got 1"),
        ("seed: -1", "seed: expected a whole number of at least 0 and below 4294967296, got -1"),
        ("workers: few", "workers: expected a whole number of at least 0 or 'auto', got 'few'"),
        ("deterministic: maybe", "deterministic: expected true or false, got 'maybe'"),
        ("compile: [1]", "compile: expected true, false, 'auto' or 'xla', got [1]"),
        (
            "evaluate: epochs",
            "evaluate: expected a whole number above 0, 'epoch' or 'never', got 'epochs'"
            + "; did you mean 'epoch'?",
        ),
        (
            "precision: bf61",
            "precision: expected one of 'auto', 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8', got 'bf61'"
            + "; did you mean 'bf16'?",
        ),
        ("clip: [1]", "clip: expected a number above 0, 'adaptive' or a mapping, got [1]"),
        ("early_stopping: true", "early_stopping: expected a whole number above 0, got true"),
        (
            "optimizer: {betas: [0.9, 2]}",
            "optimizer.betas[1]: expected a number of at least 0 and below 1, got 2",
        ),
        (
            "optimizer: {betas: 0.9}",
            "optimizer.betas: expected a list of 2 values, each a number of at least 0 and below 1"
            + ", got 0.9",
        ),
        (
            "optimizer:",
            "optimizer: expected 'adam', 'adamw', 'lamb', 'lars', 'momentum', 'sgd' or a mapping, got nothing",
        ),
    ],
)
def test_a_wrong_value_is_told_in_words_once(write, line, expected):
    found = problems_of(write(f"{GOOD}train:\n  {line}\n"))
    assert [problem.split(": ", 1)[1] for problem in found] == [f"train.{expected}"]


def test_a_misspelt_shorthand_points_at_its_value_and_suggests(write):
    (problem,) = problems_of(write(f"{GOOD}train:\n  optimizer: adamm\n"))
    assert problem.startswith("line 5, column 14: train.optimizer: expected one of 'adam'")
    assert problem.endswith("got 'adamm'; did you mean 'adam' or 'adamw'?")


def test_missing_keys_point_at_their_mapping_and_are_named_together(write):
    assert problems_of(write("# a comment\nmodel:\n  args: {}\n")) == [
        "line 2, column 1: missing required keys 'task' and 'data'",
        "line 3, column 3: model: missing required key 'name'",
    ]


def test_a_misspelt_key_is_not_also_called_missing(write):
    (problem,) = problems_of(write(GOOD.replace("model", "modle")))
    assert problem.startswith("line 2, column 1: modle: unknown key; did you mean 'model'?")


def test_a_key_in_the_wrong_section_is_sent_home(write):
    assert problems_of(write(GOOD + "label_smoothing: 0.1\nlr: 1\n")) == [
        "line 4, column 1: label_smoothing: unknown key here; it belongs at train.label_smoothing",
        "line 5, column 1: lr: unknown key here; it belongs at train.optimizer.lr",
    ]


def test_contradicting_keys_point_at_one_of_them(write):
    assert problems_of(write(f"{GOOD}train:\n  epochs: 1\n  steps: 5\n")) == [
        "line 6, column 3: train.steps: set either epochs or steps, not both"
    ]
    assert problems_of(write(GOOD + "train: {evaluate: never, early_stopping: 3}\n")) == [
        "line 4, column 26: train.early_stopping: needs evaluations, but evaluate is 'never'"
    ]
    split = "data: {train: d, split: {validation: 0.5, test: 0.5}}"
    assert problems_of(write(GOOD.replace("data: sklearn:digits", split))) == [
        "line 3, column 43: data.split.test: validation and test together leave nothing to train on"
    ]


def test_an_unknown_task_or_tracker_suggests_the_nearest(write):
    text = GOOD.replace("tabular-classification", "language-modelling")
    task, tracker = problems_of(write(text + "trackers: [mlflow, wandbb]\n"))
    assert task.startswith(
        "line 1, column 7: task: unknown task 'language-modelling'; did you mean 'language-modeling'?"
    )
    assert tracker.startswith(
        "line 4, column 20: trackers[1]: unknown tracker 'wandbb'; did you mean 'wandb'?"
    )


def test_own_code_is_taken_on_trust_and_never_imported(write):
    job = load_job(write("task: no.such.module:Task\nmodel: m\ndata: d\ntrackers: ['a.b:C']\n"))
    assert (job.task, job.trackers) == ("no.such.module:Task", ["a.b:C"])


def test_a_duplicate_key_is_a_problem_beside_the_others(write):
    assert problems_of(write(f"{GOOD}train:\n  seed: 1\n  l1: x\n  seed: 2\n")) == [
        "line 6, column 7: train.l1: expected a number of at least 0, got 'x'",
        "line 7, column 3: train.seed: duplicate key; first defined on line 5",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("task: [a\n", "line 2, column 1: not valid YAML: "),
        ("task: a\n\tmodel: b\n", "line 2, column 1: not valid YAML: a tab; indent with spaces"),
        ("task: a\nmodel: \x07\n", "line 2, column 8: the character '\\x07' is not allowed"),
        ("task: a\n---\ntask: b\n", "line 2, column 1: not valid YAML: "),
        ("- task\n", "line 1, column 1: expected a mapping with task, model and data, got ["),
        ("[" * 1200, "nested too deeply"),
        ("task: !!python/object/apply:os.getcwd []\n", "line 1, column 7: task: expected text"),
        ("task: !secret x\n", "line 1, column 7: task: the tag '!secret' is not allowed here"),
        ("? [a]\n: b\n", "line 1, column 3: a key must be a word"),
        ("task: &a [*a]\n", "line 1, column 7: task[0]: refers to itself"),
        ("train: &a {<<: *a}\n", "line 1, column 8: train: refers to itself"),
        (f"task: {'9' * 5000}\n", "line 1, column 7: task: '99999999999999999999' is not a number"),
    ],
)
def test_text_that_is_no_job_is_refused_with_its_place(write, text, expected):
    assert any(problem.startswith(expected) for problem in problems_of(write(text)))


def test_aliases_that_multiply_without_end_are_stopped(write):
    lines = ["a: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"b{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert any(
        "more than 100,000 values" in problem for problem in problems_of(write("\n".join(lines)))
    )


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.yaml", None, "There is no job file"),
        ("empty.yaml", b"", "is empty"),
        ("comment.yaml", b"# nothing\n", "is empty"),
        ("data.csv", b"a,b\n", "is not a job file"),
        ("latin.yaml", "task: café\n".encode("latin-1"), "is not UTF-8"),
        ("absent.py", None, "There is no job file"),
    ],
)
def test_a_file_that_cannot_be_a_job_is_named(tmp_path, name, content, expected):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError, match=expected) as caught:
        load_job(path)
    assert str(path) in caught.value.message


def test_a_directory_is_not_a_job(tmp_path):
    with pytest.raises(JobError, match="is a directory"):
        load_job(tmp_path)


def test_paths_beside_the_job_are_found_from_elsewhere(tmp_path, monkeypatch, write):
    folder, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    for name in ("here.csv", "net.keras", "encoder", "both.csv"):
        (folder / name).mkdir(parents=True)
    (elsewhere / "both.csv").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    data = {"train": "here.csv", "validation": "both.csv", "test": "absent.csv"}
    data["tokenizer"] = "encoder"
    path = folder / "job.yaml"
    path.write_text(json.dumps({"task": "seq2seq", "model": "net.keras", "data": data}))
    job = load_job(path)
    assert job.data.train == str(folder / "here.csv")
    assert job.data.validation == "both.csv"
    assert job.data.test == "absent.csv"
    assert job.data.tokenizer == str(folder / "encoder")
    assert job.model.name == str(folder / "net.keras")
    job = load_job(path, overrides=["model=hf:encoder", "data=sklearn:digits"])
    assert job.model.name == f"hf:{folder / 'encoder'}"
    assert job.data.train == "sklearn:digits"


def test_a_mapping_gets_the_same_words_without_lines():
    with pytest.raises(InvalidJobError) as caught:
        job_from_mapping({"task": "seq2seq", "model": "m", "data": "d", "train": {"epoch": 1}})
    assert caught.value.message.startswith(
        "job: 1 problem\n  train.epoch: unknown key; did you mean 'epochs'?"
    )
    assert caught.value.problems[0].line is None


def test_a_mapping_with_keys_that_are_not_words_is_refused():
    mapping: dict[Any, Any] = {"task": "seq2seq", "model": "m", "data": "d", 1: 2}
    with pytest.raises(InvalidJobError, match="unknown key"):
        job_from_mapping(mapping)


_NAMED = {"optimizer": "sgd", "schedule": "wsd", "adapter": "lora", "stop": "asha"}


@pytest.mark.parametrize("path", SHORTHANDS)
def test_a_bare_value_means_the_same_as_the_mapping_it_stands_for(path):
    bare: Any = {"norm": 0.5, "patience": 3, "every": 10, "max": 64}.get(SHORTHANDS[path])
    bare = bare or _NAMED.get(path[-1], "thing")

    def job(value: Any) -> Job:
        data: dict[str, Any] = {"task": "seq2seq", "model": "m", "data": "d", "train": {}}
        if path[:-1] == ("model",):
            data["model"] = {"name": "m"}
        data["search"] = {"space": {"train.batch": [8]}}
        section = data[path[0]] if len(path) > 1 else data
        section[path[-1]] = value
        return job_from_mapping(data)

    assert job(bare) == job({SHORTHANDS[path]: bare})


def test_null_turns_clipping_off():
    data = {"task": "seq2seq", "model": "m", "data": "d", "train": {"clip": None}}
    assert job_from_mapping(data).train.clip.norm is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
known_keys = st.sampled_from(["model", "data", "train", "name", "args", "optimizer", "lr"])


@settings(deadline=None)
@given(st.dictionaries(known_keys | st.text(max_size=8), json_values, max_size=6))
def test_any_wrong_mapping_gives_one_clear_error(mapping):
    with pytest.raises(InvalidJobError) as caught:
        job_from_mapping(mapping)
    assert caught.value.problems
    assert "pydantic" not in caught.value.message
