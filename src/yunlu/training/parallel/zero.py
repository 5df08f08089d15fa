"""ZeRO stage 1: optimiser state partitioned over replicas (Rajbhandari et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from yunlu.training.tensor_slices import local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_SMALL_BYTES = 1 << 18
"""Smaller weights are packed together; larger ones are sent in place."""


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """One broadcast of an owner."""

    owner: int
    flat: Tensor
    views: list[Tensor]
    """Views of the small weights in it; empty if ``flat`` is the weight itself."""
    weights: list[Tensor]


class OwnedWeights:
    """Each weight is updated by one replica, which broadcasts it to the others.

    All replicas hold all summed gradients; the optimiser is built over ``owned`` only, and
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
        """Owner of each weight, as a rank of the group."""
        self.owned: list[Tensor] = [
            weight for weight, owner in zip(weights, self.owners, strict=True) if owner == self._me
        ]
        """Weights that this replica updates."""
        self._broadcasts = _pack(locals_, self.owners)

    @torch.no_grad()
    def publish(self) -> None:
        """Broadcast every weight from its owner."""
        works: list[dist.Work] = []
        for broadcast in self._broadcasts:
            if broadcast.owner == self._me:
                _copy(broadcast.views, broadcast.weights)
            work = dist.broadcast(
                broadcast.flat, group=self._group, group_src=broadcast.owner, async_op=True
            )
            assert work is not None
            works.append(work)
        for work, broadcast in zip(works, self._broadcasts, strict=True):
            work.wait()
            if broadcast.owner != self._me:
                _copy(broadcast.weights, broadcast.views)


def choose_owners(sizes: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Assign weights to replicas: the largest first, to the least loaded; deterministic."""
    loads = [0] * replicas
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owner = min(range(replicas), key=lambda replica: (loads[replica], replica))
        owners[number] = owner
        loads[owner] += sizes[number]
    return tuple(owners)


def _pack(weights: Sequence[Tensor], owners: Sequence[int]) -> list[_Broadcast]:
    broadcasts: list[_Broadcast] = []
    small: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for weight, owner in zip(weights, owners, strict=True):
        if weight.nbytes >= _SMALL_BYTES and weight.is_contiguous():
            broadcasts.append(_Broadcast(owner, weight, [], []))
        else:
            small.setdefault((owner, weight.dtype), []).append(weight)
    for (owner, dtype), weights_of_owner in small.items():
        sizes = [weight.numel() for weight in weights_of_owner]
        flat = torch.empty(sum(sizes), dtype=dtype, device=weights_of_owner[0].device)
        views = [
            view.view(weight.shape)
            for view, weight in zip(flat.split(sizes), weights_of_owner, strict=True)
        ]
        broadcasts.append(_Broadcast(owner, flat, views, weights_of_owner))
    return broadcasts


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
