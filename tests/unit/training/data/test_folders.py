from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from yunlu.core.errors import DataError
from yunlu.spec.job import DataSpec
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import AudioRef, DataTable, ImageRef


def write(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"bytes of {name}".encode())
    return root


def whole(source: object, **fields: Any) -> DataTable:
    none = {"validation": 0, "test": 0}
    spec = DataSpec.model_validate({"train": str(source), "split": none, **fields})
    return load_tables(spec, seed=0).train


def test_a_folder_per_label_gives_images_and_labels(tmp_path: Path) -> None:
    table = whole(write(tmp_path, "cat/1.png", "cat/2.JPG", "dog/old/3.png", "dog/notes.md"))
    assert table["label"] == ["cat", "cat", "dog"]
    assert all(isinstance(image, ImageRef) for image in table["image"])
    assert table["image"][2].read() == b"bytes of dog/old/3.png"


def test_a_folder_per_label_gives_sounds_and_labels(tmp_path: Path) -> None:
    table = whole(write(tmp_path, "yes/1.wav", "no/2.flac"))
    assert table["label"] == ["no", "yes"]
    assert all(isinstance(sound, AudioRef) for sound in table["audio"])


@pytest.mark.parametrize("header", ["", "file,label\n", "filename,kind\n"])
def test_a_sheet_of_labels_names_the_images_of_a_flat_folder(header: str, tmp_path: Path) -> None:
    write(tmp_path, "1.png", "2.png", "unlisted.png")
    (tmp_path / "labels.csv").write_text(f"{header}2.png,dog\n1.png,cat\n")
    table = whole(tmp_path)
    assert [Path(image.path).name for image in table["image"]] == ["2.png", "1.png"]
    assert table["label"] == ["dog", "cat"]


def test_a_sheet_of_transcripts_names_the_sounds_of_a_flat_folder(tmp_path: Path) -> None:
    write(tmp_path, "1.wav", "2.wav")
    (tmp_path / "transcripts.tsv").write_text("1.wav\tone two\n2.wav\tthree\n")
    assert whole(tmp_path)["text"] == ["one two", "three"]


def test_a_sheet_may_not_name_files_outside_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "secret.png", "data/1.png")
    (tmp_path / "data" / "labels.csv").write_text("file,label\n1.png,a\n../secret.png,b\n")
    with pytest.raises(DataError, match=r"row 2: there is no file '\.\./secret\.png'"):
        whole(tmp_path / "data")


def test_images_without_labels_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1\.png has no label") as raised:
        whole(write(tmp_path, "1.png"))
    assert "labels.csv" in str(raised.value.hint)


def test_images_beside_sounds_are_ambiguous_until_the_format_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png", "a/1.wav")
    with pytest.raises(DataError, match="both images"):
        whole(tmp_path)
    assert set(whole(tmp_path, format="wav").columns) == {"audio", "label"}


def test_folders_named_train_and_test_are_parts(tmp_path: Path) -> None:
    write(tmp_path, *(f"train/{label}/{n}.png" for label in "ab" for n in range(5)))
    write(tmp_path, "test/a/9.png", "val/b/9.png")
    found = load_tables(DataSpec(train=str(tmp_path)), seed=0)
    assert found.validation is not None
    assert found.test is not None
    assert [len(found.train), len(found.validation), len(found.test)] == [10, 1, 1]
    assert found.test["label"] == ["a"]


def test_a_remote_folder_of_images_is_read_through_its_url() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/zoo/cat/1.png": b"cat", "/zoo/dog/2.png": b"dog"})
    table = whole("memory://zoo")
    assert table["label"] == ["cat", "dog"]
    assert table["image"][1].read() == b"dog"


def test_a_changed_pixel_changes_the_fingerprint(tmp_path: Path) -> None:
    before = whole(write(tmp_path, "a/1.png", "b/2.png")).fingerprint
    assert whole(tmp_path).fingerprint == before
    (tmp_path / "b" / "2.png").write_bytes(b"bytes of b/2.pnG")
    assert whole(tmp_path).fingerprint != before


def test_links_to_files_and_folders_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    root = write(tmp_path / "root", "cat/1.png")
    write(tmp_path / "elsewhere", "2.png")
    (root / "dog").symlink_to(tmp_path / "elsewhere")
    (root / "cat" / "3.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    (tmp_path / "elsewhere" / "circle").symlink_to(root)
    table = whole(root)
    assert table["label"] == ["cat", "cat", "dog"]
    assert table["image"][2].read() == b"bytes of 2.png"
