"""Keyword spotting: classification of short audio clips."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from yunlu.training.data.audio import FRAMES_PER_SECOND, AudioFeatures, WaveformFrontEnd
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import find_column
from yunlu.training.models.build import build_model, check_call
from yunlu.training.models.hf import names_hf
from yunlu.training.models.initial_weights import read_exported
from yunlu.training.models.networks import ConvNet
from yunlu.training.tasks.media import (
    AUDIO_NAMES,
    LABEL_NAMES,
    LabelledSamples,
    Labels,
    SingleLabelTask,
    choose_front_end,
    ends_in_softmax,
    label_config,
    read_hf_config,
    restore_front_end,
    sole_input,
    wants_mask,
)
from yunlu.training.tasks.task import Batch, Splits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.spec.job import Job
    from yunlu.training.data.table import DataTable

_KEPT_SHARE = 0.99
"""Share of training clips that are not truncated: outliers must not slow down the rest."""


class KeywordSpotting(SingleLabelTask):
    """Keyword spotting: one label per audio clip, scored by accuracy.

    Clips become log-mel frames of one length, truncated or padded at the end; the
    model gets them as images ``(N, 1, bands, frames)``. A Hugging Face model gets the waveform
    as ``input_values``.
    """

    special_keys = frozenset({"data.max_length", "data.sample_rate", "train.label_smoothing"})

    def __init__(self) -> None:
        self._gives_probabilities = self._with_mask = False

    def load(self, job: Job) -> Splits:
        """Read audio and labels; features are computed once and cached if they fit."""
        tables = load_tables(job.data, seed=job.train.seed)
        sounds = find_column(tables.train, sole_input(job.data), AUDIO_NAMES, key="data.input")
        target = find_column(tables.train, job.data.target, LABEL_NAMES, key="data.target")
        self._label_smoothing = job.train.label_smoothing
        self._with_mask = names_hf(job.model.name) and wants_mask(read_hf_config(job.model))
        self.front = choose_front_end(job, tables.train[sounds][0])
        self.labels = Labels.learn(tables.full_train[target], row_of=tables.full_train.source_row)
        train = self._read_part(tables.train, sounds, target, "training")
        assert train is not None
        cached = train.inputs.cached
        self.front.learn(cached)
        self.length = _choose_length(job, cached, self.front.per_second)
        return Splits(
            train=train,
            validation=self._read_part(tables.validation, sounds, target, "validation"),
            test=self._read_part(tables.test, sounds, target, "test"),
            fingerprint=tables.fingerprint,
            about={
                "source": tables.source,
                "labels": self.labels.names,
                "sample_rate": self.front.sample_rate,
                "seconds": round(self.length / self.front.per_second, 2),
            },
        )

    def build(self, job: Job) -> nn.Module:
        """Build the model; the built-in one treats the spectrogram as a grey image."""
        model = build_model(
            job.model,
            builtins={"cnn": build_spectrogram_cnn},
            sizes={"in_channels": 1, "classes": len(self.labels)},
            auto_class="AutoModelForAudioClassification",
            hf_sizes=label_config(self.labels),
        )
        if not isinstance(self.front, WaveformFrontEnd):
            check_call(model, ("spectrograms",))
        self._gives_probabilities = ends_in_softmax(model)
        return model

    def collate(self, samples: Sequence[tuple[Tensor, int]]) -> Batch:
        """Normalise, then truncate or pad to the common length."""
        lengths = torch.tensor([min(len(sound), self.length) for sound, _ in samples])
        sounds = torch.stack([self._fit(sound) for sound, _ in samples])
        return Batch(
            inputs=self._inputs(sounds, lengths),
            targets=torch.tensor([target for _, target in samples]),
            samples=len(samples),
            items=len(samples),
        )

    def save_artifacts(self, directory: Path) -> None:
        """Save the front-end settings and the labels."""
        parts = {"labels": self.labels.names, "length": self.length, **self.front.describe()}
        text = json.dumps(parts, indent=2, ensure_ascii=False)
        (directory / "preprocessing.json").write_text(text + "\n", encoding="utf-8")

    def restore(self, job: Job, directory: Path) -> None:
        """Read the front-end settings and the labels."""
        settings = read_exported(directory)
        self.labels, self.length = Labels(settings["labels"]), settings["length"]
        self.front = restore_front_end(settings)
        self._label_smoothing = 0.0
        self._with_mask = names_hf(job.model.name) and wants_mask(read_hf_config(job.model))

    def _encode_inputs(self, inputs: Sequence[Any]) -> Sequence[Tensor]:
        """Paths or URLs of sounds, or mono waveforms at the model's sample rate."""
        return AudioFeatures(list(inputs), self.front).cached

    def _read_part(
        self, table: DataTable | None, sounds: str, target: str, part: str
    ) -> LabelledSamples[AudioFeatures] | None:
        if table is None:
            return None
        # Labels first: errors appear before thousands of clips are decoded.
        targets = self.labels.encode(
            table[target], table[sounds], part=part, row_of=table.source_row
        )
        return LabelledSamples(AudioFeatures(table[sounds], self.front), targets)

    def _fit(self, sound: Tensor) -> Tensor:
        sound = self.front.normalise(sound[: self.length])
        missing = self.length - len(sound)
        return functional.pad(sound, (0, 0, 0, missing) if sound.ndim == 2 else (0, missing))

    def _inputs(self, sounds: Tensor, lengths: Tensor) -> tuple[Tensor, ...] | dict[str, Tensor]:
        if not isinstance(self.front, WaveformFrontEnd):
            return (sounds.transpose(1, 2)[:, None].contiguous(),)
        if not self._with_mask:
            return {"input_values": sounds}
        mask = torch.arange(self.length) < lengths[:, None]
        return {"input_values": sounds, "attention_mask": mask.long()}


def build_spectrogram_cnn(
    in_channels: int,
    classes: int,
    *,
    channels: list[int] = [16, 32, 64, 96],  # noqa: B006 - never changed; JSON knows lists only
    dropout: float = 0.1,
    stride: int = 2,
) -> ConvNet:
    """The ``cnn`` for spectrograms: its receptive field covers all bands and a syllable.

    On ``synthetic:spoken-words`` this reached 0.97 in 12 CPU seconds (10 epochs), where the two stages
    that suit small images reached 0.59 in 69 (8 epochs).
    """
    return ConvNet(in_channels, classes, channels=channels, dropout=dropout, stride=stride)


def _choose_length(job: Job, cached: Sequence[Tensor], per_second: int) -> int:
    requested = job.data.max_length
    if requested != "auto":
        return max(1, requested * per_second // FRAMES_PER_SECOND)
    ordered = sorted(len(sound) for sound in cached)
    return ordered[min(len(ordered) - 1, math.ceil(_KEPT_SHARE * len(ordered)) - 1)]
