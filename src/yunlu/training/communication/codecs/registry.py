"""Codecs by their names in jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.training.communication.codecs.blocks import INT4, INT8, ONE_BIT, BlockQuantizer
from yunlu.training.communication.codecs.codec import IdentityCodec
from yunlu.training.communication.codecs.floats import Bf16Codec, Fp16Codec
from yunlu.training.communication.codecs.sparse import RandomKCodec, TopKCodec

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.training.communication.codecs.codec import Codec


def make_codec(name: str, *, block: int | None = None, share: float = 0.01) -> Codec:
    """Make a codec.

    Args:
        name: One of ``CODECS``.
        block: Values per scale (``int8``, ``int4``, ``onebit``).
        share: Share of values sent (``topk``, ``randomk``).
    """
    try:
        make = CODECS[name]
    except KeyError:
        raise ValueError(f"unknown codec {name!r}; choose one of {', '.join(CODECS)}") from None
    return make(block, share)


CODECS: dict[str, Callable[[int | None, float], Codec]] = {
    "none": lambda _block, _share: IdentityCodec(),
    "fp16": lambda _block, _share: Fp16Codec(),
    "bf16": lambda _block, _share: Bf16Codec(),
    "int8": lambda block, _share: BlockQuantizer("int8", INT8, block=block or 256),
    "int4": lambda block, _share: BlockQuantizer("int4", INT4, block=block or 64),
    "onebit": lambda block, _share: BlockQuantizer("onebit", ONE_BIT, block=block or 512),
    "topk": lambda _block, share: TopKCodec(share),
    "randomk": lambda _block, share: RandomKCodec(share),
}
"""PowerSGD is not among them: it needs the shapes of the weights."""
