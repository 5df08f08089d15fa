from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from yunlu.training.data.batches import expected_padding, lengths_of, longest_samples
from yunlu.training.data.sample_order import StepOrder, make_order


class Known:
    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("lengths", [np.array([1, 2, 3]), np.array([[1, 2], [2, 2], [3, 1]])])
def test_samples_say_how_long_they_are(lengths: np.ndarray) -> None:
    assert lengths_of(Known(lengths)) is lengths


@pytest.mark.parametrize(
    "other", [None, [1, 2, 3], np.array([1, 2]), np.array([0.5, 1, 2]), np.array(3), len]
)
def test_what_is_no_array_of_lengths_is_left_alone(other: Any) -> None:
    assert lengths_of(Known(other)) is None
    assert lengths_of([1, 2, 3]) is None


def test_padding_is_what_the_longest_of_a_batch_leaves_over() -> None:
    lengths = np.array([1, 3, 2, 4])
    order = StepOrder(samples=4, batch=4, seed=0)
    assert expected_padding(lengths, order) == pytest.approx(1 - 10 / 16)
    # In micro-batches of two the step is sorted first: 1 with 2, 3 with 4.
    assert expected_padding(lengths, order, micro_batch=2) == pytest.approx(1 - 10 / 12)
    assert expected_padding(lengths, order, micro_batch=1) == 0


def test_each_side_is_padded_by_itself() -> None:
    sides = np.array([[1, 4], [3, 2]])
    order = StepOrder(samples=2, batch=2, seed=0)
    assert expected_padding(sides, order) == pytest.approx(1 - 10 / 14)


def test_batches_by_length_leave_a_few_percent_of_padding() -> None:
    # As many texts are: 61 tokens in the mean, 153 at p95, 256 at most.
    drawn = np.random.default_rng(0).lognormal(3.855, 0.714, 8000)
    lengths = np.clip(np.round(drawn), 3, 256).astype(np.int64)
    plain, bucketed = (
        expected_padding(lengths, make_order(8000, 8, 0, lengths=lengths, padding=padding))
        for padding in ("pad", "bucket")
    )
    assert plain > 0.5
    assert bucketed < 0.04


def test_the_longest_samples_come_first() -> None:
    assert longest_samples(np.array([3, 9, 1, 7]), 2).tolist() == [1, 3]
    assert longest_samples(np.array([[3, 1], [1, 9], [4, 4]]), 1).tolist() == [1]
