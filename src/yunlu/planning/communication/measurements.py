"""Measured links, codecs and compute that a communication choice depends on. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import Field, model_validator

from yunlu.planning.machine_profile import FiniteFigures, MessageTime

if TYPE_CHECKING:
    from numpy.typing import NDArray

Row = tuple[float, ...]


class CodecCost(FiniteFigures):
    """Time of encoding and decoding on this machine."""

    name: str
    bytes_per_value: float = Field(gt=0)
    encode_s_per_value: float = Field(ge=0)
    decode_s_per_value: float = Field(ge=0)
    call_s: float = Field(default=0.0, ge=0)
    """Fixed cost of a call."""


class WireFigures(FiniteFigures):
    """Links between hosts, in the order in which the workers' ``hosts`` first name them.

    By host and not by worker: a host's upload and download are what is limited, and its workers share
    them.
    """

    hosts: tuple[str, ...] = Field(min_length=1)
    """Host of each worker."""
    latency_s: tuple[Row, ...]
    """From one host (row) to another, one way, of a message of next to no bytes; within it, on the diagonal."""
    bytes_per_s: tuple[Row, ...]
    """Of one message alone; on the diagonal between two workers of the host."""
    send_bytes_per_s: Row
    """Upload of a host while all hosts send to all."""
    receive_bytes_per_s: Row
    both_ways: float = Field(default=1.0, gt=0, le=1)
    """Share of the rate left while the same connection carries as much in the other direction."""
    extra_message_s: float = Field(default=0.0, ge=0)
    """Cost of each further message that a worker sends and receives at the same time."""
    add_bytes_per_s: float = Field(default=4e9, gt=0)
    """Rate at which one worker adds received values."""
    compute_s: Row = ()
    """Step time of each worker without exchange; empty before the first step."""
    all_reduce: MessageTime | None = None
    """torch's own sum, where it was tried: it passes messages in another way than ours.

    It takes the longer of the two: of gloo, what a small one takes is no part of a large one.
    """
    codecs: tuple[CodecCost, ...] = ()

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        count = len(self.host_names)
        tables = self.latency_s, self.bytes_per_s
        if any(len(table) != count or any(len(row) != count for row in table) for table in tables):
            raise ValueError(f"latency and rate must be given between {count} hosts")
        if {len(self.send_bytes_per_s), len(self.receive_bytes_per_s)} != {count}:
            raise ValueError(f"upload and download must be given for {count} hosts")
        rates = *self.send_bytes_per_s, *self.receive_bytes_per_s, *sum(self.bytes_per_s, ())
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError("rates must be above 0")
        if not all(math.isfinite(span) and span >= 0 for span in sum(self.latency_s, ())):
            raise ValueError("latencies cannot be below 0")
        if self.compute_s and len(self.compute_s) != len(self.hosts):
            raise ValueError("compute_s must be given for each worker")
        return self

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.hosts)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Each host once."""
        return tuple(dict.fromkeys(self.hosts))

    @property
    def host_numbers(self) -> NDArray[np.int64]:
        """Host index of each worker."""
        names = {name: number for number, name in enumerate(self.host_names)}
        return np.array([names[host] for host in self.hosts], dtype=np.int64)

    @property
    def slowest_compute_s(self) -> float | None:
        """Step time of the slowest worker."""
        return max(self.compute_s, default=None)

    def without(self, host: str) -> Self:
        """The same without the workers of a host; the others take over their samples."""
        numbers = [number for number, name in enumerate(self.host_names) if name != host]
        stay = [rank for rank, name in enumerate(self.hosts) if name != host]
        more = self.size / len(stay)

        def keep(row: Row) -> Row:
            return tuple(row[number] for number in numbers)

        return self.model_copy(
            update={
                "hosts": tuple(self.hosts[rank] for rank in stay),
                "latency_s": tuple(keep(self.latency_s[number]) for number in numbers),
                "bytes_per_s": tuple(keep(self.bytes_per_s[number]) for number in numbers),
                "send_bytes_per_s": keep(self.send_bytes_per_s),
                "receive_bytes_per_s": keep(self.receive_bytes_per_s),
                "compute_s": tuple(self.compute_s[rank] * more for rank in stay)
                if self.compute_s
                else (),
                "all_reduce": None,  # not measured among these
            }
        )

    def codec(self, name: str) -> CodecCost | None:
        """Cost of a codec, if measured."""
        return next((one_codec for one_codec in self.codecs if one_codec.name == name), None)


class SharedWork(FiniteFigures):
    """Compute between two exchanges, and the gradients to exchange."""

    gradient_bytes: tuple[int, ...]
    """Of each weight in fp32, in the order in which the backward pass yields them: the last weight first."""
    compute_s: float = Field(gt=0)
    """Step time of one worker without exchange: all passes and the optimiser."""
    backward_s: float = Field(ge=0)
    """Last backward pass of a step, which can overlap with the exchange."""
    matrices: tuple[tuple[int, int], ...] = ()
    """Shapes of the weights that PowerSGD compresses."""
    can_freeze: bool = True
    """Whether the optimiser can freeze its second moment."""
    memory_steps: int = Field(default=1000, ge=0)
    """Time constant of the second moment, in steps."""
    steps: int | None = None
    """Steps left."""
    is_replicated: bool = True
    """Whether each worker holds the whole model."""
    staleness: int = Field(default=4, ge=0)
    """Staleness bound of asynchronous workers, in steps."""
    hides: float = Field(default=1.0, ge=0, le=1)
    """Share of an exchange that overlaps with compute: below 1 where it uses the same cores."""
    staging_bytes_per_s: float | None = None
    """Bandwidth between a GPU and its host: our transports use host memory."""

    @property
    def bytes(self) -> int:
        """Size of all gradients."""
        return sum(self.gradient_bytes)
