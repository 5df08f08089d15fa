"""Codecs by name: registered by entry point, or the user's own ``module:Class``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.core.imports import call_with, import_object, names_object
from yunlu.spec.entry_points import CODECS, load_registered
from yunlu.training.communication.codecs.codec import Codec

if TYPE_CHECKING:
    from collections.abc import Callable


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
