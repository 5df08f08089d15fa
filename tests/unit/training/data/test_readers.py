from __future__ import annotations

import gzip
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.core.errors import DataError
from yunlu.training.data.files import locate
from yunlu.training.data.readers import READERS, format_of
from yunlu.training.data.table import as_column, parse_cells

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path, content: str | bytes, form: str | None = None) -> dict[str, Any]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    file = locate(str(path))
    return READERS[form or format_of(file)](file)


def test_a_text_file_has_one_sample_per_non_empty_line(tmp_path: Path) -> None:
    assert read(tmp_path / "a.txt", "one\n\n  two \r\nthree") == {
        "text": ["one", "  two ", "three"]
    }


def test_lines_of_label_tab_sentence_become_two_columns(tmp_path: Path) -> None:
    found = read(tmp_path / "a.txt", "good\tI liked it\nbad\tI did not\n")
    assert found == {"label": ["good", "bad"], "text": ["I liked it", "I did not"]}


def test_one_line_without_a_tab_among_many_is_an_error_that_names_it(tmp_path: Path) -> None:
    lines = ["good\tyes"] * 30 + ["oops"] + ["bad\tno"] * 30
    with pytest.raises(DataError, match="line 31: expected label<TAB>sentence"):
        read(tmp_path / "a.txt", "\n".join(lines))


def test_a_text_that_is_not_utf8_says_which_byte(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="byte 2 is 0xff"):
        read(tmp_path / "a.txt", b"ab\xff\xfe")


def test_csv_with_a_header_gives_typed_columns_and_nan_for_missing_numbers(tmp_path: Path) -> None:
    found = read(tmp_path / "a.csv", 'age,income,city\n31,1.5,"Oslo, N"\n42,,Lima\n')
    assert found["age"].dtype == np.int64
    assert found["age"].tolist() == [31, 42]
    assert found["income"][0] == 1.5
    assert np.isnan(found["income"][1])
    assert found["city"] == ["Oslo, N", "Lima"]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("a,b\n1,2\n3,4\n", ["a", "b"]),
        ("1,2\n3,4\n", ["column_1", "column_2"]),
        ("a,1\nb,2\n", ["column_1", "column_2"]),
        ("headline,topic\nShares fall,money\nCup won,sport\n", ["headline", "topic"]),
        ("sport,cup won at last\nsport,a draw again\n", ["label", "text"]),
        ("cup won at last,sport\na draw again,sport\n", ["text", "label"]),
        ("good,good\nsame,same\n", ["column_1", "column_2"]),
        (",a,b\n0,1,2\n1,3,4\n", ["a", "b"]),
        (",a,b\nx,1,2\ny,3,4\n", ["column_1", "a", "b"]),
        ("a;b;c\n1;2;3\n", ["a", "b", "c"]),
        ("\ufeffa,b\n1,2\n", ["a", "b"]),
    ],
)
def test_a_header_is_told_by_its_cells(tmp_path: Path, content: str, names: list[str]) -> None:
    assert list(read(tmp_path / "a.csv", content)) == names


def test_a_column_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than one column named 'a'"):
        read(tmp_path / "a.csv", "a,a,label\n1,2,yes\n3,4,no\n")


def test_a_row_with_other_cells_than_the_first_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3: 3 cells, where the first row has 2"):
        read(tmp_path / "a.csv", "a,b\n1,2\n1,2,3\n")


def test_a_csv_of_a_header_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="header and no rows"):
        read(tmp_path / "a.csv", "a,b\n")


def test_quotes_in_tsv_are_letters_unless_they_close(tmp_path: Path) -> None:
    loose = read(tmp_path / "a.tsv", 'label\ttext\n1\t"so" she said\n0\t5" nails\n')
    assert loose["text"] == ['"so" she said', '5" nails']
    closed = read(tmp_path / "b.tsv", 'label\ttext\n1\t"a\tb"\n')
    assert closed["text"] == ["a\tb"]


def test_json_lines_and_a_list_of_objects_read_alike(tmp_path: Path) -> None:
    records = [{"x": 1, "y": "a"}, {"x": 2, "y": "b", "z": [1, 2]}]
    lines = read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)) + "\n\n")
    whole = read(tmp_path / "a.json", json.dumps(records))
    for found in (lines, whole):
        assert found["x"].tolist() == [1, 2]
        assert found["y"] == ["a", "b"]
        assert found["z"] == [None, [1, 2]]


def test_a_broken_json_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2 is not valid JSON"):
        read(tmp_path / "a.jsonl", '{"x": 1}\n{"x": \n')


def test_a_json_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2: expected a JSON object, found int"):
        read(tmp_path / "a.jsonl", '{"x": 1}\n7\n')


def test_parquet_keeps_numbers_as_arrays_and_lists_as_lists(tmp_path: Path) -> None:
    table = pa.table({"n": [1, None, 3], "s": ["a", None, "c"], "v": [[1], [], [2, 3]]})
    pq.write_table(table, tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert np.isnan(found["n"][1])
    assert found["s"] == ["a", None, "c"]
    assert found["v"] == [[1], [], [2, 3]]


def test_a_torn_parquet_file_is_a_data_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
    torn = (tmp_path / "a.parquet").read_bytes()[:-20]
    with pytest.raises(DataError, match="not a complete Parquet file"):
        read(tmp_path / "a.parquet", torn)


def test_a_file_that_is_no_numpy_file_is_not_called_a_pickle(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither an \.npy nor an \.npz"):
        read(tmp_path / "a.npz", "a,b\n1,2\n")


def test_npz_arrays_become_columns_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=np.ones((3, 2)), y=np.array(["a", "b", "a"]))
    found = read(tmp_path / "a.npz", (tmp_path / "a.npz").read_bytes())
    assert found["X"].shape == (3, 2)
    assert found["y"] == ["a", "b", "a"]


def test_npy_fields_become_columns_and_a_plain_array_one(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([(1, 2.0)], dtype=[("n", "i8"), ("v", "f8")]))
    np.save(tmp_path / "b.npy", np.zeros((2, 3)))
    assert set(read(tmp_path / "a.npy", (tmp_path / "a.npy").read_bytes())) == {"n", "v"}
    assert read(tmp_path / "b.npy", (tmp_path / "b.npy").read_bytes())["x"].shape == (2, 3)


def test_the_first_bytes_tell_a_file_without_a_suffix(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    assert list(read(tmp_path / "array", buffer.getvalue())) == ["x"]
    assert list(read(tmp_path / "lines", '{"a": 1}\n')) == ["a"]


def test_a_file_of_unknown_format_says_how_to_name_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot tell the format") as raised:
        read(tmp_path / "notes.md", "hello")
    assert "set data.format" in str(raised.value)


def test_a_compressed_file_is_read_by_the_name_below(tmp_path: Path) -> None:
    found = read(tmp_path / "a.csv.gz", gzip.compress(b"a,b\n1,2\n"))
    assert found["b"].tolist() == [2]


def test_zero_padded_numbers_are_names() -> None:
    assert parse_cells(["007", "12"]) == ["007", "12"]
    assert isinstance(parse_cells(["0", "0.5", "-0.25"]), np.ndarray)


@given(st.lists(st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.none())))
def test_numbers_survive_the_trip_into_a_column(values: list[Any]) -> None:
    column = as_column(values)
    assert len(column) == len(values)
    for found, value in zip(column, values, strict=True):
        if value is None:
            assert found is None or np.isnan(found)
        else:
            assert found == pytest.approx(value)
