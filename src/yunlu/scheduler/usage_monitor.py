"""Usage monitor: load of nodes and runs, and runs that exceed their allocation."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from yunlu.executors.lease_executor import read_record
from yunlu.executors.registry import is_elsewhere
from yunlu.executors.usage import NodeUse, UsageMeter, read_uses
from yunlu.executors.worker_process import recorded_worker
from yunlu.runs.worker_group import read_worker_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.hardware.fleet import Node
    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.run_status import ScheduledRun

LOOK_S = 5.0
_OLD_S = 30.0
"""Reports older than this are ignored."""
_MAX_OVERUSE = 3
"""Consecutive observations at which a run exceeds its allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Usage of all processes of a run, on all nodes."""

    cores: float | None
    """Busy cores since the last observation; None where unknown."""
    memory_bytes: float


class UsageMonitor:
    """Measures usage periodically."""

    def __init__(self, *, is_local: bool) -> None:
        """``is_local``: this machine is the pool's only node."""
        self._is_local = is_local
        self.machine: dict[str, float] = {}
        """Usage of this machine."""
        self.nodes: dict[str, NodeUse] = {}
        """Usage of the pool's nodes, where known."""
        self.usage: dict[str, Usage] = {}
        self._meter = UsageMeter()
        self._looked_at = -math.inf
        self._overuse: dict[str, int] = {}
        self._heard: dict[tuple[str, str], tuple[float, float]] = {}
        """Of each lease: the time in its last report, and when it was first read, on our clock."""

    def update(self, alive: Mapping[str, ScheduledRun], nodes: Sequence[Node]) -> dict[str, str]:
        """Measure if it is time; returns by run newly found overuse."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return {}
        self._looked_at = time.monotonic()
        here = self._meter.sample()
        self.machine = {
            "cpu": here.cpu,
            "memory": here.memory,
            "cores": float(len(os.sched_getaffinity(0))),
            "memory_bytes": float(psutil.virtual_memory().total),
        }
        self.nodes = {node.name: here for node in nodes} if self._is_local else {}
        self.usage = self._measure(alive)
        if self._is_local:
            self.machine["other_cores"] = other_cores(here.cpu, self.usage.values())
        return self._find_overuse(alive, nodes)

    def _measure(self, alive: Mapping[str, ScheduledRun]) -> dict[str, Usage]:
        sessions = _processes_by_session()
        result: dict[str, Usage] = {}
        for run_id, scheduled in alive.items():
            run = scheduled.run
            if is_elsewhere(run):  # process ids are meaningless on another machine
                result[run_id] = self._read_reported(run)
                continue
            pids = {pid for session in _sessions_of(run) for pid in sessions.get(session, ())}
            cores, memory_bytes = self._meter.measure(run_id, pids)
            result[run_id] = Usage(cores=cores, memory_bytes=memory_bytes)
        self._meter.keep(alive)
        self._heard = {key: seen for key, seen in self._heard.items() if key[0] in alive}
        return result

    def _read_reported(self, run: RunStore) -> Usage:
        """Usage that its leases report, each on its own node and clock."""
        record = read_record(run)
        names = [lease.name for lease in record.wanted] if record is not None else []
        cores: float | None = None
        memory_bytes, now = 0.0, time.monotonic()
        for lease, use in read_uses(run, names):
            key = (run.id, lease)
            told_at, since = self._heard.get(key, (math.nan, now))
            if told_at != use.at:
                since = now
                self._heard[key] = (use.at, now)
            if now - since < _OLD_S:
                cores = (cores or 0.0) + use.cores
                memory_bytes += use.memory_bytes
                self.nodes[use.node] = use.machine
        return Usage(cores=cores, memory_bytes=memory_bytes)

    def _find_overuse(
        self, alive: Mapping[str, ScheduledRun], nodes: Sequence[Node]
    ) -> dict[str, str]:
        result: dict[str, str] = {}
        for run_id, scheduled in alive.items():
            text = find_overuse(scheduled, self.usage[run_id], self.machine, nodes)
            self._overuse[run_id] = self._overuse.get(run_id, 0) + 1 if text else 0
            if text and self._overuse[run_id] == _MAX_OVERUSE:
                result[run_id] = text
        self._overuse = {
            run_id: count for run_id, count in self._overuse.items() if run_id in alive
        }
        return result


def other_cores(busy: float, usages: Iterable[Usage]) -> float:
    """Cores of this machine that programs other than the pool's runs keep busy.

    ``busy``: share of all its processors, also of those that this process may not use.
    """
    ours = sum(usage.cores or 0.0 for usage in usages)
    return max(0.0, busy * (psutil.cpu_count() or 1) - ours)


def find_overuse(
    scheduled: ScheduledRun, usage: Usage, machine: Mapping[str, float], nodes: Sequence[Node]
) -> str | None:
    """Overuse of a run as text; None if it keeps to its allocation."""
    held, node = scheduled.allocation.placement.devices, next(iter(nodes), None)
    if node is None or not held or not machine or scheduled.observation.shares:
        return None  # a cluster enforces limits itself
    share = held / max(node.devices, 1)
    share_cores, share_bytes = machine["cores"] * share, machine["memory_bytes"] * share
    if node.type == "cpu" and usage.cores is not None and usage.cores > 1.3 * share_cores + 0.3:
        return f"it keeps {usage.cores:.1f} cores busy, and its share is {share_cores:.1f}"
    if usage.memory_bytes > 1.1 * share_bytes:
        took, part = usage.memory_bytes / 2**30, share_bytes / 2**30
        return f"it takes {took:.1f} GiB of memory, and its share is {part:.1f} GiB"
    return None


def _processes_by_session() -> dict[int, list[int]]:
    sessions: defaultdict[int, list[int]] = defaultdict(list)
    for pid in psutil.pids():
        with suppress(OSError):
            sessions[os.getsid(pid)].append(pid)
    return sessions


def _sessions_of(run: RunStore) -> set[int]:
    """A worker group keeps the session of its first supervisor, also after a takeover."""
    worker, group = recorded_worker(run), read_worker_group(run)
    pids = {worker.pid} if worker is not None and worker.detached else set[int]()
    pids |= {member.pid for member in group.workers} if group is not None else set()
    sessions: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            sessions.add(os.getsid(pid))
    return sessions - {os.getsid(0)}
