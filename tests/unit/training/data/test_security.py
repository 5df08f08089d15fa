"""A file that would run code when unpickled is refused, and its code never runs."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from yunlu.core.errors import DataError
from yunlu.spec.job import DataSpec
from yunlu.training.data.sources import load_tables


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (Path.touch, (self.path,))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    path = tmp_path / "the-canary-sang"
    assert pickle.loads(pickle.dumps(Canary(path))) is None
    assert path.exists(), "the canary itself must work"
    path.unlink()
    return path


@pytest.mark.parametrize(
    "name", ["a.pkl", "a.pickle", "a.pt", "a.pth", "a.joblib", "a.npy", "a.npz", "a", "a.dat"]
)
def test_a_bare_pickle_never_runs_whatever_its_name(
    name: str, canary: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(DataError):
        load_tables(DataSpec(train=str(path)), seed=0)
    assert not canary.exists()


@pytest.mark.parametrize("form", ["text", "csv", "tsv", "jsonl", "parquet", "numpy"])
def test_a_pickle_never_runs_whatever_format_the_job_claims(
    form: str, canary: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(DataError):
        load_tables(DataSpec.model_validate({"train": str(path), "format": form}), seed=0)
    assert not canary.exists()


def test_a_pickle_is_refused_with_a_way_to_convert(canary: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(DataError, match="can run code") as raised:
        load_tables(DataSpec(train=str(path)), seed=0)
    assert ".parquet" in str(raised.value.hint)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_arrays_of_objects_never_run(name: str, canary: Path, tmp_path: Path) -> None:
    array = np.array([Canary(canary)] * 4, dtype=object)
    path = tmp_path / name
    if name == "a.npy":
        np.save(path, array, allow_pickle=True)
    else:
        np.savez(path, x=array)
    with pytest.raises(DataError, match="cannot be read as NumPy arrays"):
        load_tables(DataSpec(train=str(path)), seed=0)
    assert not canary.exists()


def test_a_pickle_inside_an_npz_never_runs(canary: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", pickle.dumps(Canary(canary)))
    with pytest.raises(DataError):
        load_tables(DataSpec(train=str(path)), seed=0)
    assert not canary.exists()


def test_pickled_bytes_in_rows_stay_bytes(canary: Path, tmp_path: Path) -> None:
    payload = pickle.dumps(Canary(canary), protocol=0)
    pq.write_table(pa.table({"x": [payload] * 20}), tmp_path / "a.parquet")
    record = json.dumps({"x": payload.decode("latin-1"), "__reduce__": "builtins.print"})
    (tmp_path / "a.jsonl").write_text((record + "\n") * 20)
    for name in ("a.parquet", "a.jsonl"):
        table = load_tables(DataSpec(train=str(tmp_path / name)), seed=0).train
        assert isinstance(table["x"][0], bytes | str)
    assert not canary.exists()
