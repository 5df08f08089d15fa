"""Where fine-tuning starts, and what the start settles for the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from yunlu.core.errors import JobError, ModelError, StoreError, YunluError
from yunlu.jobs.job_input import find_base_model, finetuning_job
from yunlu.runs.events import StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, RunStore
from yunlu.runs.states import RunState
from yunlu.spec.load import InvalidJobError

JOB = "task: text-classification\ndata: mine.txt\n"


def write_model(directory: Path, *, task: str = "text-classification", **parts: Any) -> Path:
    directory.mkdir(parents=True)
    model = {"name": "transformer", "args": {"width": 64, "dropout": 0.1}}
    config = {"model": model, "class": "yunlu.training.models.transformer:TransformerClassifier"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "job.json").write_text(json.dumps({"task": task}))
    (directory / "preprocessing.json").write_text(json.dumps({"max_length": 17, **parts}))
    return directory


def write_run(home: Path, name: str, *, exported: bool = True) -> RunStore:
    run = open_run(home / name)
    run.path.mkdir(parents=True)
    job = {"task": "text-classification", "model": {"name": "transformer"}, "data": {"train": "x"}}
    (run.path / Document.JOB).write_text(json.dumps(job))
    run.emit(StateChanged(state=RunState.PENDING))
    run.emit(StateChanged(state=RunState.STOPPED))
    if exported:
        write_model(run.path / Area.MODEL)
    return run


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(JOB)
    return path


def test_a_job_without_a_model_takes_the_starts(own_home: Path, job: Path) -> None:
    run = write_run(own_home, "first-ab12cd")
    asked = finetuning_job("first", job)
    assert asked.model.name == "transformer"
    assert asked.model.args == {"width": 64, "dropout": 0.1}
    assert asked.model.weights == str(run.path / Area.MODEL)
    assert asked.data.max_length == 17
    assert asked.name == "mine"


def test_the_run_its_directory_and_its_model_are_the_same_start(own_home: Path) -> None:
    run = write_run(own_home, "first-ab12cd")
    assert (
        find_base_model("last")
        == find_base_model(run.path)
        == find_base_model(str(run.path / Area.MODEL))
    )


def test_an_adapter_and_arguments_may_be_said_besides(own_home: Path, tmp_path: Path) -> None:
    write_run(own_home, "first-ab12cd")
    job = tmp_path / "job.yaml"
    job.write_text(f"{JOB}model: {{adapter: {{rank: 4}}, args: {{dropout: 0.3}}}}\n")
    asked = finetuning_job("first", job, ["train.epochs=2", "data.max_length=12"])
    assert asked.model.adapter is not None
    assert asked.model.adapter.rank == 4
    assert asked.model.args == {"width": 64, "dropout": 0.3}
    assert asked.train.epochs == 2
    assert asked.data.max_length == 12


def test_python_needs_only_the_start_and_the_data(own_home: Path) -> None:
    write_run(own_home, "first-ab12cd")
    asked = finetuning_job("first", data="new.txt", adapter="lora", train_options={"lr": 0.01})
    assert asked.task == "text-classification"
    assert asked.data.train == "new.txt"
    assert asked.data.max_length == 17
    assert asked.model.adapter is not None
    assert asked.train.optimizer.lr == 0.01


def test_a_hugging_face_directory_is_named_as_one(tmp_path: Path, job: Path) -> None:
    directory = tmp_path / "bert"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "bert"}')
    for text in (directory, f"hf:{directory}"):
        asked = finetuning_job(str(text), job)
        assert asked.model.name == f"hf:{directory}"
        assert asked.model.weights is None
    assert finetuning_job("hf:org/name", job).model.name == "hf:org/name"


def test_how_images_and_tables_were_read_is_settled(tmp_path: Path) -> None:
    square = write_model(tmp_path / "square", height=8, width=8)
    assert find_base_model(square).data["image_size"] == 8
    table = write_model(tmp_path / "table")
    (table / "preprocessing.json").unlink()
    features = {"numeric": [{"name": "a"}], "categories": [{"name": "b"}], "left_out": ["id"]}
    (table / "tabular.json").write_text(json.dumps({"target": "y", "features": features}))
    assert find_base_model(table).data == {"target": "y", "input": ["a", "b"]}


@pytest.fixture
def no_starts(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and directories that cannot be started from, where a user would stand."""
    monkeypatch.chdir(tmp_path)
    write_run(own_home, "first-ab12cd")
    write_run(own_home, "rest-ab12cd", exported=False)
    Path("empty").mkdir()
    Path("torn").mkdir()
    Path("torn/config.json").write_text("{")
    write_model(Path("objects"), task="python:objects")


@pytest.mark.parametrize(
    ("start", "kind", "said"),
    [
        ("nosuch", StoreError, r"there is no run 'nosuch'.*\n.*first-ab12cd.*hf:NAME"),
        ("some/where", ModelError, r"There is no directory .*some/where"),
        ("rest", StoreError, r"rest-ab12cd has no exported model.*stopped.*\n.*yunlu resume"),
        ("empty", ModelError, r"no config.json"),
        ("torn", ModelError, r"config.json is not readable JSON"),
        ("objects", ModelError, r"live Python objects"),
    ],
)
def test_what_is_no_start_is_refused(
    start: str, kind: type[YunluError], said: str, no_starts: None, job: Path
) -> None:
    with pytest.raises(kind, match=said):
        finetuning_job(start, job)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: seq2seq\ndata: x\n", r"trained for text-classification, not for seq2seq"),
        (f"{JOB}model: mlp\n", r"model.name: the job says 'mlp'"),
        (f"{JOB}model: {{weights: other}}\n", r"model.weights: the job says 'other'"),
        (f"{JOB}model: {{pretrained: false}}\n", r"would forget the weights"),
    ],
)
def test_a_job_that_contradicts_its_start_is_refused(
    text: str, said: str, own_home: Path, tmp_path: Path
) -> None:
    write_run(own_home, "first-ab12cd")
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError, match=said):
        finetuning_job("first", path)


def test_other_faults_of_the_job_are_told_as_ever(own_home: Path, tmp_path: Path) -> None:
    write_run(own_home, "first-ab12cd")
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}train: {{epochz: 3}}\n")
    with pytest.raises(InvalidJobError, match="epochz") as caught:
        finetuning_job("first", path)
    assert len(caught.value.problems) == 1
