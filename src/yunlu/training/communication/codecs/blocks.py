"""Block quantization: 8, 4 or 1 bit per value and a scale per block (Dettmers et al. 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from yunlu.training.communication.codecs.codec import put, read_as

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCALE_BYTES = 2
"""bf16: the full range, and as many digits as the values need."""
_ROUNDED_UP = 1 + 2**-8
"""Rounds a scale up to bf16."""


class _Packing(Protocol):
    """Quantization of blocks of one length."""

    bits: int
    multiple: int
    """Block lengths must be a multiple of this."""

    def pack(self, rows: Tensor, count: int, payload: Tensor) -> Tensor:
        """Fill ``payload`` and return the scales; ``count`` values of a row are not padding."""
        ...

    def unpack(self, payload: Tensor, scales: Tensor, rows: Tensor) -> None:
        """Fill ``rows``."""
        ...


class BlockQuantizer:
    """Values in blocks with a scale each; the last block may be shorter.

    A block whose scale is not finite is decoded as not finite.
    """

    def __init__(self, name: str, packing: _Packing, *, block: int) -> None:
        if block < packing.multiple or block % packing.multiple:
            raise ValueError(f"a block of {block} is not a multiple of {packing.multiple}")
        self.name, self.block = name, block
        self._packing = packing

    def size_bytes(self, length: int) -> int:
        """See ``Codec``."""
        scales = _SCALE_BYTES * -(-length // self.block)
        whole = length - length % self.block
        return scales + (whole + self._padded(length % self.block)) * self._packing.bits // 8

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """See ``Codec``."""
        del seed
        for scales, payload, start, count in self._pieces(len(values), out):
            rows = values[start : start + len(scales) * count].view(len(scales), count)
            if padding := self._padded(count) - count:
                rows = torch.nn.functional.pad(rows, (0, padding))
            packed_scales = self._packing.pack(rows, count, payload)
            scales.view(-1).copy_(packed_scales.view(torch.uint8).view(-1))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See ``Codec``."""
        for scales, payload, start, count in self._pieces(len(out), data):
            target = out[start : start + len(scales) * count].view(len(scales), count)
            width = self._padded(count)
            is_direct = width == count and not add
            rows = target if is_direct else torch.empty(len(scales), width)
            scale_values = read_as(scales.reshape(-1), torch.bfloat16).float().view(-1, 1)
            self._packing.unpack(payload, scale_values, rows)
            if not is_direct:
                put(rows[:, :count], target, add=add)

    def _pieces(self, length: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor, int, int]]:
        """Full blocks, then the short one: scales, payload, start and length."""
        whole, rest = divmod(length, self.block)
        blocks = whole + bool(rest)
        scales = data[: _SCALE_BYTES * blocks].view(blocks, _SCALE_BYTES)
        payload = data[_SCALE_BYTES * blocks :]
        end = whole * self.block * self._packing.bits // 8
        if whole:
            yield scales[:whole], payload[:end], 0, self.block
        if rest:
            yield scales[whole:], payload[end:], whole * self.block, rest

    def _padded(self, count: int) -> int:
        return -(-count // self._packing.multiple) * self._packing.multiple


class _Int8:
    bits, multiple = 8, 1

    def pack(self, rows: Tensor, count: int, payload: Tensor) -> Tensor:
        del count
        levels, scales = _round(rows, 127)
        payload.view(torch.int8).view(rows.shape).copy_(levels)
        return scales

    def unpack(self, payload: Tensor, scales: Tensor, rows: Tensor) -> None:
        rows.copy_(payload.view(torch.int8).view(rows.shape)).mul_(scales)


class _Int4:
    """First half of a block in the low bits, second half in the high bits."""

    bits, multiple = 4, 2

    def pack(self, rows: Tensor, count: int, payload: Tensor) -> Tensor:
        del count
        levels, scales = _round(rows, 7)
        low, high = levels.chunk(2, dim=1)
        # -7..7 become 1..15; two of them fit in a byte.
        payload.view(low.shape).copy_(torch.add(low, high, alpha=16).add_(8 + 8 * 16))
        return scales

    def unpack(self, payload: Tensor, scales: Tensor, rows: Tensor) -> None:
        low, high = rows.chunk(2, dim=1)
        packed = payload.view(low.shape)
        low.copy_(packed & 15)
        high.copy_(packed >> 4)
        rows.sub_(8).mul_(scales)


class _OneBit:
    """Signs, and the mean magnitude of a block (Seide et al. 2014; Karimireddy et al. 2019)."""

    bits, multiple = 1, 8

    def pack(self, rows: Tensor, count: int, payload: Tensor) -> Tensor:
        # NumPy: torch cannot pack bits, and its signbit takes ten times as long.
        signs = np.packbits(np.signbit(rows.numpy()))
        payload.copy_(torch.from_numpy(signs))
        return (rows.abs().sum(1) / count).to(torch.bfloat16)

    def unpack(self, payload: Tensor, scales: Tensor, rows: Tensor) -> None:
        signs = np.unpackbits(payload.numpy()).reshape(rows.shape)
        rows.copy_(torch.from_numpy(signs))
        rows.mul_(-2).add_(1).mul_(scales)


def _round(rows: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Integers up to ``largest``, and their scale."""
    scales = (rows.abs().amax(1) * (_ROUNDED_UP / largest)).to(torch.bfloat16)
    inverse = scales.float().reciprocal().nan_to_num_(nan=0.0, posinf=0.0)
    # Values that are not finite become arbitrary integers here: the scale is not finite.
    return torch.mul(rows, inverse.view(-1, 1)).round_(), scales


def make_int8(block: int | None = None) -> BlockQuantizer:
    """8 bits per value."""
    return BlockQuantizer("int8", _Int8(), block=block or 256)


def make_int4(block: int | None = None) -> BlockQuantizer:
    """4 bits per value."""
    return BlockQuantizer("int4", _Int4(), block=block or 64)


def make_one_bit(block: int | None = None) -> BlockQuantizer:
    """Signs only."""
    return BlockQuantizer("onebit", _OneBit(), block=block or 512)
