"""Rules of a set of parameter servers, and tickets, the units of work."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from yunlu.core.value import Value
from yunlu.spec.communication import CodecName
from yunlu.spec.train import OptimizerSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


class ServerRules(Value):
    """How servers hold, hand out and update weights; equal for all of them."""

    steps: NotNegative
    """Last step."""
    first_step: NotNegative = 0
    """First step, after a checkpoint."""
    shards: Count = 1
    """Number of servers; each holds an equal range of the weights."""
    mode: Literal["bsp", "ssp", "asp"] = "ssp"
    """Whether workers wait for each other: at every step, when too far ahead, or never."""
    staleness: NotNegative = 2
    """SSP: a step may start at most this many steps after the oldest incomplete one."""
    shares: Count = 1
    """Tickets per step, each for a share of its samples. BSP sums their gradients; otherwise each is
    an update of its own, with the learning rate divided by their number."""
    backups: NotNegative = 0
    """BSP: shares of a step that may be missing; late ones are dropped (Chen et al. 2016)."""
    correction: Literal["none", "rate", "delay"] = "none"
    """Correction of stale gradients: none; the learning rate is divided by one more than
    the updates since (Zhang et al. 2016); or the gradient is extrapolated to the current weights
    by an estimate of the curvature (Zheng et al. 2017)."""
    delay_strength: Annotated[float, Field(ge=0)] = 0.04
    """Strength of delay compensation: lambda of Zheng et al. 2017."""
    codec: CodecName = "none"
    """Codec of gradients."""
    pull_codec: CodecName = "none"
    """Codec of weights sent to workers; a snapshot is exact."""
    codec_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of values sent by sparse codecs."""
    optimizer: OptimizerSpec = OptimizerSpec()
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    l2: Annotated[float, Field(ge=0)] = 0.0
    silence_s: Annotated[float, Field(gt=0)] = 120.0
    """A worker that is silent for longer is lost."""
    log_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """Log size at which the state is written instead."""
    sync: bool = False
    """Sync updates to disk before they are acknowledged, to survive a power failure."""

    @model_validator(mode="after")
    def _fit(self) -> ServerRules:
        if self.backups >= self.shares:
            raise ValueError(
                f"backups: {self.backups} of {self.shares} shares leave none that must arrive"
            )
        if self.backups and self.mode != "bsp":
            raise ValueError(f"backups: workers do not wait in mode {self.mode}")
        if self.mode == "bsp" and self.correction != "none":
            raise ValueError("correction: in mode bsp no gradient is stale")
        if self.optimizer.traits.needs_whole_weights or self.optimizer.state != "fp32":
            raise ValueError(
                "optimizer: servers hold ranges of weights, not layers; use adamw or sgd"
            )
        return self

    @property
    def needed(self) -> int:
        """Shares that a step needs."""
        return self.shares - self.backups


class Ticket(NamedTuple):
    """Unit of work: the samples of one share of one step."""

    step: int
    """From 0."""
    share: int = 0

    def number(self, rules: ServerRules) -> int:
        """Index among all tickets."""
        return self.step * rules.shares + self.share

    def exists(self, rules: ServerRules) -> bool:
        """Whether the ticket exists under these rules."""
        return rules.first_step <= self.step < rules.steps and 0 <= self.share < rules.shares


class TicketSet:
    """Set of completed tickets by number; all but the newest are stored as one number."""

    def __init__(self, below: int, beyond: Iterable[int] = ()) -> None:
        self.below = below
        self.beyond = set(beyond)

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def add(self, number: int) -> None:
        """Add a ticket."""
        if number >= self.below:
            self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1

    def pack(self) -> list[int]:
        """Serialized: the first incomplete ticket, then the completed ones above it."""
        return [self.below, *sorted(self.beyond)]

    @classmethod
    def unpack(cls, packed: list[int]) -> TicketSet:
        """Inverse of ``pack``."""
        return cls(packed[0], packed[1:])


def shard_ranges(length: int, shards: int) -> list[range]:
    """Range of the flat weights of each shard."""
    bounds = [length * index // shards for index in range(shards + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]
