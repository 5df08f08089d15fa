from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from yunlu.core.errors import DataError
from yunlu.spec.job import DataSpec
from yunlu.training.data.sources import Tables, load_tables, read_text
from yunlu.training.data.synthetic import GENERATORS, generator_of
from yunlu.training.data.table import DataTable

if TYPE_CHECKING:
    from pathlib import Path


def load(train: object, *, seed: int = 0, **fields: Any) -> Tables:
    return load_tables(DataSpec.model_validate({"train": str(train), **fields}), seed=seed)


def write_numbers(path: Path, count: int, *, first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"{number},{number % 2}\n" for number in range(first, first + count))
    path.write_text("x,label\n" + rows)
    return path


def test_shares_are_held_out_and_nothing_is_lost(tmp_path: Path) -> None:
    found = load(write_numbers(tmp_path / "a.csv", 50), split={"validation": 0.1, "test": 0.2})
    assert found.validation is not None
    assert found.test is not None
    assert [len(found.train), len(found.validation), len(found.test)] == [35, 5, 10]
    everything = [*found.train["x"], *found.validation["x"], *found.test["x"]]
    assert sorted(everything) == list(range(50))


def test_a_seed_gives_the_same_parts_and_another_seed_others_of_the_same_data(
    tmp_path: Path,
) -> None:
    path = write_numbers(tmp_path / "a.csv", 50)
    first, again, other = load(path), load(path), load(path, seed=1)
    assert first.train.fingerprint == again.train.fingerprint
    assert first.train.fingerprint != other.train.fingerprint
    assert first.fingerprint == again.fingerprint == other.fingerprint


def test_one_changed_byte_changes_the_fingerprint(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "a.csv", 50)
    before = load(path).fingerprint
    path.write_text(path.read_text().replace("49,1", "49,0"))
    assert load(path).fingerprint != before


def test_named_parts_are_used_whole_and_only_the_rest_is_held_out(tmp_path: Path) -> None:
    train = write_numbers(tmp_path / "a.csv", 20)
    test = write_numbers(tmp_path / "b.csv", 7, first=100)
    found = load(train, test=str(test), split={"validation": 0.25})
    assert found.validation is not None
    assert found.test is not None
    assert [len(found.train), len(found.validation), len(found.test)] == [15, 5, 7]


def test_shares_of_zero_hold_nothing_out(tmp_path: Path) -> None:
    found = load(write_numbers(tmp_path / "a.csv", 5), split={"validation": 0, "test": 0})
    assert (len(found.train), found.validation, found.test) == (5, None, None)


def test_a_limit_bounds_every_part(tmp_path: Path) -> None:
    found = load(write_numbers(tmp_path / "a.csv", 100), limit=4)
    assert found.validation is not None
    assert found.test is not None
    assert [len(found.train), len(found.validation), len(found.test)] == [4, 4, 4]


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.json"])
def test_an_empty_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("[]" if name == "a.json" else "")
    with pytest.raises(DataError, match="empty"):
        load(tmp_path / name)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        load(tmp_path)


def test_a_folder_with_train_and_test_files_gives_those_parts(tmp_path: Path) -> None:
    write_numbers(tmp_path / "train.csv", 20)
    write_numbers(tmp_path / "dev.csv", 3)
    write_numbers(tmp_path / "test.csv", 4)
    found = load(tmp_path)
    assert found.validation is not None
    assert found.test is not None
    assert [len(found.train), len(found.validation), len(found.test)] == [20, 3, 4]


def test_shards_in_a_folder_are_one_table_in_the_order_of_names(tmp_path: Path) -> None:
    write_numbers(tmp_path / "part-1.csv", 5, first=5)
    write_numbers(tmp_path / "part-0.csv", 5)
    found = load(tmp_path, split={"validation": 0, "test": 0})
    assert list(found.train["x"]) == list(range(10))


def test_shards_of_several_formats_are_refused(tmp_path: Path) -> None:
    write_numbers(tmp_path / "a.csv", 5)
    (tmp_path / "b.jsonl").write_text('{"x": 1, "label": 2}\n')
    with pytest.raises(DataError, match="several formats"):
        load(tmp_path)
    assert len(load(tmp_path, format="csv").train) < 5


def test_shards_with_other_columns_are_refused(tmp_path: Path) -> None:
    write_numbers(tmp_path / "a.csv", 5)
    (tmp_path / "b.csv").write_text("x,other\n1,2\n")
    with pytest.raises(DataError, match=r"b\.csv has the columns x, other"):
        load(tmp_path)


def test_arrays_named_by_part_are_parts(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((8, 2)), "y_train": np.arange(8)}
    np.savez(tmp_path / "a.npz", **arrays, x_test=np.ones((3, 2)), y_test=np.arange(3))
    found = load(tmp_path / "a.npz", split={"validation": 0.25})
    assert found.validation is not None
    assert found.test is not None
    assert [len(found.train), len(found.validation), len(found.test)] == [6, 2, 3]
    assert set(found.test.columns) == {"x", "y"}


def test_a_remote_file_and_folder_read_like_local_ones(tmp_path: Path) -> None:
    local = write_numbers(tmp_path / "a.csv", 20)
    memory = fsspec.filesystem("memory")
    memory.pipe("/shelf/a.csv", local.read_bytes())
    for url in ("memory://shelf/a.csv", "memory://shelf"):
        found = load(url)
        assert list(found.train["x"]) == list(load(local).train["x"])
        assert found.fingerprint == load(url).fingerprint
    with pytest.raises(DataError, match=r"memory://.*b\.csv") as raised:
        load("memory://shelf/b.csv")
    assert "a.csv" in str(raised.value.hint)


def test_a_generated_path_is_read_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_numbers(tmp_path / "a.csv", 20)
    monkeypatch.setitem(GENERATORS, "numbers", lambda seed: path)
    assert list(load("synthetic:numbers").train["x"]) == list(load(path).train["x"])


def test_an_unknown_synthetic_set_suggests_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'films'"):
        load("synthetic:film")


def test_a_registered_maker_is_found_by_name() -> None:
    generator_of("tens")(lambda seed: DataTable({"x": np.arange(10)}))
    try:
        assert len(load("synthetic:tens").train) == 8
    finally:
        del GENERATORS["tens"]


def test_synthetic_films_do_not_depend_on_the_seed_of_the_job() -> None:
    first, second = load("synthetic:films"), load("synthetic:films", seed=5)
    assert first.fingerprint == second.fingerprint
    assert set(first.train.columns) == {"user", "item", "rating"}
    pairs = set(zip(first.train["user"], first.train["item"], strict=True))
    assert len(pairs) == len(first.train)


def test_raw_text_of_a_file_keeps_every_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\ttabs\n")
    assert read_text(str(tmp_path / "a.txt")) == "one\n\ntwo\ttabs\n"


def test_raw_text_of_a_folder_joins_its_text_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.csv").write_text("not,me")
    assert read_text(str(tmp_path)) == "first\nsecond"


def test_raw_text_that_is_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(DataError, match="empty"):
        read_text(str(tmp_path / "a.txt"))
