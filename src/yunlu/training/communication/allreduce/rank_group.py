"""Workers that add up together, and how their tensor is cut up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from yunlu.training.communication.transport import Transport
    from yunlu.training.communication.transport_session import TransportSession

    Values = NDArray[Any]

P = ParamSpec("P")

_SEGMENT_BYTES = 16 << 10, 256 << 10
_SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some of a wire's workers, each with a position among them."""

    transport: Transport
    ranks: Sequence[int]
    tag: int

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @property
    def position(self) -> int:
        """Ours."""
        return self.ranks.index(self.transport.rank)

    def session(self) -> TransportSession:
        """Messages among them."""
        return self.transport.session(tag=self.tag)


def collective(
    function: Callable[Concatenate[Transport, P], None],
) -> Callable[Concatenate[Transport, P], None]:
    """A sum that, when it fails, ends on all workers: also on those that wait for none of the lost ones."""

    @wraps(function)
    def run(transport: Transport, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(transport, *args, **kwargs)
        except BaseException:
            transport.abort()
            raise

    return run


def all_ranks(transport: Transport, tag: int) -> RankGroup:
    """All workers of a wire."""
    return RankGroup(transport, range(transport.size), tag)


def values_of(flat: Tensor) -> Values:
    """The same memory for NumPy, whose additions ask for no threads."""
    return flat.detach().numpy()


def split_evenly(length: int, parts: int) -> list[slice]:
    """Parts of equal length, to one; some may be empty."""
    bounds = [length * number // parts for number in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def segments(part: slice, item_bytes: int) -> list[slice]:
    """A part in pieces: one can be added and sent on while the next one comes. None of it is empty."""
    length = part.stop - part.start
    least, most = (max(1, limit // item_bytes) for limit in _SEGMENT_BYTES)
    step = min(max(-(-length // _SEGMENTS), least), most)
    return [
        slice(start, min(start + step, part.stop)) for start in range(part.start, part.stop, step)
    ]


def collect(
    session: TransportSession,
    peers: Sequence[int],
    like: Values,
    then: Callable[[list[Values]], object],
    *,
    channel: int = 0,
) -> None:
    """Receive something like ours from each of some workers; ``then`` gets all of it, in their order.

    Not added as it comes: a sum must not depend on who was faster.
    """
    shares = [np.empty_like(like) for _ in peers]
    missing = len(shares)

    def note() -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            then(shares)

    for peer, share in zip(peers, shares, strict=True):
        session.receive(peer, share, note, channel=channel)
    if not peers:
        then([])


def add(total: Values, share: Values) -> None:
    """Add in place."""
    np.add(total, share, out=total)
