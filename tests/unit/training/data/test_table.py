from __future__ import annotations

import numpy as np
import pytest

from yunlu.core.errors import DataError
from yunlu.training.data.table import DataTable, FileRef, ImageRef


def small() -> DataTable:
    return DataTable({"x": np.arange(4.0), "word": ["a", "b", "c", "d"]})


def test_taking_rows_keeps_columns_together_and_remembers_where_they_stood() -> None:
    part = small().take([3, 1]).take([1])
    assert (part["x"][0], part["word"][0]) == (1.0, "b")
    assert part.source_row(0) == 2
    assert len(part) == 1


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(DataError, match="x: 2, y: 3"):
        DataTable({"x": [1, 2], "y": [1, 2, 3]})


def test_an_unknown_column_suggests_the_nearest() -> None:
    with pytest.raises(DataError) as raised:
        small()["wrod"]
    assert "did you mean 'word'?" in str(raised.value)


def test_equal_content_has_an_equal_fingerprint_and_any_change_another() -> None:
    original = small().fingerprint
    assert small().fingerprint == original
    changed = [
        DataTable({"x": np.array([0.0, 1.0, 2.0, 3.5]), "word": ["a", "b", "c", "d"]}),
        DataTable({"x": np.arange(4.0), "word": ["a", "b", "cd", ""]}),
        DataTable({"y": np.arange(4.0), "word": ["a", "b", "c", "d"]}),
        DataTable({"x": np.arange(4), "word": ["a", "b", "c", "d"]}),
        small().take([0, 1, 2, 3]),
    ]
    assert len({original, *(table.fingerprint for table in changed)}) == 6


def test_a_reference_reads_inline_bytes_before_its_path() -> None:
    assert ImageRef("/nowhere.png", b"pixels").read() == b"pixels"


def test_a_reference_to_a_missing_file_names_it() -> None:
    with pytest.raises(DataError, match=r"/nowhere/at/all\.png"):
        FileRef("/nowhere/at/all.png").read()
