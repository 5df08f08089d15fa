from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import nn

from yunlu.core.errors import DataError
from yunlu.spec.job import Job
from yunlu.testing.tasks import TaskContract
from yunlu.training.data.batches import sequential_batches
from yunlu.training.tasks.keyword_spotting import KeywordSpotting

RATE = 8000
TONES = {"low": 300, "high": 1500}
SMALL = {"name": "cnn", "args": {"channels": [4, 8]}}


def make_job(data: Any, model: Any = SMALL, **train: Any) -> Job:
    data = {"train": str(data)} if isinstance(data, (str, Path)) else data
    return Job.model_validate(
        {"task": "keyword-spotting", "model": model, "data": data, "train": train}
    )


def write_tones(folder: Path, *, each: int = 12, rate: int = RATE) -> Path:
    """Tones of 0.2 to 0.4 s with noise, in a folder per label."""
    rng = np.random.default_rng(0)
    for name, hertz in TONES.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            time = np.arange(int(rate * rng.uniform(0.2, 0.4))) / rate
            wave = 0.4 * np.sin(2 * np.pi * hertz * time) + rng.normal(0, 0.02, len(time))
            soundfile.write(folder / name / f"{number}.wav", wave, rate)
    return folder


def train(job: Job, *, steps: int) -> tuple[KeywordSpotting, nn.Module, list[float]]:
    """The smallest loop: the same batch again and again."""
    torch.manual_seed(0)
    task = KeywordSpotting()
    splits, model = task.load(job), task.build(job)
    batch = next(sequential_batches(splits.train, task.collate, micro_batch=32, workers=0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model.train(), batch)[0] / batch.items
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return task, model, losses


class TestContract(TaskContract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _folder(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.folder = write_tones(tmp_path_factory.mktemp("tones"))

    def make_task(self) -> KeywordSpotting:
        return KeywordSpotting()

    def make_job(self) -> Job:
        return make_job(self.folder)

    def make_inputs(self) -> list[str]:
        return [str(file) for file in sorted(self.folder.rglob("*.wav"))[:3]]


def test_tones_are_told_apart(tmp_path: Path) -> None:
    job = make_job(write_tones(tmp_path))
    task, model, losses = train(job, steps=25)
    splits = task.load(job)
    assert splits.test is not None
    scorer = task.scorer()
    model.eval()
    for batch in sequential_batches(splits.test, task.collate, micro_batch=8, workers=0):
        scorer.add(task.loss(model, batch)[1], batch)

    assert losses[-1] < 0.3 * losses[0]
    assert scorer.result().metrics["accuracy"] == 1.0
    assert splits.about["labels"] == ["high", "low"]
    assert splits.about["sample_rate"] == RATE


def test_sounds_of_different_lengths_become_one_length(tmp_path: Path) -> None:
    task = KeywordSpotting()
    splits = task.load(make_job({"train": str(write_tones(tmp_path)), "max_length": 30}))

    inputs = task.collate([splits.train[index] for index in range(len(splits.train))]).inputs

    lengths = {len(splits.train[index][0]) for index in range(len(splits.train))}
    assert min(lengths) < 30 < max(lengths)
    assert isinstance(inputs, tuple)
    assert inputs[0].shape == (len(splits.train), 1, 40, 30)


def test_one_very_long_sound_does_not_make_all_the_others_long(tmp_path: Path) -> None:
    folder = write_tones(tmp_path, each=60)
    soundfile.write(folder / "low" / "long.wav", np.zeros(RATE * 20), RATE)
    task = KeywordSpotting()

    task.load(make_job({"train": str(folder), "split": {"validation": 0, "test": 0}}))

    assert 35 <= task.length <= 42


def test_sounds_are_brought_to_the_rate_a_job_asks_for(tmp_path: Path) -> None:
    folder = write_tones(tmp_path, rate=16_000)
    task = KeywordSpotting()

    splits = task.load(make_job({"train": str(folder), "sample_rate": RATE}))

    assert splits.about["sample_rate"] == RATE
    assert 20 <= len(splits.train[0][0]) <= 42


def test_a_file_that_is_no_sound_stops_the_load_and_is_named(tmp_path: Path) -> None:
    folder = write_tones(tmp_path)
    (folder / "low" / "3.wav").write_bytes(b"hello")

    with pytest.raises(DataError, match=r"low/3\.wav cannot be read as sound"):
        KeywordSpotting().load(make_job(folder))


def test_the_exported_parts_tell_how_to_prepare_a_sound(tmp_path: Path) -> None:
    task, _, _ = train(make_job(write_tones(tmp_path / "data")), steps=1)

    task.save_artifacts(tmp_path)

    parts = json.loads((tmp_path / "preprocessing.json").read_text())
    assert parts["labels"] == ["high", "low"]
    assert (parts["sample_rate"], parts["hop"], parts["bands"]) == (RATE, 80, 40)
    assert len(parts["mean"]) == len(parts["deviation"]) == 40
    assert parts["length"] == task.length


def make_own(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def test_ones_own_module_gets_spectrograms(tmp_path: Path) -> None:
    _, _, losses = train(make_job(write_tones(tmp_path), f"{__file__}:make_own"), steps=10)

    assert losses[-1] < losses[0]


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_a_hugging_face_model_gets_the_wave(tmp_path: Path, norm: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(10, 8),
        conv_kernel=(20, 16),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        mask_time_prob=0.0,
        layerdrop=0.0,
        feat_extract_norm=norm,
        do_stable_layer_norm=norm == "layer",
    )
    config.save_pretrained(tmp_path / "wav2vec")
    model = {"name": f"hf:{tmp_path / 'wav2vec'}", "pretrained": False}

    task, built, losses = train(make_job(write_tones(tmp_path / "data", each=6), model), steps=12)

    assert losses[-1] < losses[0]
    assert built.config.id2label == {0: "high", 1: "low"}  # pyright: ignore[reportAttributeAccessIssue]
    inputs = task.collate([(torch.randn(3200), 0), (torch.randn(90_000), 1)]).inputs
    assert isinstance(inputs, dict)
    assert inputs["input_values"].shape == (2, task.length)
    assert ("attention_mask" in inputs) == (norm == "layer")
    if norm == "layer":
        assert inputs["attention_mask"].sum(dim=1).tolist() == [3200, task.length]
