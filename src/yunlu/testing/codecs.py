"""Contract test of codecs, to inherit.

In your own test suite::

    class TestMyCodec(CodecContract):
        def make_codec(self):
            return MyCodec()

What a codec loses is kept and sent later (error feedback), so it may be lossy, but not biased for ever.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from yunlu.training.communication.codecs.codec import Codec

if TYPE_CHECKING:
    from torch import Tensor

_LENGTHS = (0, 1, 2, 7, 64, 1000, 70_001)
_ROUNDS = 400


class CodecContract:
    """Behaviour that exchanges of gradients rely on. Override ``make_codec``."""

    def make_codec(self) -> Codec:
        """A fresh codec, with small blocks or a large share where that can be chosen."""
        raise NotImplementedError

    def test_it_has_the_methods_of_a_codec(self) -> None:
        """And a name."""
        codec = self.make_codec()
        assert isinstance(codec, Codec)
        assert codec.name

    def test_the_size_depends_on_the_number_of_values_only(self) -> None:
        """Receivers make room before they know anything else; nothing beyond it is touched."""
        codec = self.make_codec()
        assert codec.size_bytes(0) == 0
        for length in _LENGTHS:
            assert codec.size_bytes(length) == codec.size_bytes(length)
            _round_trip(codec, _normal(length))

    def test_decoding_adds_what_it_would_have_written(self) -> None:
        """Sums are decoded into a running total."""
        codec = self.make_codec()
        for length in _LENGTHS[1:]:
            values = _normal(length)
            data = _encode(codec, values)
            added = torch.ones(length)
            codec.decode(data, added, add=True)
            torch.testing.assert_close(added, _round_trip(codec, values) + 1)

    def test_the_same_seed_gives_the_same_bytes(self) -> None:
        """Runs can be repeated; and the values themselves are not changed."""
        codec, values = self.make_codec(), _normal(1000)
        original = values.clone()
        assert torch.equal(_encode(codec, values), _encode(codec, values))
        assert torch.equal(values, original)

    def test_zeros_stay_zero(self) -> None:
        """A layer that does not learn must not drift."""
        assert not _round_trip(self.make_codec(), torch.zeros(700)).any()

    def test_values_that_are_not_finite_are_not_hidden(self) -> None:
        """A step that overflowed is skipped by all workers, or by none."""
        for bad in (math.nan, math.inf, -math.inf):
            assert not _round_trip(self.make_codec(), torch.full((700,), bad)).isfinite().all()

    def test_error_feedback_delivers_everything_in_the_end(self) -> None:
        """What is lost in one round is added to the next: the mean of all rounds is the value."""
        codec, values = self.make_codec(), _normal(300)
        residual, total = torch.zeros(300), torch.zeros(300)
        for seed in range(_ROUNDS):
            sent = _round_trip(codec, values + residual, seed=seed)
            residual += values - sent
            total += sent
        error = torch.linalg.vector_norm(total / _ROUNDS - values)
        assert float(error) < 0.5 * float(torch.linalg.vector_norm(values))


def _normal(length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(length))


def _encode(codec: Codec, values: Tensor, *, seed: int = 1) -> Tensor:
    # Between guards, at an odd offset: nothing else may be written, and nothing need be aligned.
    room = torch.full((codec.size_bytes(len(values)) + 2,), 77, dtype=torch.uint8)
    codec.encode(values, room[1:-1], seed=seed)
    assert room[0] == room[-1] == 77, "it wrote outside of its bytes"
    return room[1:-1]


def _round_trip(codec: Codec, values: Tensor, *, seed: int = 1) -> Tensor:
    result = torch.full_like(values, 5.0)
    codec.decode(_encode(codec, values, seed=seed), result)
    return result
