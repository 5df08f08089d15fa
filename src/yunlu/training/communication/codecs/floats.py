"""16-bit floats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from yunlu.training.communication.codecs.codec import put, read_as

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_EXPONENT = 15
"""Values below 2**15 do not overflow fp16 by rounding."""
_SMALLEST_EXPONENT = -100
_HEADER_BYTES = 4


class Fp16Codec:
    """fp16, scaled by a power of two so that the largest value is at the top of the range.

    Gradients are often below the range of fp16; a power of two loses no digits.
    """

    name = "fp16"

    def size_bytes(self, length: int) -> int:
        """Two bytes per value, and the exponent."""
        return _HEADER_BYTES + 2 * length if length else 0

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """See ``Codec``."""
        del seed
        if not len(values):
            return
        largest = float(values.abs().amax())
        # Values that are not finite have no exponent and are not scaled.
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
        power = _LARGEST_EXPONENT - max(exponent, _SMALLEST_EXPONENT)
        out[:_HEADER_BYTES].copy_(torch.tensor([power], dtype=torch.int32).view(torch.uint8))
        out[_HEADER_BYTES:].copy_((values * 2.0**power).to(torch.float16).view(torch.uint8))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See ``Codec``."""
        if not len(out):
            return
        power = int(read_as(data[:_HEADER_BYTES], torch.int32))
        put(read_as(data[_HEADER_BYTES:], torch.float16).float() * 2.0**-power, out, add=add)


class Bf16Codec:
    """bf16: the range of fp32 with eight significant bits."""

    name = "bf16"

    def size_bytes(self, length: int) -> int:
        """Two bytes per value."""
        return 2 * length

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """See ``Codec``."""
        del seed
        out.copy_(values.to(torch.bfloat16).view(torch.uint8))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See ``Codec``."""
        put(read_as(data, torch.bfloat16), out, add=add)
