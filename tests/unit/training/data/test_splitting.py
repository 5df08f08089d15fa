from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.core.errors import DataError
from yunlu.training.data.sources import limit_indices, split_indices

shares = st.floats(0, 0.4)


@given(st.integers(3, 400), shares, shares, st.integers(0, 2**32 - 1))
def test_every_sample_is_in_exactly_one_part_and_no_part_is_empty(
    count: int, validation: float, test: float, seed: int
) -> None:
    parts = split_indices(count, {"validation": validation, "test": test}, seed=seed)
    joined = np.sort(np.concatenate(list(parts.values())))
    assert (joined == np.arange(count)).all()
    assert all(len(indices) for indices in parts.values())


def test_the_seed_alone_decides_the_split() -> None:
    first, again, other = (split_indices(100, {"test": 0.2}, seed=seed) for seed in (7, 7, 8))
    assert (first["test"] == again["test"]).all()
    assert (first["test"] != other["test"]).any()
    assert len(first["test"]) == 20


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_samples_to_split_are_refused_with_a_way_out(count: int) -> None:
    with pytest.raises(DataError, match="would leave none to train on") as raised:
        split_indices(count, {"validation": 0.1, "test": 0.1}, seed=0)
    assert "set their split to 0" in str(raised.value)


def test_a_limit_draws_over_the_whole_and_keeps_the_order() -> None:
    chosen = limit_indices(1000, 50, seed=3)
    assert len(chosen) == 50
    assert (np.diff(chosen) > 0).all()
    assert chosen.max() > 500
