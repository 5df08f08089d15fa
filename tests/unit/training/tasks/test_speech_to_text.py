from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor, nn

from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import Job
from yunlu.testing.tasks import TaskContract
from yunlu.training.data.batches import sequential_batches
from yunlu.training.tasks.speech_to_text import SpeechToText

RATE = 8000
TONES = {"a": 300, "b": 900, "c": 2000, " ": 0}
SMALL = {"name": "conv-gru", "args": {"hidden": 24, "dropout": 0.0}}
ALL = {"validation": 0, "test": 0}


def make_job(data: Any, model: Any = SMALL, **train: Any) -> Job:
    data = {"train": str(data)} if isinstance(data, (str, Path)) else data
    return Job.model_validate(
        {"task": "speech-to-text", "model": model, "data": data, "train": train}
    )


def speak(text: str, rng: np.random.Generator) -> np.ndarray:
    """A tone of 0.15 s for each letter, with gaps: a language of beeps."""
    time = np.arange(int(0.15 * RATE)) / RATE
    tones = [0.4 * np.sin(2 * np.pi * TONES[letter] * time) for letter in text]
    gap = np.zeros(int(0.03 * RATE))
    wave = np.concatenate([gap, *(part for tone in tones for part in (tone, gap))])
    return wave + rng.normal(0, 0.01, len(wave))


def write_speech(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lines = ["file\ttext"]
    for number, text in enumerate(texts):
        soundfile.write(folder / f"{number}.wav", speak(text.lower(), rng), RATE)
        lines.append(f"{number}.wav\t{text}")
    (folder / "transcripts.tsv").write_text("\n".join(lines) + "\n")
    return folder


def random_texts(count: int) -> list[str]:
    rng = np.random.default_rng(1)
    return [
        "".join(rng.choice(list("abc"), size=int(rng.integers(2, 6)))) for _ in range(count - 1)
    ] + ["a bc"]


def train(
    job: Job, *, epochs: int, lr: float = 1e-2
) -> tuple[SpeechToText, nn.Module, list[float]]:
    torch.manual_seed(0)
    task = SpeechToText()
    splits, model = task.load(job), task.build(job)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses: list[float] = []
    for _ in range(epochs):
        for batch in sequential_batches(splits.train, task.collate, micro_batch=16, workers=0):
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
        cls.folder = write_speech(tmp_path_factory.mktemp("speech"), random_texts(24))

    def make_task(self) -> SpeechToText:
        return SpeechToText()

    def make_job(self) -> Job:
        return make_job(self.folder)

    def make_inputs(self) -> list[str]:
        return [str(file) for file in sorted(self.folder.rglob("*.wav"))[:3]]


def test_a_language_of_beeps_is_learned(tmp_path: Path) -> None:
    job = make_job(write_speech(tmp_path, random_texts(60)))
    task, model, _ = train(job, epochs=25)
    splits = task.load(job)
    assert splits.test is not None
    scorer = task.scorer()
    model.eval()
    with torch.no_grad():
        for batch in sequential_batches(splits.test, task.collate, micro_batch=8, workers=0):
            scorer.add(task.loss(model, batch)[1], batch)

    found = scorer.result()
    assert found.metrics["cer"] <= 0.1
    assert found.examples[0].input.endswith(".wav")
    assert set("abc") <= set(splits.about["characters"]) <= set(" abc")


def test_the_loss_counts_characters(tmp_path: Path) -> None:
    folder = write_speech(tmp_path, ["abc", "AB", "ca"])
    task = SpeechToText()
    splits = task.load(make_job({"train": str(folder), "split": ALL}))

    batch = task.collate([splits.train[index] for index in range(3)])

    assert (batch.samples, batch.items) == (3, 7)
    assert batch.targets["texts"] == ["abc", "ab", "ca"]


def test_the_loss_is_that_of_all_alignments_added_up(tmp_path: Path) -> None:
    """Two frames and one character: aa, a-, -a are the ways to say it."""
    folder = write_speech(tmp_path, ["a", "b"])
    task = SpeechToText()
    splits = task.load(make_job({"train": str(folder), "split": ALL}))
    scores = torch.randn(1, 2, 3)
    batch = task.collate([splits.train[0]])

    loss, _ = task.loss(Fixed(scores), batch)

    blank, a, _ = scores[0].softmax(dim=1).T
    shares = a[0] * a[1] + a[0] * blank[1] + blank[0] * a[1]
    torch.testing.assert_close(loss, -shares.log())


class Fixed(nn.Module):
    """Answers always the same."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return self.scores.expand(len(frames), -1, -1)


def test_sounds_too_short_for_their_text_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_speech(tmp_path, ["abc", "ab", "ca"])
    soundfile.write(folder / "1.wav", np.zeros(400), RATE)  # 6 frames: 2 scores, for "bb" 3 needed
    (folder / "transcripts.tsv").write_text("file\ttext\n0.wav\tabc\n1.wav\tbb\n2.wav\tca\n")
    job = make_job({"train": str(folder), "split": ALL})

    with caplog.at_level(logging.WARNING):
        splits = SpeechToText().load(job)

    assert [splits.train[index][1] for index in range(len(splits.train))] == ["abc", "ca"]
    assert splits.about["excluded, too short for their text"] == 1
    assert "excluded 1 of 3 utterances" in caplog.text


def test_sounds_longer_than_the_job_allows_are_left_out_of_training(tmp_path: Path) -> None:
    folder = write_speech(tmp_path, ["ab", "abcabc"])

    splits = SpeechToText().load(make_job({"train": str(folder), "split": ALL, "max_length": 60}))

    assert len(splits.train) == 1
    assert splits.about["excluded, too long"] == 1


def test_data_of_which_nothing_can_be_learned_is_refused(tmp_path: Path) -> None:
    folder = write_speech(tmp_path, ["ab", "ba"])
    data = {"train": str(folder), "split": ALL, "max_length": 1}

    with pytest.raises(DataError, match="no utterance can be learned"):
        SpeechToText().load(make_job(data))


def test_an_evaluated_text_longer_than_its_sound_has_a_finite_loss(tmp_path: Path) -> None:
    folder = write_speech(tmp_path / "train", ["ab", "bc"])
    other = write_speech(tmp_path / "test", ["ab"])
    soundfile.write(other / "0.wav", np.zeros(100), RATE)
    job = make_job({"train": str(folder), "test": str(other), "split": ALL})
    task = SpeechToText()
    splits = task.load(job)
    assert splits.test is not None

    loss, _ = task.loss(task.build(job), task.collate([splits.test[0]]))

    assert float(loss.detach()) == 0.0


def test_transcripts_that_look_like_numbers_are_texts(tmp_path: Path) -> None:
    folder = write_speech(tmp_path, ["a", "b"])
    (folder / "transcripts.tsv").write_text("file\ttext\n0.wav\t42\n1.wav\t7\n")

    splits = SpeechToText().load(make_job({"train": str(folder), "split": ALL}))

    assert [splits.train[index][1] for index in range(2)] == ["42", "7"]


def test_the_exported_parts_tell_how_to_read_the_scores(tmp_path: Path) -> None:
    job = make_job({"train": str(write_speech(tmp_path, ["ab", "bc"])), "split": ALL})
    task, _, _ = train(job, epochs=1)

    task.save_artifacts(tmp_path)

    parts = json.loads((tmp_path / "preprocessing.json").read_text())
    assert parts["characters"] == {"1": "a", "2": "b", "3": "c"}
    assert (parts["blank"], parts["sample_rate"]) == (0, RATE)


class PerFrame(nn.Module):
    """A score per frame, one frame at a time."""

    def __init__(self, features: int, symbols: int) -> None:
        super().__init__()
        self.score = nn.Linear(features, symbols)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return self.score(frames)


def test_ones_own_module_gets_frames_and_lengths(tmp_path: Path) -> None:
    job = make_job(write_speech(tmp_path, random_texts(20)), f"{__file__}:PerFrame")

    _, _, losses = train(job, epochs=5)

    assert losses[-1] < losses[0]


def test_a_model_with_scores_for_other_characters_is_refused(tmp_path: Path) -> None:
    folder = write_speech(tmp_path, ["ab", "bc"])
    task = SpeechToText()
    splits = task.load(make_job({"train": str(folder), "split": ALL}))

    with pytest.raises(ModelError, match=r"\(1, 9, 5\).*\(1, frames, 4\) was expected"):
        task.loss(Fixed(torch.zeros(1, 9, 5)), task.collate([splits.train[0]]))


@pytest.fixture
def wav2vec(tmp_path: Path) -> Path:
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
        mask_time_prob=0.0,
        layerdrop=0.0,
        vocab_size=6,
        pad_token_id=0,
    )
    transformers.Wav2Vec2ForCTC(config).save_pretrained(tmp_path / "wav2vec")
    return tmp_path / "wav2vec"


def test_a_hugging_face_model_learns_the_characters_of_the_texts(
    tmp_path: Path, wav2vec: Path
) -> None:
    data = {"train": str(write_speech(tmp_path / "data", random_texts(20))), "sample_rate": RATE}
    model = {"name": f"hf:{wav2vec}", "pretrained": False}

    _, built, losses = train(make_job(data, model), epochs=5, lr=3e-3)

    assert losses[-1] < losses[0]
    assert built.config.vocab_size == 5  # pyright: ignore[reportAttributeAccessIssue]


def test_pretrained_weights_keep_the_characters_they_came_with(
    tmp_path: Path, wav2vec: Path
) -> None:
    vocabulary = {"<pad>": 0, "<unk>": 1, "|": 2, "A": 3, "B": 4, "C": 5}
    (wav2vec / "vocab.json").write_text(json.dumps(vocabulary))
    data = {"train": str(write_speech(tmp_path / "data", random_texts(20))), "sample_rate": RATE}

    task, built, losses = train(make_job(data, f"hf:{wav2vec}"), epochs=3, lr=3e-3)

    assert losses[-1] < losses[0]
    assert built.config.vocab_size == 6  # pyright: ignore[reportAttributeAccessIssue]
    assert task.characters.encode("a b") == [3, 2, 4]


def test_sounds_know_their_lengths_while_all_are_kept(tmp_path: Path) -> None:
    folder = write_speech(tmp_path / "speech", random_texts(12))
    task = SpeechToText()
    splits = task.load(make_job({"train": str(folder), "split": ALL}))
    train: Any = splits.train
    train.rows = train.rows[::2]
    assert train.lengths.tolist() == [len(train[index][0]) for index in range(len(train))]
    batch = task.collate([train[index] for index in range(3)])
    assert batch.tokens == 3 * max(train.lengths[:3])
    assert batch.padding == batch.tokens - sum(train.lengths[:3])
    train.sounds.cached.pop()
    assert train.lengths is None, "the others would have to be read first"
