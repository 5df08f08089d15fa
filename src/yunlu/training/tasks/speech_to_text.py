"""Speech recognition by characters with connectionist temporal classification (CTC).

The model gives logits for every frame, over the characters and a blank; CTC (Graves et al., 2006) sums
over all alignments of the text with the frames.
"""

from __future__ import annotations

import json
import logging
import math
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from yunlu.core.errors import DataError, ModelError
from yunlu.core.limits import read_json
from yunlu.training.data.audio import (
    FRAMES_PER_SECOND,
    AudioFeatures,
    LogMelFrontEnd,
    WaveformFrontEnd,
)
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import FileRef, find_column
from yunlu.training.device import is_accelerator
from yunlu.training.models.build import build_model, check_call
from yunlu.training.models.hf import find_hf_directory, names_hf
from yunlu.training.models.initial_weights import read_exported
from yunlu.training.models.networks import ConvGRU
from yunlu.training.tasks.media import (
    AUDIO_NAMES,
    choose_front_end,
    read_hf_config,
    restore_front_end,
    sole_input,
    wants_mask,
)
from yunlu.training.tasks.scoring import edit_distance
from yunlu.training.tasks.task import (
    Batch,
    Evaluation,
    Example,
    ModelPrediction,
    Splits,
    call,
    logits_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from yunlu.spec.job import Job, ModelSpec
    from yunlu.training.data.table import DataTable


_EXAMPLES = 8
_WORD_BORDER = "|"
"""The space in Hugging Face's speech vocabularies."""


def clean_text(text: str) -> str:
    """Normalise to lower case and single spaces."""
    return " ".join(text.lower().split())


class Characters:
    """The characters of a model; one code is the CTC blank."""

    def __init__(self, symbols: dict[int, str], *, blank: int, size: int) -> None:
        self.symbols, self.blank, self.size = symbols, blank, size
        self._codes = {symbol: code for code, symbol in symbols.items()}

    @classmethod
    def choose(cls, model: ModelSpec, texts: Iterable[str]) -> Characters:
        """Characters of the pretrained weights' vocabulary, else of the texts."""
        if names_hf(model.name) and model.pretrained:
            vocabulary = find_hf_directory(model.name) / "vocab.json"
            if vocabulary.is_file():
                return cls.read_hf(vocabulary, read_hf_config(model))
        return cls.learn(texts)

    @classmethod
    def learn(cls, texts: Iterable[str]) -> Characters:
        """Every character of the training texts, by code point; the blank is 0."""
        characters = sorted({character for text in texts for character in text})
        if not characters:
            raise DataError(
                "the training texts are all empty",
                hint="name the column of transcripts with data.target",
            )
        return cls(dict(enumerate(characters, start=1)), blank=0, size=len(characters) + 1)

    @classmethod
    def read_hf(cls, path: Path, config: Any) -> Characters:
        """Read the vocabulary of pretrained weights; its padding is the blank."""
        try:
            vocabulary: dict[str, int] = read_json(path)
            codes = {str(symbol): int(code) for symbol, code in vocabulary.items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ModelError(f"{path} is not a table of characters: {error}") from error
        symbols = {
            code: " " if symbol == _WORD_BORDER else symbol.lower()
            for symbol, code in codes.items()
            if len(symbol) == 1 and code != config.pad_token_id
        }
        return cls(symbols, blank=config.pad_token_id, size=config.vocab_size)

    def encode(self, text: str) -> list[int]:
        """The codes of a text, without unknown characters."""
        return [self._codes[character] for character in text if character in self._codes]

    def decode(self, best: Iterable[int]) -> str:
        """Greedy CTC decoding: merge repeats, remove blanks."""
        merged = (code for code, _ in groupby(best))
        return clean_text("".join(self.symbols.get(code, "") for code in merged))

    def frames_needed(self, text: str) -> int:
        """Fewest frames for CTC: one per character, and a blank between equal ones."""
        codes = self.encode(text)
        return len(codes) + sum(a == b for a, b in pairwise(codes))


class TranscriptScorer:
    """Character and word error rates, and exact match."""

    def __init__(self, characters: Characters) -> None:
        self._characters = characters
        self._edits = {"cer": 0, "wer": 0}
        self._totals = {"cer": 0, "wer": 0}
        self._texts = self._exact = 0
        self._examples: list[Example] = []

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add ``(logits, real lengths)`` and a batch; decoded greedily."""
        scores, lengths = outputs
        best = scores.argmax(dim=-1).tolist()
        for codes, length, text, name in zip(
            best, lengths.tolist(), batch.targets["texts"], batch.targets["names"], strict=True
        ):
            predicted = self._characters.decode(codes[:length])
            self._texts += 1
            self._exact += predicted == text
            for metric, truth, prediction in (
                ("cer", text, predicted),
                ("wer", text.split(), predicted.split()),
            ):
                self._edits[metric] += edit_distance(truth, prediction)
                self._totals[metric] += len(truth)
            if len(self._examples) < _EXAMPLES:
                self._examples.append(Example(input=name, expected=text, predicted=predicted))

    def result(self) -> Evaluation:
        """``cer``, ``wer`` and ``exact_match``."""
        rates = {name: self._edits[name] / max(1, self._totals[name]) for name in self._edits}
        exact = self._exact / max(1, self._texts)
        return Evaluation(metrics={**rates, "exact_match": exact}, examples=self._examples)


_TEXT_NAMES = ("text", "transcript", "transcription", "sentence", "y")
log = logging.getLogger(__name__)


class Utterances:
    """Audio features with their texts; ``rows`` are the usable ones."""

    def __init__(self, sounds: AudioFeatures, texts: list[str], names: list[str]) -> None:
        self.sounds, self.texts, self.names = sounds, texts, names
        self.rows = list(range(len(texts)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray | None:
        """Frames of each; None if not all features are cached."""
        cached = self.sounds.cached
        if len(cached) < len(self.sounds):
            return None
        return np.array([len(cached[row]) for row in self.rows], dtype=np.int64)

    def __getitem__(self, index: int) -> tuple[Tensor, str, str]:
        """Features, text and name."""
        row = self.rows[index]
        return self.sounds[row], self.texts[row], self.names[row]


class SpeechToText:
    """Speech to text, scored by the character error rate (``cer``).

    The model gets log-mel frames ``(N, T, bands)`` and their lengths, and gives scores
    ``(N, T', characters)``; if ``T'`` is not a fixed share of ``T`` it has a method
    ``output_lengths(lengths)``. A Hugging Face model gets waveforms as ``input_values``.

    The loss is summed over utterances and averaged per character: characters of long and short
    utterances have the same weight, and the loss is comparable between data sets.
    """

    metric = "cer"
    special_keys = frozenset({"data.max_length", "data.sample_rate"})

    def load(self, job: Job) -> Splits:
        """Read audio and texts; excludes training utterances that cannot be aligned."""
        tables = load_tables(job.data, seed=job.train.seed)
        sounds = find_column(tables.train, sole_input(job.data), AUDIO_NAMES, key="data.input")
        texts = find_column(tables.train, job.data.target, _TEXT_NAMES, key="data.target")
        self._with_mask = names_hf(job.model.name) and wants_mask(read_hf_config(job.model))
        self.front = choose_front_end(job, tables.train[sounds][0])
        train = self._read_part(tables.train, sounds, texts, "training")
        assert train is not None
        self.characters = Characters.choose(job.model, train.texts)
        self.front.learn(train.sounds.cached)
        excluded = self._exclude_unusable(train, job)
        return Splits(
            train=train,
            validation=self._read_part(tables.validation, sounds, texts, "validation"),
            test=self._read_part(tables.test, sounds, texts, "test"),
            fingerprint=tables.fingerprint,
            about={
                "source": tables.source,
                "characters": "".join(self.characters.symbols.values()),
                "sample_rate": self.front.sample_rate,
                **excluded,
            },
        )

    def build(self, job: Job) -> nn.Module:
        """Build the model, with an output for each character and the blank."""
        bands = self.front.transform.bands if isinstance(self.front, LogMelFrontEnd) else 1
        model = build_model(
            job.model,
            builtins={"conv-gru": ConvGRU},
            sizes={"features": bands, "symbols": self.characters.size},
            auto_class="AutoModelForCTC",
            hf_sizes={"vocab_size": self.characters.size, "pad_token_id": self.characters.blank},
        )
        if not isinstance(self.front, WaveformFrontEnd):
            check_call(model, ("frames", "lengths"))
        return model

    def collate(self, samples: Sequence[tuple[Tensor, str, str]]) -> Batch:
        """Normalise, and pad to the longest."""
        sounds = [self.front.normalise(sound) for sound, _, _ in samples]
        texts = [text for _, text, _ in samples]
        codes = [self.characters.encode(text) for text in texts]
        lengths = torch.tensor([len(sound) for sound in sounds])
        positions = len(sounds) * int(lengths.max())
        return Batch(
            inputs=self._inputs(pad_sequence(sounds, batch_first=True), lengths),
            targets={
                "codes": torch.tensor([code for row in codes for code in row], dtype=torch.int64),
                "code_lengths": torch.tensor([len(row) for row in codes]),
                "lengths": lengths,
                "texts": texts,
                "names": [name for _, _, name in samples],
            },
            samples=len(samples),
            # An empty text counts as one character, so that silence is learned.
            items=sum(max(1, len(row)) for row in codes),
            tokens=positions,
            padding=positions - int(lengths.sum()),
            on_host=(1, "lengths", "code_lengths"),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """CTC loss summed over the utterances; outputs are logits and their real lengths."""
        scores = self._check(logits_of(call(model, batch)), batch.samples)
        lengths: Tensor = batch.targets["lengths"]
        real = _output_lengths(model, lengths, int(lengths.max()), scores.shape[1])
        log_probabilities = scores.float().log_softmax(dim=-1).transpose(0, 1)
        if (
            is_accelerator(log_probabilities.device)
            and torch.are_deterministic_algorithms_enabled()
        ):
            log_probabilities = (
                log_probabilities.cpu()
            )  # CTC's gradient on the GPU is not deterministic
        loss = functional.ctc_loss(
            log_probabilities,
            batch.targets["codes"].to(log_probabilities.device),
            real,
            batch.targets["code_lengths"],
            blank=self.characters.blank,
            reduction="sum",
            # An evaluated utterance may have more text than frames: its loss is infinite.
            zero_infinity=True,
        )
        return loss.to(scores.device), (scores, real)

    def scorer(self) -> TranscriptScorer:
        """Character and word error rates, and exact match."""
        return TranscriptScorer(self.characters)

    def save_artifacts(self, directory: Path) -> None:
        """Save the front-end settings and the characters."""
        parts = {
            "characters": {str(code): symbol for code, symbol in self.characters.symbols.items()},
            "blank": self.characters.blank,
            "size": self.characters.size,
            **self.front.describe(),
        }
        text = json.dumps(parts, indent=2, ensure_ascii=False)
        (directory / "preprocessing.json").write_text(text + "\n", encoding="utf-8")

    def restore(self, job: Job, directory: Path) -> None:
        """Read the front-end settings and the characters."""
        settings = read_exported(directory)
        symbols = {int(code): symbol for code, symbol in settings["characters"].items()}
        size = settings.get("size", len(symbols) + 1)
        self.characters = Characters(symbols, blank=settings["blank"], size=size)
        self.front = restore_front_end(settings)
        self._with_mask = names_hf(job.model.name) and wants_mask(read_hf_config(job.model))

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[ModelPrediction]:
        """The transcript of each sound: paths, URLs, or waveforms at the model's sample rate."""
        sounds = AudioFeatures(list(inputs), self.front).cached
        batch = self.collate([(sound, "", "") for sound in sounds])
        scores, lengths = self.loss(model, batch)[1]
        rows = zip(scores.argmax(dim=-1).tolist(), lengths.tolist(), strict=True)
        return [ModelPrediction(value=self.characters.decode(row[:length])) for row, length in rows]

    def _read_part(
        self, table: DataTable | None, sounds: str, texts: str, part: str
    ) -> Utterances | None:
        if table is None:
            return None
        transcripts = [
            _text(value, table.source_row(row), part) for row, value in enumerate(table[texts])
        ]
        names = [_name(sound, table.source_row(row)) for row, sound in enumerate(table[sounds])]
        return Utterances(AudioFeatures(table[sounds], self.front), transcripts, names)

    def _exclude_unusable(self, train: Utterances, job: Job) -> dict[str, int]:
        """Exclude utterances that are too long for the job, or too short for their text; returns counts."""
        requested = job.data.max_length
        longest = (
            math.inf
            if requested == "auto"
            else requested * self.front.per_second / FRAMES_PER_SECOND
        )
        output_frames = _output_frames(job)
        long: list[int] = []
        short: list[int] = []
        for row, sound in enumerate(train.sounds.cached):
            if len(sound) > longest:
                long.append(row)
            elif output_frames(len(sound)) < self.characters.frames_needed(train.texts[row]):
                short.append(row)
        unusable = {*long, *short}
        train.rows = [row for row in train.rows if row not in unusable]
        if not train.rows:
            raise DataError(
                "no utterance can be learned from: each is too short for its text, or too long",
                hint="check that the transcripts belong to the sounds, and data.max_length",
            )
        counts = {"too long": len(long), "too short for their text": len(short)}
        for reason, count in counts.items():
            if count:
                log.warning("excluded %s of %s utterances: %s", count, len(train.texts), reason)
        return {f"excluded, {reason}": count for reason, count in counts.items() if count}

    def _check(self, scores: Tensor, samples: int) -> Tensor:
        size = self.characters.size
        if scores.ndim != 3 or scores.shape[0] != samples or scores.shape[2] != size:
            raise ModelError(
                f"the model gives scores of shape {tuple(scores.shape)}; ({samples}, frames, {size}) "
                "was expected: one per character and the blank, for each frame",
            )
        return scores

    def _inputs(self, sounds: Tensor, lengths: Tensor) -> tuple[Tensor, ...] | dict[str, Tensor]:
        if not isinstance(self.front, WaveformFrontEnd):
            return (sounds, lengths)
        if not self._with_mask:
            return {"input_values": sounds}
        mask = torch.arange(sounds.shape[1]) < lengths[:, None]
        return {"input_values": sounds, "attention_mask": mask.long()}


def _text(value: Any, row: int, part: str) -> str:
    # Transcripts that are all digits are read as numbers.
    if isinstance(value, (str, int, np.integer)):
        return clean_text(str(value))
    raise DataError(
        f"row {row} of the {part} data has no text: {value!r}",
        hint="name the column of transcripts with data.target",
    )


def _name(sound: Any, row: int) -> str:
    return PurePosixPath(str(sound)).name if isinstance(sound, (str, FileRef)) else f"row {row}"


def _output_frames(job: Job) -> Callable[[int], int]:
    """Number of output frames of the model for a clip; an upper bound if unknown."""
    if job.model.name == "conv-gru":
        return lambda length: int(ConvGRU.output_lengths(torch.tensor(length)))
    config = read_hf_config(job.model) if names_hf(job.model.name) else None
    kernels, strides = getattr(config, "conv_kernel", ()), getattr(config, "conv_stride", ())

    def convolved(length: int) -> int:
        for kernel, stride in zip(kernels, strides, strict=True):
            length = (length - kernel) // stride + 1
        return length

    return convolved


def _output_lengths(model: Any, lengths: Tensor, frames_in: int, frames_out: int) -> Tensor:
    """Output frames of each sample; proportional to the input if the model does not tell."""
    for name in ("output_lengths", "_get_feat_extract_output_lengths"):
        if hasattr(model, name):
            return getattr(model, name)(lengths).clamp(min=1, max=frames_out)
    return (lengths * frames_out + frames_in - 1) // frames_in
