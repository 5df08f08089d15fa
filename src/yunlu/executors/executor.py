"""``Executor``: the door to places that run jobs, and its values.

A run's *placement* is realised by *leases*: one process tree on one node, with some of its devices.
The first lease, the lead, supervises the run; the others join it. A run grows and shrinks as leases
come and go, through the worker group's own machinery: no sample is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from yunlu.core.errors import YunluError
from yunlu.hardware.fleet import NOTHING, Placement

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from yunlu.executors.lease_record import Lease, LeaseEvent
    from yunlu.hardware.fleet import Node
    from yunlu.runs.run_store import RunStore

SPOT = "-spot"
"""What the names of spot machines end with."""
GROUP = "yunlu.executors"
"""Executors are found by this entry point: a class that is made from an address."""


class ExecutorError(YunluError):
    """A cluster is absent, refuses, or does not answer; its own words are in the message."""

    code = "executor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What may be expected of an executor; a contract test holds it to that."""

    resizes_live: bool = True
    """A running run can get more or fewer devices without being stopped."""
    moves_lead: bool = False
    """Even the devices that a run started with can be taken away live."""
    queues: bool = False
    """The cluster has a queue of its own: a run that was started may have to wait there."""
    requeues: bool = False
    """The cluster itself starts again what it preempted."""
    scales: bool = False
    """Nodes can be asked for and given back: it is a ``NodeScaling`` too."""
    limits: str = ""
    """How a run is kept to its devices, in words; empty where it is not."""


class LeaseState(StrEnum):
    """Where a lease stands."""

    WAITING = "waiting"  # in the cluster's queue, or its node is still being made
    RUNNING = "running"
    LEAVING = "leaving"  # not wanted any more, and not yet gone
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    """One lease as the executor sees it now."""

    lease: Lease
    state: LeaseState
    reason: str = ""
    """Why it waits, or why it is gone; in words, the cluster's own included."""
    node: str = ""
    """Where it runs; it may not be where it was wanted."""
    has_lost_node: bool = False
    """Whether it is gone because its machine is, as far as that is known: the cluster may notice later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as its executor sees it now."""

    leases: tuple[LeaseStatus, ...] = ()
    wanted: Placement = NOTHING
    """What it was last given."""
    workers: int = 0
    """That train at this moment."""

    @property
    def is_alive(self) -> bool:
        """Whether anything of it runs, or waits to."""
        return any(lease.state is not LeaseState.GONE for lease in self.leases)

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it has started yet."""
        states = {lease.state for lease in self.leases} - {LeaseState.GONE}
        return states == {LeaseState.WAITING}

    @property
    def held(self) -> Placement:
        """Devices that are taken, those of leases that are on their way out included."""
        held: dict[str, int] = {}
        for lease in self.leases:
            if lease.state in {LeaseState.RUNNING, LeaseState.LEAVING}:
                node = lease.node or lease.lease.node
                held[node] = held.get(node, 0) + lease.lease.devices
        return Placement(tuple(held.items()))

    @property
    def reason(self) -> str:
        """Why the run waits or is gone: the lead's reason, else the first."""
        result = sorted(
            (lease for lease in self.leases if lease.reason), key=lambda e: not e.lease.is_lead
        )
        return result[0].reason if result else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeResult:
    """What became of a wish for other devices."""

    how: Literal["live", "restart", "later"]
    """``restart``: only by stopping the run and starting it again; ``later``: it is just changing.
    In both cases nothing was changed."""
    text: str


class Executor(Protocol):
    """A place that runs jobs. Made from its address; asks the cluster anew at every call.

    What it knows of a run lies in the run's ``leases.json`` and ``lease_events.jsonl``; another
    process, or the same after a crash, goes on from there.
    """

    name: str
    address: str
    """What makes it again: ``local``, ``slurm://spot``, ``ray://head:10001``."""

    def capabilities(self) -> Capabilities:
        """What may be expected of it."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """Machines that are there now, with the devices that runs of ours may hold."""
        ...

    def start(self, run: RunStore, placement: Placement, *, directory: Path | None = None) -> None:
        """Give a run devices for a new life; what is left of an earlier life is ended first.

        The caller holds the run's launch lock, and has made it pending.

        Args:
            run: The run.
            placement: Its devices; the first node leads.
            directory: Where it runs: relative paths in the job are relative to this.
        """
        ...

    def resize(self, run: RunStore, placement: Placement) -> ResizeResult:
        """Give a running run these devices instead; does not wait until it has them."""
        ...

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        """Ask a run to save and stop, or end it at once. Does not wait; may be said again."""
        ...

    def status(self, run: RunStore) -> RunStatus:
        """How it stands. What changed since the last look is added to the run's happenings."""
        ...

    def observe(self, run: RunStore) -> RunStatus:
        """How it stands, as ``status``, for somebody who only reads: changes nothing anywhere."""
        ...

    def logs(self, run: RunStore) -> tuple[str, ...]:
        """Files with what its processes printed, the lead's first."""
        ...

    def events(self, run: RunStore, *, offset: int = 0) -> Iterator[tuple[LeaseEvent, int]]:
        """What happened to its leases, from a byte offset on, each with the offset after it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Nodes of one kind that can be had."""

    type: str
    """Of its devices."""
    devices: int
    """Of each."""
    awake: int
    """Of these nodes, how many are there, or on their way."""
    most: int
    nodes: tuple[str, ...] = ()
    """Names of those that are there, where that is known: others of the type may be there anyway."""
    waking: tuple[str, ...] = ()
    """Those of them that are still on their way, where they can be named in a placement already."""
    sleeping: tuple[str, ...] = ()
    """Those that are not there but may be named in a placement: that wakes them."""
    is_spot: bool = False
    """Whether they may be taken away at any time, for less money."""

    @property
    def kind(self) -> str:
        """What it is called: of one type there may be spot machines and others."""
        return name_kind(self.type, is_spot=self.is_spot)


def name_kind(node_type: str, *, is_spot: bool) -> str:
    """Machines of one type and market: ``a100``, ``a100-spot``."""
    return f"{node_type}{SPOT}" if is_spot else node_type


@runtime_checkable
class NodeScaling(Protocol):
    """An executor whose nodes come and go."""

    def reserves(self) -> tuple[Reserve, ...]:
        """What can be had, and what of it is."""
        ...

    def scale(self, kind: str, nodes: int) -> None:
        """Have so many nodes of a kind (``Reserve.kind``), beyond those that are always there.

        A node on which something runs is never taken; nor does this wait until they are there.
        """
        ...
