"""Codec protocol, and the identity codec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Codec(Protocol):
    """Encodes fp32 values as bytes and back; the size depends only on the number of values.

    If all values are not finite, so are the decoded ones. Otherwise a codec may be lossy; see
    ``error_feedback``.
    """

    @property
    def name(self) -> str:
        """Name in a job."""
        ...

    def size_bytes(self, length: int) -> int:
        """Size of the encoding of so many values."""
        ...

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """Encode values.

        Args:
            values: One-dimensional, fp32, on the CPU.
            out: Bytes, ``size_bytes`` of them.
            seed: For random codecs: equal seeds select equal positions.
        """
        ...

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Decode into ``out``, or add to it."""
        ...


class IdentityCodec:
    """The values themselves."""

    name = "none"

    def size_bytes(self, length: int) -> int:
        """Four bytes per value."""
        return 4 * length

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """Copy."""
        del seed
        out.copy_(values.contiguous().view(torch.uint8))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Copy or add."""
        put(read_as(data, torch.float32), out, add=add)


def read_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as values; copied if not aligned."""
    size = dtype.itemsize
    return (data if data.storage_offset() % size == 0 else data.clone()).view(dtype)


def put(values: Tensor, out: Tensor, *, add: bool) -> None:
    """Copy or add."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)
