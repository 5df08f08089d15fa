"""A model goes on from an earlier one: what fits is taken, what is new is said, the rest refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.unit.training import tiny_hf
from yunlu.core.errors import ModelError
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Log
from yunlu.spec.job import Job
from yunlu.spec.load import job_from_mapping
from yunlu.training.data.tokenizer import BpeTokenizer, ByteTokenizer, choose_tokenizer
from yunlu.training.export import ModelLineage, export
from yunlu.training.models.initial_weights import (
    WeightsOrigin,
    describe_base,
    load_initial_weights,
)
from yunlu.training.tasks.task import open_task

WORDS = ["fine", "poor", "grand", "dull", "bright", "sour"]
THINGS = ["lamp", "tent", "desk", "chair", "watch", "radio", "kettle", "phone"]


def write_texts(path: Path, labels: tuple[str, ...]) -> Path:
    rows = [
        f"{labels[place % len(labels)]}\tthe {thing} is {word}"
        for thing in THINGS
        for place, word in enumerate(WORDS)
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def job_of(source: Path | str, **parts: Any) -> Job:
    model = {"name": "transformer", "args": {"width": 16, "heads": 2, "layers": 1}}
    asked = {"task": "text-classification", "model": {**model, **parts.pop("model", {})}}
    return job_from_mapping(
        {**asked, "data": {"train": str(source), **parts.pop("data", {})}, **parts}
    )


def prepare(job: Job) -> tuple[Any, nn.Module, Any]:
    task = open_task(job.task)
    splits = task.load(job)
    torch.manual_seed(job.train.seed)
    return task, task.build(job), splits


def begin(job: Job) -> tuple[nn.Module, WeightsOrigin | None]:
    task, model, _ = prepare(job)
    return model, load_initial_weights(model, job, task)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """The model of a run for the labels bad and good, as it would be exported."""
    job = job_of(write_texts(tmp_path / "start.txt", ("good", "bad")))
    task, model, splits = prepare(job)
    run = open_run(tmp_path / "first-run")
    run.path.mkdir()
    (run.path / Log.EVENTS).touch()
    lineage = ModelLineage(splits=splits, environment={}, step=1, scores={})
    export(run, job, task, model, lineage)
    return run.path / Area.MODEL


def weights_of(directory: Path) -> dict[str, Any]:
    return load_file(directory / "model.safetensors")


def on(start: Path, tmp_path: Path, *labels: str, **parts: Any) -> Job:
    length = json.loads((start / "preprocessing.json").read_text())["max_length"]
    data = {"max_length": length, **parts.pop("data", {})}
    model = {"weights": str(start), **parts.pop("model", {})}
    return job_of(write_texts(tmp_path / "next.txt", labels), data=data, model=model, **parts)


def test_the_same_labels_take_every_weight(start: Path, tmp_path: Path) -> None:
    model, origin = begin(on(start, tmp_path, "bad", "good", train={"seed": 9}))
    assert origin is not None
    assert (origin.new, origin.labels) == ((), ())
    assert origin.taken == sum(weight.numel() for weight in model.parameters())
    assert "run first-run" in str(origin)
    for name, value in weights_of(start).items():
        assert torch.equal(model.state_dict()[name], value), name


def test_rows_of_the_head_follow_their_labels(start: Path, tmp_path: Path) -> None:
    """``a`` comes first now, and ``bad`` moves down a row: what it learned moves with it."""
    model, origin = begin(on(start, tmp_path, "a", "bad", "good", train={"seed": 9}))
    assert origin is not None
    assert origin.labels == ("a",)
    assert origin.new == ("head.weight", "head.bias")
    assert "new labels: a" in str(origin)
    stored, now = weights_of(start), model.state_dict()
    assert torch.equal(now["head.weight"][1:], stored["head.weight"])
    assert not torch.equal(now["head.weight"][0], stored["head.weight"][0])
    assert torch.equal(now["layers.0.feed.up.weight"], stored["layers.0.feed.up.weight"])


def test_other_labels_get_a_new_head_even_if_as_many(start: Path, tmp_path: Path) -> None:
    model, origin = begin(on(start, tmp_path, "yes", "no", train={"seed": 9}))
    assert origin is not None
    assert origin.labels == ("no", "yes")
    assert not torch.equal(model.state_dict()["head.weight"], weights_of(start)["head.weight"])


def test_the_tokenizer_of_the_start_is_used(start: Path, tmp_path: Path) -> None:
    job = on(start, tmp_path, "bad", "good")
    own = BpeTokenizer.read(start)
    found = choose_tokenizer(job.data, job.model, ["some other words"] * 9, small="bpe")
    text = "the lamp is fine"
    assert found.size == own.size
    assert found.encode_batch([text]) == own.encode_batch([text])
    assert found.decode(found.encode_batch([text])[0]) == text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"tokenizer": "bytes"}, r"trained with its own tokenizer \(bpe\), not 'bytes'"),
        ({"vocabulary": 999}, r"data.vocabulary: the tokenizer of .* tokens, not 999"),
    ],
)
def test_another_tokenizer_is_refused(
    data: dict[str, Any], said: str, start: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        prepare(on(start, tmp_path, "bad", "good", data=data))


def test_another_hugging_face_tokenizer_is_refused(start: Path, tmp_path: Path) -> None:
    tiny_hf.save_tokenizer(tmp_path / "other")
    job = on(start, tmp_path, "bad", "good", data={"tokenizer": str(tmp_path / "other")})
    with pytest.raises(ModelError, match="trained with its own tokenizer"):
        prepare(job)


def test_an_exported_byte_tokenizer_comes_back(tmp_path: Path) -> None:
    (tmp_path / "preprocessing.json").write_text('{"tokenizer": "bytes"}')
    job = job_of("x", model={"weights": str(tmp_path)})
    assert isinstance(choose_tokenizer(job.data, job.model, [], small="bpe"), ByteTokenizer)


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ({"args": {"width": 32, "heads": 2, "layers": 1}}, {}, r"embedding.token.weight is \(\d+, 16\) there"),
        ({}, {"max_length": 99}, r"embedding.position.weight is \(\d+, 16\) there and \(99, 16\)"),
        ({"args": {"width": 16, "heads": 2, "layers": 2}}, {}, r"belong to another model.*it lacks layers.1"),
    ],
)  # fmt: skip
def test_other_shapes_than_the_heads_are_refused_by_name(
    model: dict[str, Any], data: dict[str, Any], said: str, start: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        begin(on(start, tmp_path, "bad", "good", model=model, data=data))


def test_torn_or_absent_weights_are_refused(start: Path, tmp_path: Path) -> None:
    job = on(start, tmp_path, "bad", "good")
    path = start / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        begin(job)
    path.unlink()
    with pytest.raises(ModelError, match=r"holds no model.safetensors"):
        begin(job)


def test_weights_under_another_meaning_are_refused(start: Path, tmp_path: Path) -> None:
    path = start / "preprocessing.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad": 7}))
    with pytest.raises(ModelError, match="trained with another pad"):
        begin(on(start, tmp_path, "bad", "good"))


def test_an_adapter_beside_random_weights_is_refused(tmp_path: Path) -> None:
    job = job_of(write_texts(tmp_path / "t.txt", ("a", "b")), model={"adapter": "lora"})
    with pytest.raises(ModelError, match="would start from random weights"):
        begin(job)


def test_without_a_start_nothing_happens(tmp_path: Path) -> None:
    job = job_of(write_texts(tmp_path / "t.txt", ("a", "b")))
    task, model, _ = prepare(job)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_initial_weights(model, job, task) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert describe_base(job.model) is None


def test_an_adapted_model_is_exported_plain_with_the_adapter_beside_it(
    start: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    job = on(start, tmp_path, "bad", "good", "odd", model={"adapter": {"rank": 2}})
    task, model, splits = prepare(job)
    origin = load_initial_weights(model, job, task)
    assert origin is not None
    assert origin.trained == sum(w.numel() for w in model.parameters() if w.requires_grad)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1)
    batch = task.collate([splits.train[index] for index in range(4)])
    model.eval()
    with torch.no_grad():
        expected = model(*batch.inputs)
    run = open_run(tmp_path / "second-run")
    run.path.mkdir()
    lineage = ModelLineage(splits=splits, environment={}, step=3, scores={})
    names = export(run, job, task, model, lineage)
    assert {"adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= set(names)
    assert weights_of(run.path / Area.MODEL).keys() == weights_of(start).keys()
    card = (run.path / Area.MODEL / "README.md").read_text()
    assert "Fine-tuned from `run first-run` with lora (rank 2)" in card
    assert json.loads((run.path / Area.MODEL / "job.json").read_text())["model"]["weights"] == str(
        start
    )
    again, origin = begin(on(run.path / Area.MODEL, tmp_path, "bad", "good", "odd"))
    assert origin is not None
    assert origin.new == ()
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(*batch.inputs), expected, atol=1e-5, rtol=1e-5)


def test_a_hugging_face_start_says_which_weights_are_new(tmp_path: Path) -> None:
    directory = tiny_hf.save_bert(tmp_path / "bert", labels=2)
    texts = write_texts(tmp_path / "t.txt", ("a", "b", "c"))
    job = job_of(texts, model={"name": f"hf:{directory}", "args": {}})
    _, origin = begin(job)
    assert origin is not None
    assert origin.new == ("classifier.bias", "classifier.weight")
    assert origin.source == "bert"


def test_a_hugging_face_head_keeps_its_rows_with_their_labels(tmp_path: Path) -> None:
    directory = tiny_hf.save_bert(tmp_path / "bert", labels=2)
    config = json.loads((directory / "config.json").read_text())
    config |= {"id2label": {"0": "good", "1": "bad"}, "label2id": {"good": 0, "bad": 1}}
    (directory / "config.json").write_text(json.dumps(config))
    texts = write_texts(tmp_path / "t.txt", ("good", "bad"))
    model, origin = begin(job_of(texts, model={"name": f"hf:{directory}", "args": {}}))
    assert origin is not None
    assert origin.new == ()
    stored = weights_of(directory)["classifier.weight"]
    assert torch.equal(model.state_dict()["classifier.weight"], stored[[1, 0]])


@pytest.mark.parametrize(
    ("task", "model", "data", "kept"),
    [
        ("tabular-classification", "mlp", "sklearn:iris", "features"),
        ("tabular-regression", "mlp", "sklearn:diabetes", "std"),
        ("image-classification", "cnn", "sklearn:digits", "deviation"),
    ],
)
def test_trained_weights_keep_the_statistics_they_were_trained_with(
    task: str, model: str, data: str, kept: str, tmp_path: Path
) -> None:
    mapping = {"task": task, "model": model, "data": {"train": data}}
    job = job_from_mapping(mapping)
    first, net, splits = prepare(job)
    run = open_run(tmp_path / "run")
    run.path.mkdir()
    export(run, job, first, net, ModelLineage(splits=splits, environment={}, step=1, scores={}))
    fewer = {**mapping, "data": {"train": data, "limit": 90}, "train": {"seed": 4}}
    fresh = prepare(job_from_mapping(fewer))[0]
    again = job_from_mapping(
        {**fewer, "model": {"name": model, "weights": str(run.path / Area.MODEL)}}
    )
    second, other, _ = prepare(again)
    assert load_initial_weights(other, again, second) is not None

    def learned(task: Any, name: str) -> Any:
        directory = tmp_path / name
        directory.mkdir()
        task.save_artifacts(directory)
        (path,) = directory.iterdir()
        return json.loads(path.read_text())[kept]

    assert learned(second, "second") == learned(first, "first") != learned(fresh, "fresh")
