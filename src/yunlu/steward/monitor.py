"""What a run does, read from its logs bit by bit: how far, how fast on how many devices, how noisy."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from yunlu.core.crew import read_crew
from yunlu.core.rundir import EventKind
from yunlu.jobs.recorded import step_s
from yunlu.pool.executors.finding import is_elsewhere
from yunlu.pool.local import recorded_worker
from yunlu.steward.notes import Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.core.rundir import Event, RunDir
    from yunlu.pool.allocation.values import Node
    from yunlu.steward.stand import Stand

_RECENT = 50
_WARM_UP = 2
"""Steps of a generation that are not typical."""
_PENDING = 2000
"""Steps that may wait for the event that says how many workers made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the processes of a run take from this machine."""

    cores: float | None
    """Busy cores since the last look; None at the first."""
    memory_bytes: float


@dataclass(slots=True)
class _Group:
    """Steps made by so many workers."""

    steps_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RECENT))
    waits_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RECENT))


class Course:
    """One run, watched."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.base_batch: int | None = None
        """What its learning rate is meant for: a useful sample is one of it."""
        self.batch: int | None = None
        self.micro_batch: int | None = None
        self.steps: int | None = None
        self.step = 0
        self.noise: tuple[float, float] | None = None
        """Square of the gradient, and its variance at the base batch."""
        self.moved_at = time.monotonic()
        """When it last wrote anything, on the monotonic clock."""
        self.resizes_s: list[float] = []
        self.startup_s: float | None = None
        self._life = 0
        self._life_at = 0.0
        self._events = self._metrics = 0
        self._workers: dict[tuple[int, int], tuple[int, int]] = {}
        self._made: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._groups: defaultdict[tuple[int, int], _Group] = defaultdict(_Group)
        self._unknown: list[dict[str, Any]] = []

    def take(self) -> bool:
        """Read what was written since the last time; whether anything was."""
        before = (self._events, self._metrics)
        for event, after in self.run_dir.read_events(offset=self._events):
            self._events = after
            self._take_event(event)
        for record, after in self.run_dir.read_metrics(offset=self._metrics):
            self._metrics = after
            if isinstance(record, dict):  # pyright: ignore[reportUnnecessaryIsInstance] (a torn log)
                self._take_metric(record)
        if self._unknown:
            waiting, self._unknown = self._unknown, []
            for record in waiting[-_PENDING:]:
                self._sort(record)
        has_moved = before != (self._events, self._metrics)
        if has_moved:
            self.moved_at = time.monotonic()
        return has_moved

    def seen(self, device_type: str) -> tuple[Seen, ...]:
        """How long steps took, for each number of workers."""
        found: list[Seen] = []
        for (nodes, devices), group in sorted(self._groups.items()):
            if len(group.steps_s) < 2 or self.batch is None:
                continue
            whole_s, wait_s = median(group.steps_s), median(group.waits_s)
            share = max(1, -(-self.batch // devices))
            local = min(self.micro_batch or share, share)
            passes = -(-share // local)
            pass_s = max(whole_s - wait_s, 1e-9) / passes
            found.append(
                Seen(
                    device_type=device_type,
                    nodes=nodes,
                    devices=devices,
                    local_batch=local,
                    accumulate_s=pass_s,
                    step_s=max(whole_s - (passes - 1) * pass_s, 1e-9),
                )
            )
        return tuple(found)

    def pace_s(self, devices: int) -> float | None:
        """A usual step on so many devices."""
        found = [g.steps_s for (_, count), g in self._groups.items() if count == devices]
        return median(steps_s) if found and (steps_s := found[-1]) else None

    @property
    def usual_step_s(self) -> float:
        """A usual step, on whatever it ran on; 0 before the first."""
        steps_s = [each for group in self._groups.values() for each in group.steps_s]
        return median(steps_s) if steps_s else 0.0

    def _take_event(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case EventKind.LIFE:
                self._life, self._life_at = int(data.get("number") or self._life + 1), event.at
            case EventKind.PLAN:
                self.batch, self.micro_batch = data.get("batch"), data.get("micro_batch")
                self.base_batch, self.steps = self.batch, data.get("steps")
            case EventKind.BATCH:
                self.batch = data.get("batch") or self.batch
                self.steps = data.get("steps") or self.steps
            case EventKind.CREW:
                key = (self._life, int(data.get("generation") or 0))
                ranks: list[dict[str, Any]] = data.get("ranks") or []
                hosts = {rank.get("host") for rank in ranks}
                self._workers[key] = (max(len(hosts), 1), max(len(ranks), 1))
                lost_s = data.get("lost_s")
                if isinstance(lost_s, float | int):
                    self.resizes_s = [*self.resizes_s[-9:], float(lost_s)]
            case _:
                pass

    def _take_metric(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        if self.startup_s is None and self._life_at:
            self.startup_s = max(0.0, float(record.get("at") or 0.0) - self._life_at)
        self.step = step
        sqr, var = record.get("noise_sqr"), record.get("noise_var")
        if isinstance(sqr, float | int) and isinstance(var, float | int) and self.base_batch:
            self.noise = (float(sqr), float(var) / self.base_batch)
        self._sort(record)

    def _sort(self, record: dict[str, Any]) -> None:
        """To the steps of as many workers as made it."""
        generation = record.get("generation")
        key = (int(record.get("life") or self._life or 1), int(generation or 0))
        workers = (1, 1) if generation is None else self._workers.get(key)
        if workers is None:
            self._unknown.append(record)
            return
        self._made[key] += 1
        if self._made[key] <= _WARM_UP:
            return
        group = self._groups[workers]
        group.steps_s.append(step_s(record))
        group.waits_s.append(float(record.get("communication_s") or 0.0))


class Machine:
    """This machine and what each run takes of it; looked at now and then."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}
        psutil.cpu_percent(interval=None)  # the first answer is about nothing

    def look(self) -> dict[str, float]:
        """How busy it is: a share of its cores, and of its memory."""
        memory = psutil.virtual_memory()
        return {
            "cpu": psutil.cpu_percent(interval=None) / 100.0,
            "memory": memory.percent / 100.0,
            "cores": float(psutil.cpu_count() or 1),
            "memory_bytes": float(memory.total),
        }

    def usage(self, run_dirs: Mapping[str, RunDir]) -> dict[str, Usage]:
        """What each of these runs takes."""
        sessions = _processes_by_session()
        now = time.monotonic()
        found: dict[str, Usage] = {}
        for run_id, run_dir in run_dirs.items():
            if is_elsewhere(run_dir):  # numbers of processes mean nothing on another machine
                found[run_id] = Usage(cores=None, memory_bytes=0.0)
                continue
            pids = {pid for session in _sessions_of(run_dir) for pid in sessions.get(session, ())}
            busy_s, memory_bytes = _sum_up(pids)
            then, busy_then_s = self._before.get(run_id, (now, busy_s))
            cores = None
            if now > then:
                cores = max(0.0, busy_s - busy_then_s) / (now - then)
            self._before[run_id] = (now, busy_s)
            found[run_id] = Usage(cores=cores, memory_bytes=memory_bytes)
        self._before = {
            run_id: self._before[run_id] for run_id in run_dirs if run_id in self._before
        }
        return found


def find_lie(
    stand: Stand, usage: Usage, machine: dict[str, float], nodes: tuple[Node, ...]
) -> str | None:
    """What a run takes beyond what it holds, in words; None where it keeps to it."""
    held, node = stand.notes.placement.devices, next(iter(nodes), None)
    if node is None or not held or not machine:
        return None
    if node.type == "cpu" and usage.cores is not None and usage.cores > 1.3 * held + 0.3:
        return f"it keeps {usage.cores:.1f} cores busy, and holds {held} of {node.devices} shares"
    share_bytes = machine["memory_bytes"] * held / max(node.devices, 1)
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


def _sessions_of(run_dir: RunDir) -> set[int]:
    """A crew keeps to the session of its first supervisor, also when another one takes over."""
    worker, crew = recorded_worker(run_dir), read_crew(run_dir)
    pids = {worker.pid} if worker is not None and worker.detached else set[int]()
    pids |= {member.pid for member in crew.members} if crew is not None else set()
    sessions: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            sessions.add(os.getsid(pid))
    return sessions - {os.getsid(0)}


def _sum_up(pids: set[int]) -> tuple[float, float]:
    busy_s = memory_bytes = 0.0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:
            continue
        busy_s += times.user + times.system
        # Forked workers share the pages of the data they were given.
        memory_bytes += memory.rss - getattr(memory, "shared", 0)
    return busy_s, memory_bytes
