"""What a set of parameter servers is asked to do, and the tickets by which work is handed out."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from yunlu.core.value import Value
from yunlu.spec.train import OptimizerSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


class ServerRules(Value):
    """How servers hold, hand out and change weights; the same for all of them."""

    steps: NotNegative
    """Where training ends."""
    first_step: NotNegative = 0
    """Where it begins: of a run that goes on from a checkpoint, the steps it has."""
    shards: Count = 1
    """Servers; each holds an equal run of the weights."""
    mode: Literal["bsp", "ssp", "asp"] = "ssp"
    """Whether workers wait for each other: at every step, when too far ahead, or never."""
    staleness: NotNegative = 2
    """SSP: so many steps may the one a worker begins be after the oldest that is not over."""
    shares: Count = 1
    """Tickets of one step, each a part of its samples. BSP adds their gradients up; otherwise each is
    an update of its own, at a rate divided by their number."""
    backups: NotNegative = 0
    """BSP: so many shares of a step need not come; what comes late is dropped (Chen et al. 2016)."""
    correction: Literal["none", "rate", "delay"] = "none"
    """What is done about a gradient of older weights: nothing; the rate is divided by one more than
    the updates since (Zhang et al. 2016); or the gradient is carried over to the weights as they are,
    by a guess of the curvature (Zheng et al. 2017)."""
    delay_strength: Annotated[float, Field(ge=0)] = 0.04
    """How far the correction of delay is trusted: lambda of Zheng et al. 2017."""
    codec: str = "none"
    """How gradients are packed on their way."""
    pull_codec: str = "none"
    """How weights are packed on their way to workers; a snapshot has them as they are."""
    codec_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Of the values that travel, where the codec leaves some out."""
    optimizer: OptimizerSpec = OptimizerSpec()
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    l2: Annotated[float, Field(ge=0)] = 0.0
    silence_s: Annotated[float, Field(gt=0)] = 120.0
    """A worker that owes us a word for longer counts as lost."""
    log_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """When the log of updates has grown so far, the weights are written instead."""
    sync: bool = False
    """Also wait for the disk before an update is acknowledged: it then outlives a power cut."""

    @model_validator(mode="after")
    def _fit(self) -> ServerRules:
        if self.backups >= self.shares:
            raise ValueError(
                f"backups: {self.backups} of {self.shares} shares leave none to wait for"
            )
        if self.backups and self.mode != "bsp":
            raise ValueError(f"backups: nobody waits in mode {self.mode}")
        if self.mode == "bsp" and self.correction != "none":
            raise ValueError("correction: in mode bsp no gradient is of older weights")
        if self.optimizer.name in {"lamb", "lars"} or self.optimizer.state != "fp32":
            raise ValueError(
                "optimizer: servers hold runs of weights, not layers; use adamw or sgd"
            )
        return self

    @property
    def needed(self) -> int:
        """Shares without which a step does not end."""
        return self.shares - self.backups


class Ticket(NamedTuple):
    """A piece of work: the samples of one share of one step."""

    step: int
    """From 0."""
    share: int = 0

    def number(self, rules: ServerRules) -> int:
        """Its place among all tickets."""
        return self.step * rules.shares + self.share

    def exists(self, rules: ServerRules) -> bool:
        """Whether these rules know such a ticket."""
        return rules.first_step <= self.step < rules.steps and 0 <= self.share < rules.shares


class TicketSet:
    """Which tickets are over, by number; all but the newest are one number."""

    def __init__(self, below: int, beyond: Iterable[int] = ()) -> None:
        self.below = below
        self.beyond = set(beyond)

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def add(self, number: int) -> None:
        """Mark one."""
        if number >= self.below:
            self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1

    def pack(self) -> list[int]:
        """As it is kept in a file: the first that is not over, then those above it that are."""
        return [self.below, *sorted(self.beyond)]

    @classmethod
    def unpack(cls, packed: list[int]) -> TicketSet:
        """The opposite."""
        return cls(packed[0], packed[1:])


def shard_ranges(length: int, shards: int) -> list[range]:
    """Which of the flat weights each shard holds."""
    bounds = [length * index // shards for index in range(shards + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]
