from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from yunlu.core.errors import JobError
from yunlu.training.communication.codecs.codec import make_codec
from yunlu.training.communication.codecs.sparse import count_selected, find_largest

_MARGINS = {"none": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 0.51 / 127 * 1.01, "int4": 0.08}
"""The most a number may be off by, relative to the largest: half a level, and the scale rounded up."""

CODECS = ("none", "fp16", "bf16", "int8", "int4", "onebit", "topk", "randomk")


def normal(length: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale


def there_and_back(name: str, values: Tensor, *, seed: int = 1) -> Tensor:
    codec = make_codec(name)
    # Between guards, and at an odd place: nothing else may be written to, or asked to be aligned.
    room = torch.full((codec.size_bytes(len(values)) + 2,), 77, dtype=torch.uint8)
    codec.encode(values, room[1:-1], seed=seed)
    assert room[0] == room[-1] == 77
    found = torch.full_like(values, 5.0)
    codec.decode(room[1:-1], found)
    added = torch.ones_like(values)
    codec.decode(room[1:-1], added, add=True)
    assert torch.allclose(added, found + 1, equal_nan=True)
    return found


@pytest.mark.parametrize("name", _MARGINS)
@given(
    length=st.integers(0, 1100),
    scale=st.sampled_from([1e-30, 1e-12, 1e-4, 1.0, 1e5, 1e30]),
    seed=st.integers(0, 9),
)
@settings(max_examples=25)
def test_every_number_comes_back_within_half_a_level(
    name: str, length: int, scale: float, seed: int
) -> None:
    values = normal(length, seed, scale)
    found = there_and_back(name, values)
    largest = float(values.abs().max()) if length else 0.0
    assert length == 0 or float((found - values).abs().max()) <= _MARGINS[name] * largest


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("none", 4 * 1000),
        ("fp16", 4 + 2 * 1000),
        ("bf16", 2 * 1000),
        ("int8", 2 * 4 + 1000),
        ("int4", 2 * 16 + 500),
        ("onebit", 2 * 2 + 125),
        ("topk", 4 + 4 * 10),
        ("randomk", 8 + 2 * 10),
    ],
)
def test_sizes_are_known_beforehand(name: str, size: int) -> None:
    assert make_codec(name).size_bytes(1000) == size
    assert make_codec(name).size_bytes(0) == 0


@pytest.mark.parametrize("length", [1, 7, 8, 512, 513, 1031])
def test_one_bit_gives_the_sign_and_the_mean_size_of_each_block(length: int) -> None:
    values = normal(length)
    expected = torch.cat([block.sign() * block.abs().mean() for block in values.split(512)])
    assert torch.allclose(there_and_back("onebit", values), expected, rtol=2**-8)


@given(length=st.integers(1, 70_000), share=st.floats(0.0001, 1.0), seed=st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_top_k_keeps_exactly_the_largest(length: int, share: float, seed: int) -> None:
    # Few distinct sizes: many are equal.
    sizes = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(seed)).numpy()
    kept = count_selected(length, share)
    places = find_largest(sizes, kept)
    assert len(np.unique(places)) == kept
    assert (np.diff(places) > 0).all()
    assert sorted(sizes[places]) == sorted(sizes)[length - kept :]


def test_top_k_is_exact_where_a_sample_misleads() -> None:
    # Every place that is looked at first holds a number larger than all others.
    length = 10 * (1 << 14)
    values = normal(length).abs().clamp(max=3)
    values[::10] += 10
    expected = torch.zeros(length)
    largest = values.topk(count_selected(length, 0.01)).indices
    expected[largest] = values[largest]
    assert torch.allclose(there_and_back("topk", values), expected, rtol=2**-8)
    values = normal(length).abs()
    values[::10] = 0  # and here, only zeros
    expected = torch.zeros(length)
    largest = values.topk(count_selected(length, 0.01)).indices
    expected[largest] = values[largest]
    assert torch.allclose(there_and_back("topk", values), expected, rtol=2**-8)


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**62))
@settings(max_examples=25)
def test_random_k_keeps_the_numbers_that_the_seed_tells(length: int, seed: int) -> None:
    values = normal(length).abs() + 1
    found = there_and_back("randomk", values, seed=seed)
    kept = found != 0
    assert int(kept.sum()) == count_selected(length, 0.01)
    assert torch.allclose(found[kept], values[kept], rtol=2**-8)
    assert torch.equal(kept, there_and_back("randomk", -values, seed=seed) != 0)


def test_random_k_reaches_every_number() -> None:
    values = torch.ones(1000)
    seen = sum(there_and_back("randomk", values, seed=seed) for seed in range(1500))
    assert isinstance(seen, Tensor)
    assert float(seen.min()) > 0
    assert float(seen.mean()) == pytest.approx(15.0)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    assert not there_and_back(name, torch.full((700,), bad)).isfinite().all()
    if name != "randomk":  # it may not look at that one: sums see to it
        values = normal(700)
        values[300] = bad
        assert not there_and_back(name, values).isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_nothing_but_zeros_stays_zero(name: str) -> None:
    assert not there_and_back(name, torch.zeros(700)).any()


def test_half_precision_keeps_gradients_that_it_has_no_numbers_for() -> None:
    values = normal(1000, scale=1e-9)
    assert torch.allclose(there_and_back("fp16", values), values, rtol=1e-3, atol=1e-15)


def test_larger_blocks_and_shares_can_be_asked_for() -> None:
    assert make_codec("int4", block=128).size_bytes(640) == 2 * 5 + 320
    assert make_codec("topk", share=0.1).size_bytes(1000) == 4 + 4 * 100
    with pytest.raises(ValueError, match="multiple of 8"):
        make_codec("onebit", block=100)
    with pytest.raises(ValueError, match="above 0"):
        make_codec("topk", share=0.0)
    with pytest.raises(JobError, match="There is no codec 'int3'"):
        make_codec("int3")


def test_places_beyond_the_tensor_are_refused() -> None:
    codec = make_codec("topk")
    data = torch.zeros(codec.size_bytes(1000), dtype=torch.uint8)
    codec.encode(normal(1000), data, seed=0)
    data[4:24] = 255
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds"):
        codec.decode(data, torch.zeros(1000))
