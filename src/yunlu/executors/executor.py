"""``Executor``: the protocol of backends that run jobs, and its values.

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

    from yunlu.executors.lease_executor import Lease, LeaseEvent
    from yunlu.hardware.fleet import Node
    from yunlu.runs.run_store import RunStore

SPOT = "-spot"
"""Suffix of the names of spot nodes."""


class ExecutorError(YunluError):
    """A cluster is absent, refuses, or does not answer; the message quotes it."""

    code = "executor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of an executor, verified by its contract test."""

    resizes_live: bool = True
    """A running run can get more or fewer devices without a restart."""
    moves_lead: bool = False
    """Even the devices of the lead lease can be taken away live."""
    queues: bool = False
    """The cluster has its own queue: a started run may wait there."""
    requeues: bool = False
    """The cluster restarts what it preempted."""
    scales: bool = False
    """Nodes can be requested and released: it is a ``NodeScaling`` too."""
    limits: str = ""
    """How a run is limited to its devices, as text; empty where it is not."""


class LeaseState(StrEnum):
    """State of a lease."""

    WAITING = "waiting"  # in the cluster's queue, or its node is still booting
    RUNNING = "running"
    LEAVING = "leaving"  # no longer wanted, and not yet gone
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    """Current status of one lease."""

    lease: Lease
    state: LeaseState
    reason: str = ""
    """Why it waits or is gone, including the cluster's message."""
    node: str = ""
    """Its actual node; may differ from the requested one."""
    has_lost_node: bool = False
    """Whether it is gone because its node is, where known: the cluster may notice later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Current status of a run at its executor."""

    leases: tuple[LeaseStatus, ...] = ()
    wanted: Placement = NOTHING
    """Placement it was last given."""
    workers: int = 0
    """Workers that train now."""

    @property
    def is_alive(self) -> bool:
        """Whether any process of it runs, or waits to start."""
        return any(lease.state is not LeaseState.GONE for lease in self.leases)

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it has started yet."""
        states = {lease.state for lease in self.leases} - {LeaseState.GONE}
        return states == {LeaseState.WAITING}

    @property
    def held(self) -> Placement:
        """Devices in use, including those of leases that are leaving."""
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
    """Result of a resize request."""

    how: Literal["live", "restart", "later"]
    """``restart``: only by stopping the run and starting it again; ``later``: it is just changing.
    In both cases nothing was changed."""
    text: str


class Executor(Protocol):
    """Runs jobs. Constructed from its address; queries the cluster at every call.

    What it knows of a run lies in the run's ``leases.json`` and ``lease_events.jsonl``; another
    process, or the same after a crash, goes on from there.
    """

    name: str
    address: str
    """Address that opens it: ``local``, ``slurm://spot``, ``ray://head:10001``."""

    def capabilities(self) -> Capabilities:
        """Its capabilities."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are up, with the devices that our runs may hold."""
        ...

    def start(self, run: RunStore, placement: Placement, *, directory: Path | None = None) -> None:
        """Give a run devices for a new attempt; what is left of an earlier attempt is killed first.

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
        """Ask a run to save and stop, or kill it at once. Does not wait; may be repeated."""
        ...

    def status(self, run: RunStore) -> RunStatus:
        """Status of a run. Changes since the last call are appended to its lease events."""
        ...

    def observe(self, run: RunStore) -> RunStatus:
        """How it stands, as ``status``, for somebody who only reads: changes nothing anywhere."""
        ...

    def logs(self, run: RunStore) -> tuple[str, ...]:
        """Output files of its processes, the lead's first."""
        ...

    def events(self, run: RunStore, *, offset: int = 0) -> Iterator[tuple[LeaseEvent, int]]:
        """Lease events from a byte offset on, each with the offset after it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Nodes of one kind that can be requested."""

    type: str
    """Device type."""
    devices: int
    """Devices per node."""
    awake: int
    """Number of these nodes that are up or booting."""
    most: int
    nodes: tuple[str, ...] = ()
    """Names of the nodes that are up, where known: others of the type may be permanent."""
    waking: tuple[str, ...] = ()
    """Those that are booting and can already be named in a placement."""
    sleeping: tuple[str, ...] = ()
    """Those that are off but can be named in a placement, which boots them."""
    is_spot: bool = False
    """Whether they are spot nodes, which can be preempted at any time."""

    @property
    def kind(self) -> str:
        """Name of the kind: one type may have spot and on-demand nodes."""
        return name_kind(self.type, is_spot=self.is_spot)


def name_kind(node_type: str, *, is_spot: bool) -> str:
    """Kind of nodes of one type and market: ``a100``, ``a100-spot``."""
    return f"{node_type}{SPOT}" if is_spot else node_type


@runtime_checkable
class NodeScaling(Protocol):
    """An executor whose nodes can be requested and released."""

    def reserves(self) -> tuple[Reserve, ...]:
        """Nodes that can be requested, and how many are up."""
        ...

    def scale(self, kind: str, nodes: int) -> None:
        """Set the number of nodes of a kind (``Reserve.kind``), beyond the permanent ones.

        A node on which something runs is never taken; nor does this wait until they are there.
        """
        ...
