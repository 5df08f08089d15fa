"""Image classification."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from yunlu.core.errors import ModelError
from yunlu.training.data.images import (
    ImageArrays,
    ImageFiles,
    ImageShape,
    infer_image_shape,
    infer_scale,
    load_images,
    measure,
)
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import find_column
from yunlu.training.models.build import build_model, check_call
from yunlu.training.models.hf import names_hf
from yunlu.training.models.initial_weights import read_artifacts, read_exported
from yunlu.training.models.networks import ConvNet
from yunlu.training.tasks.media import (
    LABEL_NAMES,
    LabelledSamples,
    Labels,
    SingleLabelTask,
    ends_in_softmax,
    label_config,
    read_hf_config,
    read_hf_preprocessor,
    sole_input,
)
from yunlu.training.tasks.task import Batch, Splits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.spec.job import Job
    from yunlu.training.data.table import DataTable

_IMAGE_NAMES = ("image", "img", "picture", "pixels", "x")


class ImageClassification(SingleLabelTask):
    """Image classification: one label per image, scored by accuracy.

    Images are resized to one shape and normalised with the statistics of the training images, or with
    those of a pretrained model. The model gets ``(N, C, H, W)``; a Keras model gets
    its own order, a Hugging Face model ``pixel_values``.
    """

    special_keys = frozenset({"data.image_size", "train.label_smoothing"})

    def __init__(self) -> None:
        self._by_name = self._channels_last = self._gives_probabilities = False

    def load(self, job: Job) -> Splits:
        """Read images and labels; small data sets are decoded once and cached."""
        tables = load_tables(job.data, seed=job.train.seed)
        images = find_column(tables.train, sole_input(job.data), _IMAGE_NAMES, key="data.input")
        target = find_column(tables.train, job.data.target, LABEL_NAMES, key="data.target")
        self._label_smoothing = job.train.label_smoothing
        self._by_name = names_hf(job.model.name)
        self.shape = _choose_shape(job, tables.train, images)
        self.labels = Labels.learn(tables.full_train[target], row_of=tables.full_train.source_row)
        train = self._read_part(tables.train, images, target, "training")
        assert train is not None
        self._learn_normalisation(job, train.inputs)
        colours = "grey" if self.shape.channels == 1 else "colour"
        return Splits(
            train=train,
            validation=self._read_part(tables.validation, images, target, "validation"),
            test=self._read_part(tables.test, images, target, "test"),
            fingerprint=tables.fingerprint,
            about={
                "source": tables.source,
                "labels": self.labels.names,
                "images": f"{self.shape.width} × {self.shape.height} {colours}",
            },
        )

    def build(self, job: Job) -> nn.Module:
        """Build the model; refuses one that expects other image shapes."""
        model = build_model(
            job.model,
            builtins={"cnn": ConvNet},
            sizes={"in_channels": self.shape.channels, "classes": len(self.labels)},
            auto_class="AutoModelForImageClassification",
            hf_sizes=label_config(self.labels),
        )
        if not self._by_name:
            check_call(model, ("images",))
        self._gives_probabilities = ends_in_softmax(model)
        self._channels_last = _wants_channels_last(model, self.shape)
        return model

    def collate(self, samples: Sequence[tuple[Tensor, int]]) -> Batch:
        """Stack and normalise."""
        pixels = torch.stack([image for image, _ in samples]).float() * self._scale
        images = (pixels - self._mean) / self._deviation
        if self._channels_last:
            images = images.permute(0, 2, 3, 1).contiguous()
        return Batch(
            inputs={"pixel_values": images} if self._by_name else (images,),
            targets=torch.tensor([target for _, target in samples]),
            samples=len(samples),
            items=len(samples),
        )

    def save_artifacts(self, directory: Path) -> None:
        """Save the preprocessing settings and the labels."""
        parts = {
            "labels": self.labels.names,
            "channels": self.shape.channels,
            "height": self.shape.height,
            "width": self.shape.width,
            "channels_last": self._channels_last,
            "scale": self._scale,
            "mean": self._mean.flatten().tolist(),
            "deviation": self._deviation.flatten().tolist(),
        }
        text = json.dumps(parts, indent=2, ensure_ascii=False)
        (directory / "preprocessing.json").write_text(text + "\n", encoding="utf-8")

    def restore(self, job: Job, directory: Path) -> None:
        """Read the preprocessing settings and the labels."""
        settings = read_exported(directory)
        self.labels = Labels(settings["labels"])
        sizes = {key: settings[key] for key in ("channels", "height", "width")}
        self.shape, self._scale = ImageShape(**sizes), settings["scale"]
        self._set_normalisation(settings["mean"], settings["deviation"])
        self._label_smoothing, self._by_name = 0.0, names_hf(job.model.name)

    def _encode_inputs(self, inputs: Sequence[Any]) -> Sequence[Tensor]:
        """Paths or URLs of images, or arrays of the training data's form."""
        column = inputs if isinstance(inputs, np.ndarray) else list(inputs)
        images = load_images(column, self.shape)
        return [images[index] for index in range(len(images))]

    def _read_part(
        self, table: DataTable | None, images: str, target: str, part: str
    ) -> LabelledSamples[ImageArrays | ImageFiles] | None:
        if table is None:
            return None
        # Labels first: errors appear before thousands of images are decoded.
        targets = self.labels.encode(
            table[target], table[images], part=part, row_of=table.source_row
        )
        return LabelledSamples(load_images(table[images], self.shape), targets)

    def _learn_normalisation(self, job: Job, images: ImageArrays | ImageFiles) -> None:
        self._scale = infer_scale(images)
        preprocessor = read_hf_preprocessor(job.model) if self._by_name else {}
        base = read_artifacts(job.model)
        if "deviation" in base:  # initial weights keep their normalisation
            mean, deviation = base["mean"], base["deviation"]
        elif "image_mean" in preprocessor and "image_std" in preprocessor:
            mean, deviation = preprocessor["image_mean"], preprocessor["image_std"]
        else:
            mean, deviation = measure(images, self._scale)
        self._set_normalisation(mean, deviation)

    def _set_normalisation(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        self._mean, self._deviation = (
            torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)
            for values in (mean, deviation)
        )


def _choose_shape(job: Job, train: DataTable, images: str) -> ImageShape:
    requested = job.data.image_size
    edges = None if requested == "auto" else (requested, requested)
    if not names_hf(job.model.name):
        return infer_image_shape(train[images], edges=edges)
    config = read_hf_config(job.model)
    size = getattr(config, "image_size", None)
    built_for = (size, size) if isinstance(size, int) else tuple(size) if size else None
    if built_for and edges and edges != built_for:
        raise ModelError(
            f"{job.model.name} reads images of {built_for[1]} × {built_for[0]} pixels, "
            f"but data.image_size is {requested}.",
            hint="remove data.image_size, or set model.args.image_size with model.pretrained: false",
        )
    channels = getattr(config, "num_channels", 3)
    return infer_image_shape(train[images], edges=built_for or edges, channels=channels)


def _wants_channels_last(model: nn.Module, shape: ImageShape) -> bool:
    """Whether a Keras model expects channels last; refuses a mismatch with the images."""
    expected = getattr(getattr(model, "keras_model", None), "input_shape", None)
    if not isinstance(expected, tuple) or len(expected) != 4:
        return False
    first = (shape.channels, shape.height, shape.width)
    last = (shape.height, shape.width, shape.channels)
    for sizes, is_last in ((last, True), (first, False)):
        if all(want in {None, have} for want, have in zip(expected[1:], sizes, strict=True)):
            return is_last
    raise ModelError(
        f"the Keras model expects images of shape {expected[1:]}; the data gives {last} "
        "(height, width, channels)",
        hint="set data.image_size, or build the model for these images",
    )
