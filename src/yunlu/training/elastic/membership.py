"""Who is there: workers and nodes as the supervisor knows them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from yunlu.runs.worker_group import LOCAL
from yunlu.training.elastic.generations import WorkerReport

if TYPE_CHECKING:
    from yunlu.training.elastic.control_server import ControlConnection
    from yunlu.training.elastic.messages import Ending, Heartbeat, HeldState

# The kernel rounds the instant of boot, on which start times are based, to a second.
_SAME_START_S = 2.0
FIRST_EXCLUSION_S = 300.0
"""A worker that was too slow for the others is tried again after this; then after twice as long."""

Status = Literal["starting", "idle", "busy", "settled", "gone"]
"""``idle``: stands by. ``settled``: was in the generation, waits for the next."""


@dataclass(eq=False, kw_only=True)
class WorkerRecord:
    """One worker."""

    number: int
    node: str
    host: str = ""
    pid: int = 0
    process_started_at: float = 0.0
    status: Status = "starting"
    since: float = 0.0
    """When it came into this status, on the monotonic clock."""
    rank: int | None = None
    slot: int = 0
    connection: ControlConnection | None = None
    live: HeldState | None = None
    replicas: tuple[HeldState, ...] = ()
    ending: Ending | None = None
    is_leaving: bool = False
    is_excluded: bool = False
    """It leaves because the others are faster without it."""
    heartbeat: Heartbeat | None = None
    last_step: tuple[int, float, float] | None = None

    @property
    def is_present(self) -> bool:
        """Whether it can be reckoned with."""
        return self.status != "gone"

    @property
    def step(self) -> int:
        """Steps completed, as last heard."""
        return self.heartbeat.step if self.heartbeat else 0

    def move(self, status: Status, *, at: float) -> None:
        """Into another status."""
        self.status, self.since = status, at

    def report(self, *, may_stay: bool) -> WorkerReport:
        """As ``decide`` needs it."""
        return WorkerReport(
            worker=self.number,
            rank=self.rank,
            live=self.live,
            replicas=self.replicas,
            is_leaving=self.is_leaving or not may_stay,
        )


@dataclass(eq=False, kw_only=True)
class NodeRecord:
    """One machine."""

    name: str
    wanted: int
    """Workers that shall train there."""
    excluded: int = 0
    """Of these, how many stand aside for now."""
    excluded_until: float = 0.0
    """On the monotonic clock."""
    exclusion_s: float = FIRST_EXCLUSION_S
    """For how long they do; longer each time."""
    host: str = ""
    pid: int = 0
    connection: ControlConnection | None = None
    is_ready: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is the supervisor's own machine."""
        return self.name == LOCAL

    @property
    def active_target(self) -> int:
        """Workers that shall train there now."""
        return max(0, self.wanted - self.excluded)

    def exclude_worker(self, *, at: float) -> None:
        """One worker fewer for a while."""
        self.excluded += 1
        self.excluded_until = at + self.exclusion_s

    def readmit(self) -> None:
        """All of them again; if that was too early, they stand aside for longer."""
        self.excluded = 0
        self.exclusion_s *= 2


@dataclass
class Membership:
    """Everyone."""

    workers: dict[int, WorkerRecord] = field(default_factory=dict[int, WorkerRecord])
    nodes: dict[str, NodeRecord] = field(default_factory=dict[str, NodeRecord])
    next_worker: int = 0

    @property
    def target(self) -> int:
        """Workers wanted in all."""
        return sum(node.wanted for node in self.nodes.values())

    @property
    def active_target(self) -> int:
        """Of these, those that shall train now."""
        return sum(node.active_target for node in self.nodes.values())

    def add(self, node: str, *, at: float, number: int | None = None) -> WorkerRecord:
        """A worker that is being started."""
        number = self.next_worker if number is None else number
        worker = WorkerRecord(number=number, node=node, since=at)
        self.workers[number] = worker
        self.next_worker = max(self.next_worker, number + 1)
        return worker

    def with_status(self, *statuses: Status, node: str | None = None) -> list[WorkerRecord]:
        """Those in one of these statuses, by number."""
        return [
            worker
            for worker in self.workers.values()
            if worker.status in statuses and node in {None, worker.node}
        ]

    def by_link(self, connection: ControlConnection) -> WorkerRecord | NodeRecord | None:
        """Who is at the other end."""
        everyone = [*self.workers.values(), *self.nodes.values()]
        return next((each for each in everyone if each.connection is connection), None)

    def candidates(self) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
        """Who may train next, and who may only give: no node has more than are wanted there."""
        stay: list[WorkerRecord] = []
        give: list[WorkerRecord] = []
        for node in self.nodes.values():
            here = self.with_status("busy", "settled", "idle", node=node.name)
            here.sort(key=lambda m: (m.is_leaving, m.rank is None, m.rank or 0, m.number))
            able = [worker for worker in here if not worker.is_leaving]
            stay += able[: node.active_target]
            give += [worker for worker in here if worker not in able[: node.active_target]]
        give += [m for m in self.with_status("busy", "settled", "idle") if m.node not in self.nodes]
        return stay, give


def is_alive(pid: int, process_started_at: float) -> bool:
    """Whether this very process runs, on this machine."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - process_started_at) < _SAME_START_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_stopped(pid: int) -> bool:
    """Whether the system holds a process stopped (SIGSTOP)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def kill(pid: int, process_started_at: float) -> None:
    """End this very process at once: one that is stopped would ignore a request."""
    if pid > 0 and is_alive(pid, process_started_at):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
