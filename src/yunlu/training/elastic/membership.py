"""Workers and nodes of a run, as known to the supervisor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from yunlu.core.processes import ProcessHandle
from yunlu.runs.worker_group import LOCAL
from yunlu.training.elastic.generations import WorkerReport

if TYPE_CHECKING:
    from yunlu.training.elastic.control_server import ControlConnection
    from yunlu.training.elastic.messages import Ending, Heartbeat, HeldState

FIRST_EXCLUSION_S = 300.0
"""Time before an excluded straggler is readmitted; doubled each time."""

Status = Literal["starting", "idle", "busy", "paused", "gone"]
"""``idle``: hot spare. ``paused``: has left its generation and waits for the next."""


@dataclass(eq=False, kw_only=True)
class WorkerRecord:
    """A worker process."""

    number: int
    node: str
    host: str = ""
    pid: int = 0
    process_started_at: float = 0.0
    status: Status = "starting"
    since: float = 0.0
    """Time of the last status change, on the monotonic clock."""
    rank: int | None = None
    slot: int = 0
    connection: ControlConnection | None = None
    live: HeldState | None = None
    replicas: tuple[HeldState, ...] = ()
    ending: Ending | None = None
    is_leaving: bool = False
    is_excluded: bool = False
    """It leaves as a straggler: the other workers are faster without it."""
    heartbeat: Heartbeat | None = None
    last_step: tuple[int, float, float] | None = None

    @property
    def process(self) -> ProcessHandle:
        """Its process, if it runs on this machine."""
        return ProcessHandle(self.pid, self.process_started_at)

    @property
    def is_present(self) -> bool:
        """Whether the worker has not been lost or dismissed."""
        return self.status != "gone"

    @property
    def step(self) -> int:
        """Completed steps in the last heartbeat."""
        return self.heartbeat.step if self.heartbeat else 0

    def move(self, status: Status, *, at: float) -> None:
        """Change the status."""
        self.status, self.since = status, at

    def report(self, *, may_stay: bool) -> WorkerReport:
        """Report for ``plan_generation``."""
        return WorkerReport(
            worker=self.number,
            rank=self.rank,
            live=self.live,
            replicas=self.replicas,
            is_leaving=self.is_leaving or not may_stay,
        )


@dataclass(eq=False, kw_only=True)
class NodeRecord:
    """A machine."""

    name: str
    wanted: int
    """Number of workers requested on this node."""
    excluded: int = 0
    """Stragglers among them that are excluded for now."""
    excluded_until: float = 0.0
    """On the monotonic clock."""
    exclusion_s: float = FIRST_EXCLUSION_S
    """Exclusion time; doubles with each exclusion."""
    host: str = ""
    pid: int = 0
    connection: ControlConnection | None = None
    is_ready: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is the supervisor's machine."""
        return self.name == LOCAL

    @property
    def active_target(self) -> int:
        """Workers that train on this node now."""
        return max(0, self.wanted - self.excluded)

    def exclude_worker(self, *, at: float) -> None:
        """Exclude one worker for a while."""
        self.excluded += 1
        self.excluded_until = at + self.exclusion_s

    def readmit(self) -> None:
        """Readmit all excluded workers; the next exclusion lasts twice as long."""
        self.excluded = 0
        self.exclusion_s *= 2


@dataclass
class Membership:
    """All workers and nodes of a run."""

    workers: dict[int, WorkerRecord] = field(default_factory=dict[int, WorkerRecord])
    nodes: dict[str, NodeRecord] = field(default_factory=dict[str, NodeRecord])
    next_worker: int = 0

    @property
    def target(self) -> int:
        """Number of workers requested."""
        return sum(node.wanted for node in self.nodes.values())

    @property
    def active_target(self) -> int:
        """Number of workers that train now: requested less excluded."""
        return sum(node.active_target for node in self.nodes.values())

    def add(self, node: str, *, at: float, number: int | None = None) -> WorkerRecord:
        """Add a worker that is being started."""
        number = self.next_worker if number is None else number
        worker = WorkerRecord(number=number, node=node, since=at)
        self.workers[number] = worker
        self.next_worker = max(self.next_worker, number + 1)
        return worker

    def with_status(self, *statuses: Status, node: str | None = None) -> list[WorkerRecord]:
        """Workers in one of these statuses, by number."""
        return [
            worker
            for worker in self.workers.values()
            if worker.status in statuses and node in {None, worker.node}
        ]

    def by_connection(self, connection: ControlConnection) -> WorkerRecord | NodeRecord | None:
        """The worker or node at the other end of a connection."""
        records = [*self.workers.values(), *self.nodes.values()]
        return next((record for record in records if record.connection is connection), None)

    def candidates(self) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
        """Workers that may train next, and those that may only hand off state; honours each node's target."""
        staying: list[WorkerRecord] = []
        departing: list[WorkerRecord] = []
        for node in self.nodes.values():
            here = self.with_status("busy", "paused", "idle", node=node.name)
            here.sort(key=lambda m: (m.is_leaving, m.rank is None, m.rank or 0, m.number))
            available = [worker for worker in here if not worker.is_leaving]
            staying += available[: node.active_target]
            departing += [
                worker for worker in here if worker not in available[: node.active_target]
            ]
        departing += [
            m for m in self.with_status("busy", "paused", "idle") if m.node not in self.nodes
        ]
        return staying, departing


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
