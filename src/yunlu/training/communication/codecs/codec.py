"""The door for compressors, and the one that leaves everything as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    """Turns fp32 numbers into bytes and back; how many bytes is known from how many numbers.

    Numbers that are all not finite come back as not finite. Apart from that a codec may lose what it
    likes: see ``residual``.
    """

    @property
    def name(self) -> str:
        """As a job names it."""
        ...

    def size_bytes(self, length: int) -> int:
        """Bytes of the encoding of so many numbers."""
        ...

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """Write the encoding.

        Args:
            values: One dimension, fp32, on the CPU.
            out: Bytes, ``size_bytes`` of them.
            seed: For codecs that draw lots: who uses the same one draws the same ones.
        """
        ...

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Set ``out`` to what ``data`` says, or add to it."""
        ...


class IdentityCodec:
    """The numbers themselves."""

    name = "none"

    def size_bytes(self, length: int) -> int:
        """Four for each."""
        return 4 * length

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """Copy."""
        del seed
        out.copy_(values.contiguous().view(torch.uint8))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Copy or add."""
        put(read_as(data, torch.float32), out, add=add)


def read_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; copied where they begin at an odd place."""
    size = dtype.itemsize
    return (data if data.storage_offset() % size == 0 else data.clone()).view(dtype)


def put(values: Tensor, out: Tensor, *, add: bool) -> None:
    """Set or add."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)
