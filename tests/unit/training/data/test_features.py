from __future__ import annotations

import numpy as np
import pytest

from yunlu.core.errors import DataError
from yunlu.training.data.table import (
    ONE_HOT_LIMIT,
    DataTable,
    FeatureMap,
    ImageRef,
    find_column,
    fit_features,
)


def fit(columns: dict[str, object], *, embed: bool = True) -> tuple[FeatureMap, DataTable]:
    table = DataTable(columns)  # pyright: ignore[reportArgumentType]
    return fit_features(table, list(columns), embed=embed), table


def test_numbers_are_standardised_by_the_training_data_alone() -> None:
    features, table = fit({"x": np.array([1.0, 2.0, 3.0])})
    train = features.encode(table)
    assert train.mean() == pytest.approx(0)
    assert train.std() == pytest.approx(1)
    later = features.encode(DataTable({"x": np.array([2.0, 102.0])}))
    assert later[0, 0] == pytest.approx(0)
    assert later[1, 0] == pytest.approx(100 / np.sqrt(2 / 3))


def test_a_missing_number_is_the_mean_with_an_indicator() -> None:
    features, table = fit({"x": np.array([1.0, np.nan, 3.0])})
    encoded = features.encode(table)
    assert encoded.tolist() == [[-1, 0], [0, 1], [1, 0]]


def test_a_number_missing_only_later_is_the_mean() -> None:
    features, _ = fit({"x": np.array([1.0, 3.0])})
    assert features.encode(DataTable({"x": np.array([np.nan])})).tolist() == [[0.0]]


def test_a_constant_or_wholly_missing_column_makes_no_noise() -> None:
    features, table = fit({"c": np.full(3, 0.1), "m": np.full(3, np.nan), "x": np.arange(3.0)})
    encoded = features.encode(table)
    assert np.isfinite(encoded).all()
    assert np.abs(encoded[:, :2]).max() < 1e-6


def test_words_are_one_hot_and_an_unseen_word_is_all_zeros() -> None:
    features, table = fit({"w": ["b", "a", "", "b"]})
    assert features.encode(table).tolist() == [[0, 1], [1, 0], [0, 0], [0, 1]]
    assert features.encode(DataTable({"w": ["zebra"]})).tolist() == [[0, 0]]


def test_many_words_are_numbered_for_an_embedding_in_the_last_column() -> None:
    words = [f"w{n % 60:02d}" for n in range(120)]
    features, table = fit({"w": words, "x": np.arange(120.0)})
    assert features.embedded_sizes == [61]
    assert features.encode(table)[:3, -1].tolist() == [1, 2, 3]
    assert features.width == 2


def test_many_words_are_cut_to_the_most_frequent_for_other_models() -> None:
    words = [f"w{n % 60:02d}" for n in range(120)] + ["w59"]
    features, _ = fit({"w": words}, embed=False)
    assert features.width == ONE_HOT_LIMIT
    assert "w59" in features.categories[0].values


def test_a_column_with_another_word_in_every_row_is_left_out() -> None:
    features, _ = fit({"id": [f"id{n}" for n in range(100)], "x": np.arange(100.0)})
    assert features.left_out == ["id"]
    assert features.width == 1


def test_vectors_are_as_many_features_as_they_have_entries() -> None:
    features, table = fit({"v": np.arange(12.0).reshape(3, 2, 2), "list": [[1, 2], [3, 4], [5, 6]]})
    assert features.encode(table).shape == (3, 6)


def test_an_infinite_number_names_its_row() -> None:
    with pytest.raises(DataError, match="'x' is infinite in row 2"):
        fit({"x": np.array([1.0, np.inf])})


def test_images_are_no_features() -> None:
    with pytest.raises(DataError, match="holds ImageRef"):
        fit({"image": [ImageRef("a.png")], "x": np.ones(1)})


def test_words_where_training_had_numbers_are_refused() -> None:
    features, _ = fit({"x": np.arange(3.0)})
    with pytest.raises(DataError, match="was numbers in training; here it has 'many'"):
        features.encode(DataTable({"x": ["many"]}))


def test_a_fitted_map_survives_json() -> None:
    features, table = fit({"x": np.array([1.0, np.nan, 3.0]), "w": ["a", "b", "a"]})
    again = FeatureMap.model_validate_json(features.model_dump_json())
    assert (again.encode(table) == features.encode(table)).all()


def test_a_column_is_found_in_any_customary_spelling() -> None:
    table = DataTable({"userId": [1], "ITEM_ID": [2]})
    assert find_column(table, None, ("user", "userid"), key="data.input") == "userId"
    assert find_column(table, None, ("itemid",), key="data.input") == "ITEM_ID"
    with pytest.raises(DataError, match=r"cannot tell which column is the target.*userId"):
        find_column(table, None, ("label",), key="data.target")
