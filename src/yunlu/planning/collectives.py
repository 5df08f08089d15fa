"""Collectives: what each sends, and which ones a layout needs in a step. Pure.

The one table of communication volumes: layouts, search and the choice of communication methods read it. Ring
algorithms (Thakur, Rabenseifner and Gropp 2005): an all-gather or reduce-scatter among n sends (n - 1) / n of the
whole message through each worker, an all-reduce twice that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Link
    from yunlu.planning.layouts import Axis, Layout, SplitConstraints, WorkerShare

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "send"]
OWN_MESSAGES = 2
"""Exchanges of a step whatever the layout: counts, norm."""


def sent_share(collective: Collective, members: Any) -> Any:
    """Bytes that one of so many sends, per byte of the message; of a number or of a column."""
    if collective == "send":
        return 1.0
    times = 2.0 if collective == "all-reduce" else 1.0
    return times * (members - 1.0) / members


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective over one axis, so many times a step."""

    axis: Axis
    collective: Collective
    members: int
    message_bytes: float
    """Of one message, as a whole."""
    times: float

    @property
    def sent_bytes(self) -> float:
        """Sent by one worker in a step."""
        return self.times * sent_share(self.collective, self.members) * self.message_bytes

    def seconds(self, link: Link) -> float:
        """Of a step, nothing hidden: bandwidth, and a latency for every message."""
        return self.sent_bytes / link.bytes_per_s + self.times * link.message_s


def list_exchanges(
    layout: Layout, facts: SplitConstraints, share: WorkerShare
) -> tuple[Exchange, ...]:
    """What one worker exchanges in a step, as our engine does it."""
    cut, blocks = layout.tp * layout.pp, max(facts.layers / layout.pp, 1)
    edge, micros = facts.boundary_bytes * share.micro_batch, share.micros
    gathered = facts.weight_bytes / (cut * blocks)
    result: list[Exchange] = []

    def add(axis: Axis, collective: Collective, message_bytes: float, times: float) -> None:
        members = layout.size_of(axis)
        if members > 1:
            result.append(
                Exchange(
                    axis=axis,
                    collective=collective,
                    members=members,
                    message_bytes=message_bytes,
                    times=times,
                )
            )

    add("dp", "all-reduce", facts.gradient_bytes / (cut * layout.fsdp), 1)
    # Gathered before both passes of every micro-batch, and reduced after it.
    add("fsdp", "all-gather", gathered, 2 * micros * blocks)
    add("fsdp", "reduce-scatter", gathered, micros * blocks)
    # Two all-reduces in each pass of each block (Shoeybi et al. 2019, section 3).
    add("tp", "all-reduce", edge, 4 * blocks * micros)
    # Activations forward, gradients backward.
    add("pp", "send", edge, 2 * layout.stages_per_rank * micros)
    return tuple(result)
