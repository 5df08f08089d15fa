"""Codec protocol, and the identity codec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from yunlu.core.errors import JobError
from yunlu.core.imports import CODECS, call_with, import_object, load_registered, names_object

if TYPE_CHECKING:
    from collections.abc import Callable

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


def make_codec(name: str, *, block: int | None = None, share: float = 0.01) -> Codec:
    """Make a codec; its factory gets those of the options that it names.

    PowerSGD is not among them: it needs the shapes of the weights.

    Args:
        name: Its name in a job.
        block: Values per scale (``int8``, ``int4``, ``onebit``).
        share: Share of values sent (``topk``, ``randomk``).
    """
    factory: Callable[..., Codec]
    if names_object(name):
        factory = import_object(name)
    else:
        factory = load_registered(CODECS, name, kind="codec")
    codec = call_with(factory, block=block, share=share)
    if not isinstance(codec, Codec):
        raise JobError(
            f"communication.codec: {name} is not a codec.",
            hint="it needs name, size_bytes, encode and decode; see yunlu.testing.codecs",
        )
    return codec
