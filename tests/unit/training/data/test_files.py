from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from yunlu.core.errors import DataError, MissingPartError
from yunlu.training.data.files import locate

if TYPE_CHECKING:
    from pathlib import Path


def test_a_missing_file_is_named_absolutely_with_similar_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reviews.csv").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as raised:
        locate("review.csv")
    assert f"no such file or folder: {tmp_path / 'review.csv'}" in raised.value.message
    assert "reviews.csv" in str(raised.value.hint)


def test_a_missing_folder_is_said_to_be_missing_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist either"):
        locate(str(tmp_path / "nowhere" / "a.csv"))


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert locate(f"file://{tmp_path}/a.txt").url == str(tmp_path / "a.txt")


def test_an_unknown_kind_of_storage_suggests_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 's3'"):
        locate("s33://bucket/key")


@pytest.mark.parametrize(
    ("url", "module", "install"),
    [("gs://b/k", "gcsfs", "pip install gcsfs"), ("s3://b/k", "s3fs", 'pip install "yunlu[s3]"')],
)
def test_a_missing_back_end_names_what_to_install(
    url: str, module: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    protocol = url.split(":", 1)[0]
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with pytest.raises(MissingPartError) as raised:
        locate(url)
    assert raised.value.hint == install


def test_a_fingerprint_follows_names_and_bytes_and_not_the_place(tmp_path: Path) -> None:
    def folder(name: str, files: dict[str, bytes]) -> str:
        for file, content in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return locate(str(tmp_path / name)).fingerprint()

    original = folder("a", {"x/1": b"one", "x/2": b"two"})
    assert folder("b", {"x/1": b"one", "x/2": b"two", ".hidden": b""}) == original
    assert folder("c", {"x/1": b"one", "x/2": b"twO"}) != original
    assert folder("d", {"y/1": b"one", "x/2": b"two"}) != original
    assert folder("e", {"x/1": b"onet", "x/2": b"wo"}) != original


def test_large_data_is_known_by_size_and_time_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.txt").write_text("a" * 100)
    monkeypatch.setattr("yunlu.training.data.files._HASHED_BYTES_LOCAL", 10)
    file = locate(str(tmp_path / "big.txt"))
    first = file.fingerprint()
    assert file.fingerprint() == first
    (tmp_path / "big.txt").write_text("a" * 101)
    assert file.fingerprint() != first
