from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest
import soundfile
from huggingface_hub import HfApi
from huggingface_hub.hf_api import DatasetInfo
from PIL import Image

from yunlu.core.errors import DataError, MissingPartError
from yunlu.spec.job import DataSpec
from yunlu.training.data.sources import SKLEARN, Tables, load_sklearn, load_tables
from yunlu.training.data.table import AudioRef, ImageRef

if TYPE_CHECKING:
    from pathlib import Path


COMMIT = "0123abcd" * 5


def load(train: object, **fields: Any) -> Tables:
    return load_tables(DataSpec.model_validate({"train": str(train), **fields}), seed=0)


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (2, 2), value).save(buffer, "png")
    return buffer.getvalue()


def wav(value: float) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.full(8, value), 8000, format="WAV")
    return buffer.getvalue()


def test_digits_are_images_between_zero_and_one() -> None:
    digits = load_sklearn("digits")
    images = digits["image"]
    assert isinstance(images, np.ndarray)
    assert images.shape == (1797, 8, 8)
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert set(digits["label"]) == set(range(10))


@pytest.mark.parametrize(
    ("name", "rows", "features"), [("iris", 150, 4), ("wine", 178, 13), ("breast_cancer", 569, 30)]
)
def test_classes_come_with_their_names(name: str, rows: int, features: int) -> None:
    table = load_sklearn(name)
    assert len(table) == rows
    assert len(table.columns) == features + 1
    assert all(isinstance(label, str) for label in table["label"])


def test_diabetes_has_a_number_to_predict_and_unscaled_features() -> None:
    table = load_sklearn("diabetes")
    assert isinstance(table["target"], np.ndarray)
    assert max(table["age"]) > 60


def test_an_unknown_set_lists_the_known_ones() -> None:
    with pytest.raises(DataError) as raised:
        load("sklearn:irises")
    assert all(name in str(raised.value) for name in SKLEARN)


def test_a_saved_data_set_keeps_its_splits_and_class_names(tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    train = datasets.Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 1, 0]}, features)
    parts = {"train": train, "test": train.select([2])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    for source in (tmp_path / "saved", f"hf:{tmp_path / 'saved'}"):
        found = load(source, split={"validation": 0.25})
        assert found.validation is not None
        assert found.test is not None
        assert [len(found.train), len(found.validation), len(found.test)] == [3, 1, 1]
        assert (found.test["text"][0], found.test["label"][0]) == ("c", "good")
        assert found.fingerprint == load(source).fingerprint


def test_saved_images_and_sounds_stay_encoded_bytes(tmp_path: Path) -> None:
    content = {
        "image": [{"bytes": png(n), "path": None} for n in range(4)],
        "audio": [{"bytes": wav(n / 8), "path": None} for n in range(4)],
    }
    rows = datasets.Dataset.from_dict(content).cast_column("image", datasets.Image())
    rows.cast_column("audio", datasets.Audio(decode=True)).save_to_disk(str(tmp_path / "saved"))
    table = load(tmp_path / "saved", split={"validation": 0, "test": 0}).train
    assert isinstance(table["image"][2], ImageRef)
    assert table["image"][2].read() == png(2)
    assert isinstance(table["audio"][3], AudioRef)
    assert table["audio"][3].read() == wav(3 / 8)


def test_a_damaged_saved_data_set_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="not a complete saved data set"):
        load(tmp_path)


def test_a_hub_name_is_loaded_without_running_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(*args: Any, **options: Any) -> datasets.DatasetDict:
        asked.append((args, options))
        rows = datasets.Dataset.from_dict({"text": list("abcdefgh")})
        return datasets.DatasetDict({"train": rows, "validation": rows.select([0])})

    monkeypatch.setattr(datasets, "load_dataset", answer)
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: DatasetInfo(id="x", sha=COMMIT))
    found = load("hf:someone/reviews:small", split={"test": 0.25})
    assert asked == [(("someone/reviews", "small"), {"revision": COMMIT})]
    assert found.validation is not None
    assert len(found.validation) == 1


@pytest.mark.parametrize(
    ("named", "asked_for"), [(f"@{COMMIT}", COMMIT), ("@v2", "v2"), ("", None)]
)
def test_without_the_hub_the_revision_is_what_the_job_names(
    named: str, asked_for: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    revisions: list[Any] = []

    def answer(*_: Any, revision: str | None) -> datasets.Dataset:
        revisions.append(revision)
        return datasets.Dataset.from_dict({"text": list("abcdefgh")})

    monkeypatch.setattr(HfApi, "dataset_info", offline)
    monkeypatch.setattr(datasets, "load_dataset", answer)
    load(f"hf:someone/else{named}")
    assert revisions == [asked_for]


def test_a_hub_that_cannot_be_reached_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(HfApi, "dataset_info", fail)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match="cannot load the data set hf:someone/reviews: no route"):
        load("hf:someone/reviews")


def test_without_the_package_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPartError, match=r'pip install "yunlu\[hf\]"'):
        load("hf:someone/reviews")
