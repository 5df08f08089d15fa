"""Groups of ranks for collectives, and how their tensor is split."""

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
    """Some ranks of a transport, each with a position in the group."""

    transport: Transport
    ranks: Sequence[int]
    tag: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def position(self) -> int:
        """Position of this worker."""
        return self.ranks.index(self.transport.rank)

    def session(self) -> TransportSession:
        """Open a session."""
        return self.transport.session(tag=self.tag)


def collective(
    function: Callable[Concatenate[Transport, P], None],
) -> Callable[Concatenate[Transport, P], None]:
    """Collective that aborts the transport if it fails, so that it ends on all workers."""

    @wraps(function)
    def run(transport: Transport, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(transport, *args, **kwargs)
        except BaseException:
            transport.abort()
            raise

    return run


def all_ranks(transport: Transport, tag: int) -> RankGroup:
    """All workers of a transport."""
    return RankGroup(transport, range(transport.size), tag)


def values_of(flat: Tensor) -> Values:
    """The same memory as a NumPy array, whose additions use no threads."""
    return flat.detach().numpy()


def split_evenly(length: int, parts: int) -> list[slice]:
    """Parts of nearly equal length; some may be empty."""
    bounds = [length * number // parts for number in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def segments(part: slice, item_bytes: int) -> list[slice]:
    """Split a part so that one segment is reduced while the next is received; none is empty."""
    length = part.stop - part.start
    min_items, max_items = (max(1, limit // item_bytes) for limit in _SEGMENT_BYTES)
    step = min(max(-(-length // _SEGMENTS), min_items), max_items)
    return [
        slice(start, min(start + step, part.stop)) for start in range(part.start, part.stop, step)
    ]


def collect(
    session: TransportSession,
    peers: Sequence[int],
    template: Values,
    on_complete: Callable[[list[Values]], object],
    *,
    channel: int = 0,
) -> None:
    """Receive an array like ``template`` from each peer; ``on_complete`` gets all of them, in order.

    Not summed on arrival: the sum must not depend on timing.
    """
    shares = [np.empty_like(template) for _ in peers]
    missing = len(shares)

    def count_down() -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            on_complete(shares)

    for peer, share in zip(peers, shares, strict=True):
        session.receive(peer, share, count_down, channel=channel)
    if not peers:
        on_complete([])


def add(total: Values, share: Values) -> None:
    """Add in place."""
    np.add(total, share, out=total)
