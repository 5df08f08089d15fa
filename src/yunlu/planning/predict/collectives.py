"""Rings of devices: latency and bandwidth, within and between nodes. Pure.

Volumes are those of ``planning.collectives``. A ring over several nodes crosses the network with as many cards as it
has members in a node, so its bandwidth is the lesser of the link's and of those cards' (as in NCCL).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.collectives import sent_share

if TYPE_CHECKING:
    from yunlu.planning.predict.query_batch import Column, QueryBatch


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of devices: number of members, latency and bandwidth."""

    members: Column
    bytes_per_s: Column
    latency_s: Column

    def gather_s(self, message_bytes: Column) -> Column:
        """All-gather or reduce-scatter of a message of this total size; 0 for one member."""
        share = sent_share("all-gather", self.members)
        return share * (message_bytes / self.bytes_per_s) + self.latency_s

    def reduce_s(self, message_bytes: Column) -> Column:
        """All-reduce."""
        share = sent_share("all-reduce", self.members)
        return share * (message_bytes / self.bytes_per_s) + self.latency_s


def make_ring(
    points: QueryBatch, members: Column, inside: Column, constants: dict[str, Any]
) -> Ring:
    """A ring of ``members``, of which ``inside`` are in the same node."""
    link = points.link_bytes_per_s * constants["link_share"]
    network = points.network_bytes_per_s * constants["network_share"]
    crosses = members > inside
    # Rings with some members in each node share its NICs with other rings.
    crowded = (inside > 1.0) & (inside < points.node_devices)
    cards = np.where(crowded, inside / constants["crowding"], inside)
    bandwidth = np.where(crosses, np.minimum(link, network * cards), link)
    # NCCL's latency on A100s of one node: 45, 53 and 77 us among 2, 4 and 8 (vTrain's tables).
    hops = np.where(members > 1.0, 1.0 + np.log2(members), 0.0)
    latency = hops * np.where(crosses, constants["network_latency_s"], constants["link_latency_s"])
    return Ring(members, bandwidth, latency)
