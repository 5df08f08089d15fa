from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from yunlu.core.errors import DataError, ModelError
from yunlu.core.settings import use_keras_on_torch
from yunlu.spec.job import Job
from yunlu.testing.tasks import TaskContract
from yunlu.training.data.batches import sequential_batches
from yunlu.training.tasks.image_classification import ImageClassification

# Keras saves its variables through an interface that NumPy 2 no longer likes.
keras_warns = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SHADES = {"red": (200, 30, 30), "blue": (30, 30, 200)}


def make_job(data: Any, model: Any = "cnn", **train: Any) -> Job:
    data = {"train": str(data)} if isinstance(data, (str, Path)) else data
    return Job.model_validate(
        {"task": "image-classification", "model": model, "data": data, "train": train}
    )


def write_images(folder: Path, *, each: int = 12, size: tuple[int, int] = (10, 8)) -> Path:
    rng = np.random.default_rng(0)
    for name, shade in SHADES.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            noise = rng.integers(-30, 30, (size[1], size[0], 3))
            pixels = np.clip(np.array(shade) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def train(
    job: Job, *, steps: int, lr: float = 1e-2
) -> tuple[ImageClassification, nn.Module, list[float]]:
    """The smallest loop: the same batch again and again."""
    torch.manual_seed(0)
    task = ImageClassification()
    splits, model = task.load(job), task.build(job)
    batch = next(sequential_batches(splits.train, task.collate, micro_batch=32, workers=0))
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=lr)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model.train(), batch)[0] / batch.items
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return task, model, losses


class TestContract(TaskContract):
    def make_task(self) -> ImageClassification:
        return ImageClassification()

    def make_job(self) -> Job:
        return make_job(
            {"train": "sklearn:digits", "limit": 64}, {"name": "cnn", "args": {"channels": [4]}}
        )

    def make_inputs(self) -> list[np.ndarray]:
        return [np.eye(8) * 16, np.ones((8, 8)) * 3]


def test_a_folder_of_images_is_learned_and_scored(tmp_path: Path) -> None:
    job = make_job(write_images(tmp_path))
    task, model, losses = train(job, steps=8)
    splits = task.load(job)
    assert splits.test is not None

    scorer = task.scorer()
    model.eval()
    for batch in sequential_batches(splits.test, task.collate, micro_batch=8, workers=0):
        scorer.add(task.loss(model, batch)[1], batch)

    assert losses[-1] < 0.3 * losses[0]
    found = scorer.result()
    assert found.metrics["accuracy"] == 1.0
    assert found.confusion is not None
    assert found.confusion.labels == ["blue", "red"]
    assert splits.about["images"] == "10 × 8 colour"


def test_training_images_are_normalised_to_mean_0_and_deviation_1(tmp_path: Path) -> None:
    task = ImageClassification()
    splits = task.load(make_job(write_images(tmp_path)))

    batch = task.collate([splits.train[index] for index in range(len(splits.train))])

    assert isinstance(batch.inputs, tuple)
    (images,) = batch.inputs
    assert images.shape[1:] == (3, 8, 10)
    torch.testing.assert_close(images.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(images.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-2, rtol=0)


def test_the_size_a_job_asks_for_is_the_size_the_model_gets(tmp_path: Path) -> None:
    task = ImageClassification()
    splits = task.load(make_job({"train": str(write_images(tmp_path)), "image_size": 16}))

    assert splits.train[0][0].shape == (3, 16, 16)


def test_a_broken_image_stops_the_load_and_is_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path)
    (folder / "red" / "7.png").write_bytes(b"no image")

    with pytest.raises(DataError, match=r"red/7\.png cannot be decoded"):
        ImageClassification().load(make_job(folder))


def test_a_label_only_the_test_data_has_is_refused_with_its_file(tmp_path: Path) -> None:
    train_folder, test_folder = write_images(tmp_path / "a"), write_images(tmp_path / "b", each=2)
    (test_folder / "red").rename(test_folder / "green")
    job = make_job({"train": str(train_folder), "test": str(test_folder)})

    with pytest.raises(DataError, match=r"test data has the label 'green'.*green/0\.png"):
        ImageClassification().load(job)


def test_arrays_from_a_file_are_classified_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    x = (rng.integers(0, 60, (40, 8, 8)) + 150 * labels[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "data.npz", x=x, y=labels)

    _, _, losses = train(make_job(tmp_path / "data.npz"), steps=8)

    assert losses[-1] < 0.3 * losses[0]


def test_the_exported_parts_tell_how_to_prepare_an_image(tmp_path: Path) -> None:
    data = {"train": str(write_images(tmp_path / "data")), "split": {"validation": 0, "test": 0}}
    task, _, _ = train(make_job(data), steps=1)

    task.save_artifacts(tmp_path)

    parts = json.loads((tmp_path / "preprocessing.json").read_text())
    assert parts["labels"] == ["blue", "red"]
    assert (parts["channels"], parts["height"], parts["width"]) == (3, 8, 10)
    assert parts["scale"] == pytest.approx(1 / 255)
    assert parts["mean"] == pytest.approx([115 / 255, 30 / 255, 115 / 255], abs=0.03)


def test_label_smoothing_comes_from_the_job(tmp_path: Path) -> None:
    folder = write_images(tmp_path)
    _, _, plain = train(make_job(folder), steps=1)
    _, _, smooth = train(make_job(folder, label_smoothing=0.5), steps=1)

    assert plain != smooth


def make_own(in_channels: int, classes: int) -> nn.Module:
    return (
        nn.Sequential(nn.Flatten(), nn.LazyLinear(classes)) if in_channels == 3 else nn.Identity()
    )


def test_ones_own_module_gets_images_with_channels_first(tmp_path: Path) -> None:
    model = f"{__file__}:make_own"

    _, built, losses = train(make_job(write_images(tmp_path), model), steps=10)

    assert losses[-1] < losses[0]
    assert next(iter(built.parameters())).shape == (2, 3 * 8 * 10)


@keras_warns
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("softmax", [True, False])
def test_a_keras_model_is_trained_in_its_own_order_of_axes(
    tmp_path: Path, *, channels_last: bool, softmax: bool
) -> None:
    use_keras_on_torch()
    keras = pytest.importorskip("keras")
    shape = (8, 10, 3) if channels_last else (3, 8, 10)
    form = "channels_last" if channels_last else "channels_first"
    model = keras.Sequential(
        [
            keras.Input(shape=shape),
            keras.layers.Conv2D(4, 3, activation="relu", data_format=form),
            keras.layers.GlobalAveragePooling2D(data_format=form),
            keras.layers.Dense(2, activation="softmax" if softmax else None),
        ]
    )
    model.save(tmp_path / "net.keras")

    job = make_job(write_images(tmp_path / "data"), str(tmp_path / "net.keras"))
    task, _, losses = train(job, steps=30)

    assert losses[-1] < 0.7 * losses[0]
    sample = task.load(job).train[0]
    inputs = task.collate([sample]).inputs
    assert isinstance(inputs, tuple)
    assert inputs[0].shape == (1, *shape)


@keras_warns
def test_a_keras_model_for_other_images_is_refused_before_training(tmp_path: Path) -> None:
    use_keras_on_torch()
    keras = pytest.importorskip("keras")
    layers = [keras.Input(shape=(28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(2)]
    keras.Sequential(layers).save(tmp_path / "net.keras")
    job = make_job(write_images(tmp_path / "data"), str(tmp_path / "net.keras"))
    task = ImageClassification()
    task.load(job)

    with pytest.raises(ModelError, match=r"\(28, 28, 1\).*\(8, 10, 3\)"):
        task.build(job)


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=12,
        patch_size=4,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_hugging_face_model_gets_its_own_size_and_the_labels(tmp_path: Path, vit: Path) -> None:
    model = {"name": f"hf:{vit}", "pretrained": False}

    task, built, losses = train(make_job(write_images(tmp_path / "data"), model), steps=12)

    assert losses[-1] < 0.7 * losses[0]
    assert task.shape.height == task.shape.width == 12
    assert built.config.id2label == {0: "blue", 1: "red"}  # pyright: ignore[reportAttributeAccessIssue]


def test_pretrained_weights_get_images_as_they_know_them(tmp_path: Path, vit: Path) -> None:
    known = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    (vit / "preprocessor_config.json").write_text(json.dumps(known))
    task, _, _ = train(make_job(write_images(tmp_path / "data"), f"hf:{vit}"), steps=1)

    white = torch.full((3, 12, 12), 255, dtype=torch.uint8)
    inputs = task.collate([(white, 0)]).inputs

    assert isinstance(inputs, dict)
    torch.testing.assert_close(inputs["pixel_values"], torch.full((1, 3, 12, 12), 2.0))


def test_another_size_than_the_models_own_is_refused(tmp_path: Path, vit: Path) -> None:
    data = {"train": str(write_images(tmp_path / "data")), "image_size": 32}

    with pytest.raises(ModelError, match=r"12 × 12 pixels, but data\.image_size is 32"):
        ImageClassification().load(make_job(data, f"hf:{vit}"))
