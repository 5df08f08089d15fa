"""P2P groups: process groups of two neighbouring stages, one for each direction and kind of their messages.

The libraries of accelerators know no tags: what a worker posts in one group, sends and receives, is made
in that order, and a send ends when the other end receives. In a group of all stages a receive posted early
would hold up the sends behind it, for which the other end may be waiting. On a P2P group one end only sends and
the other only receives, both in the order of the schedule, and P2P groups do not wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from yunlu.training.device import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from yunlu.planning.layouts import Layout

P2PKind = Literal["activation", "gradient"]
Edge = tuple[int, int]
"""Sender and receiver, by their ranks in the pipeline."""


@dataclass(frozen=True, slots=True)
class P2PGroup:
    """One end of a P2P group."""

    group: Any
    peer: int
    """The other end's rank in the group."""

    def send(self, tensor: torch.Tensor) -> Any:
        """Start sending."""
        return dist.isend(tensor, group=self.group, group_dst=self.peer)

    def receive(self, buffer: torch.Tensor) -> Any:
        """Start receiving."""
        return dist.irecv(buffer, group=self.group, group_src=self.peer)


@dataclass(kw_only=True)
class P2PGroups:
    """The P2P groups of one worker, by kind and the other end's rank in the pipeline."""

    outgoing: dict[tuple[P2PKind, int], P2PGroup] = field(default_factory=dict[Any, P2PGroup])
    incoming: dict[tuple[P2PKind, int], P2PGroup] = field(default_factory=dict[Any, P2PGroup])
    _ends: list[tuple[P2PGroup, bool]] = field(default_factory=list[tuple[P2PGroup, bool]])
    """In the order in which all workers formed them, and whether this one sends."""
    _is_open: bool = False

    def open(self, device: torch.device) -> None:
        """Send something over each P2P group, once: its ends meet in the first message, and their hosts wait.

        In a step they would wait in different orders. All workers of a pipeline call this.
        """
        if self._is_open:
            return
        for p2p_group, is_sender in self._ends:
            nothing = torch.zeros(1, device=device)
            (p2p_group.send(nothing) if is_sender else p2p_group.receive(nothing)).wait()
        self._is_open = True

    def find_outgoing(self, to: int) -> P2PGroup | None:
        """A P2P group for messages of other kinds, which both ends exchange when no others are under way."""
        return self.outgoing.get(("activation", to)) or self.outgoing.get(("gradient", to))

    def find_incoming(self, source: int) -> P2PGroup | None:
        """The other end of ``find_outgoing``."""
        return self.incoming.get(("activation", source)) or self.incoming.get(("gradient", source))


def rounds(layout: Layout) -> list[tuple[P2PKind, list[Edge]]]:
    """The P2P groups of a pipeline, in rounds: in each a worker has at most one."""
    ranks = layout.pp
    upward: list[Edge] = [(rank, rank + 1) for rank in range(ranks - 1)]
    parts = [upward[::2], upward[1::2]]
    # From the last to the first: of interleaved stages, and of weights that both hold.
    closing = (ranks - 1, 0)
    if layout.stages_per_rank > 1 or ranks > 2:
        if ranks % 2:
            parts.append([closing])
        else:
            parts[1].append(closing)
    group_rounds: list[tuple[P2PKind, list[Edge]]] = []
    for edges in filter(None, parts):
        group_rounds.append(("activation", edges))
        group_rounds.append(("gradient", [(receiver, sender) for sender, receiver in edges]))
    return group_rounds


def form_p2p_groups(
    layout: Layout,
    rank: int,
    pipelines: Sequence[Sequence[int]],
    *,
    device: torch.device,
    timeout: timedelta,
) -> P2PGroups:
    """Form the P2P groups of all pipelines, given as the workers of each; all workers call this."""
    p2p_groups = P2PGroups()
    mine = next(pipeline for pipeline in pipelines if rank in pipeline)
    position = mine.index(rank)
    for kind, edges in rounds(layout):
        busy = {end for edge in edges for end in edge}
        # Who has no P2P group in a round makes a group of its own: the names of groups count them.
        pairs = [*edges, *((single,) for single in range(layout.pp) if single not in busy)]
        members = [
            sorted(pipeline[end] for end in pair) for pipeline in pipelines for pair in pairs
        ]
        group = _make_group(members, rank, device, timeout)
        edge = next((edge for edge in edges if position in edge), None)
        if edge is None:
            continue
        is_sender = edge[0] == position
        other = edge[1] if is_sender else edge[0]
        p2p_group = P2PGroup(group, int(mine[other] > rank))
        (p2p_groups.outgoing if is_sender else p2p_groups.incoming)[kind, other] = p2p_group
        p2p_groups._ends.append((p2p_group, is_sender))  # pyright: ignore[reportPrivateUsage]
    return p2p_groups


def _make_group(
    members: list[list[int]], rank: int, device: torch.device, timeout: timedelta
) -> Any:
    """This worker's group among those into which all workers are divided."""
    backend = backend_of(device)
    world: Any = dist.group.WORLD
    if world.bound_device_id is not None:  # its library divides a group among all its workers
        return dist.split_group(
            split_ranks=members, timeout=timeout, backend=f"{device.type}:{backend}"
        )
    return dist.new_group(
        next(group for group in members if rank in group),
        timeout=timeout,
        backend=backend,
        use_local_synchronization=True,
    )
