"""The optimiser's state shared out among replicas (Rajbhandari et al. 2020, stage 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from yunlu.training.parallel.tensor_slices import local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_SMALL_BYTES = 1 << 18
"""Smaller weights travel together; a larger one straight from and to its own memory."""


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What one owner sends at a time."""

    owner: int
    flat: Tensor
    views: list[Tensor]
    """Of the small weights in it; empty where ``flat`` is the weight itself."""
    weights: list[Tensor]


class OwnedWeights:
    """Each weight is updated by one replica, which sends it to the others.

    All replicas keep all gradients, summed; the optimiser is built over ``owned`` alone, and
    ``publish()`` follows each of its steps.

    Args:
        weights: The same on every replica, in the same order.
        group: The replicas.
    """

    def __init__(self, weights: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        self._me = dist.get_rank(group)
        locals_ = [local_of(weight).detach() for weight in weights]
        sizes = [local.nbytes for local in locals_]
        self.owners: tuple[int, ...] = choose_owners(sizes, dist.get_world_size(group))
        """Of each weight, as ranks of the group."""
        self.owned: list[Tensor] = [
            weight for weight, owner in zip(weights, self.owners, strict=True) if owner == self._me
        ]
        """What this replica updates, in the order given."""
        self._parcels = _pack(locals_, self.owners)

    @torch.no_grad()
    def publish(self) -> None:
        """Bring every weight from its owner to all."""
        works: list[dist.Work] = []
        for parcel in self._parcels:
            if parcel.owner == self._me:
                _copy(parcel.views, parcel.weights)
            work = dist.broadcast(
                parcel.flat, group=self._group, group_src=parcel.owner, async_op=True
            )
            assert work is not None
            works.append(work)
        for work, parcel in zip(works, self._parcels, strict=True):
            work.wait()
            if parcel.owner != self._me:
                _copy(parcel.weights, parcel.views)


def choose_owners(sizes: Sequence[int], replicas: int) -> tuple[int, ...]:
    """The largest first, each to who has least; the same wherever it is computed."""
    loads = [0] * replicas
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owner = min(range(replicas), key=lambda replica: (loads[replica], replica))
        owners[number] = owner
        loads[owner] += sizes[number]
    return tuple(owners)


def _pack(weights: Sequence[Tensor], owners: Sequence[int]) -> list[_Parcel]:
    parcels: list[_Parcel] = []
    small: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for weight, owner in zip(weights, owners, strict=True):
        if weight.nbytes >= _SMALL_BYTES and weight.is_contiguous():
            parcels.append(_Parcel(owner, weight, [], []))
        else:
            small.setdefault((owner, weight.dtype), []).append(weight)
    for (owner, dtype), together in small.items():
        sizes = [weight.numel() for weight in together]
        flat = torch.empty(sum(sizes), dtype=dtype, device=together[0].device)
        views = [
            view.view(weight.shape)
            for view, weight in zip(flat.split(sizes), together, strict=True)
        ]
        parcels.append(_Parcel(owner, flat, views, together))
    return parcels


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
