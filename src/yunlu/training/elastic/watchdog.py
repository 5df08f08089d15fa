"""Failure detector: hung, cut-off and slow workers. Pure: the clock is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from yunlu.training.elastic.messages import Heartbeat

WAITING_PHASE = "sync"
"""Phase of a worker that waits for others; such a worker is never blamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time limits. A busy machine may delay a heartbeat by a second or two."""

    node_silent_s: float = 2.5
    """Node none of whose processes is heard from: cut off."""
    silent_s: float = 6.0
    """Process whose control thread sends no heartbeat."""
    stopped_s: float = 1.0
    """The same, if the system reports the process as stopped."""
    step_s: float = 15.0
    step_ratio: float = 5.0
    """A step may take this multiple of the usual time, and at least ``step_s``."""
    forming_s: float = 60.0
    long_s: float = 1800.0
    """Loading, first step, evaluation, checkpoint, export; each report of progress restarts it."""
    late_s: float = 1.0
    """If this process itself was not scheduled for so long, silence of the others proves nothing."""

    def scaled(self, factor: float) -> Deadlines:
        """Scale the limits of slow processes; a stopped process is reported by the system."""
        return replace(
            self,
            node_silent_s=factor * self.node_silent_s,
            silent_s=factor * self.silent_s,
            step_s=factor * self.step_s,
            forming_s=factor * self.forming_s,
        )


STRAGGLER_RATIO = 1.3
STRAGGLER_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthVerdict:
    """Diagnosis of one worker."""

    worker: int
    what: Literal["hung", "cut off", "stalled", "straggler", "recovered"]
    """``stalled``: all workers wait and none is to blame: halt the generation, kill none."""
    detail: str
    ratio: float = 1.0


@dataclass(slots=True)
class _WorkerHealth:
    node: str
    heard_at: float
    moved_at: float
    generation: int = -1
    step: int = 0
    phase: str = "starting"
    progress: int = -1
    compute_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=STRAGGLER_STEPS))
    slow_steps: int = 0
    normal_steps: int = 0
    is_reported: bool = False


class Watchdog:
    """Takes heartbeats, returns verdicts."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self.deadlines = deadlines or Deadlines()
        self._workers: dict[int, _WorkerHealth] = {}
        self._node_heard_at: dict[str, float] = {}
        self._steps: deque[float] = deque(maxlen=64)
        self._generation = -1
        self._checked_at: float | None = None

    @property
    def usual_step_s(self) -> float:
        """Median step time of this generation; 0 before one is completed."""
        return median(self._steps) if self._steps else 0.0

    def watch(self, worker: int, *, node: str, at: float) -> None:
        """Start to expect heartbeats."""
        self._workers[worker] = _WorkerHealth(node=node, heard_at=at, moved_at=at)

    def forget(self, worker: int) -> None:
        """Stop to expect heartbeats of a worker."""
        self._workers.pop(worker, None)

    def observe_node(self, node: str, *, at: float) -> None:
        """Record a ping of the node itself."""
        self._node_heard_at[node] = at

    def forget_node(self, node: str) -> None:
        """Stop to expect pings of a node."""
        self._node_heard_at.pop(node, None)

    def observe(self, worker: int, heartbeat: Heartbeat, *, at: float) -> list[HealthVerdict]:
        """Record a heartbeat; returns whether the worker became, or no longer is, a straggler."""
        health = self._workers.get(worker)
        if health is None:
            return []
        health.heard_at = at
        if (heartbeat.generation, heartbeat.progress) != (health.generation, health.progress):
            health.moved_at = at
        if heartbeat.generation != health.generation:
            health.compute_s.clear()
        health.generation, health.progress = heartbeat.generation, heartbeat.progress
        health.step, health.phase = heartbeat.step, heartbeat.phase
        if heartbeat.generation > self._generation:
            # Another layout has another step time, and its first step may take long.
            self._generation = heartbeat.generation
            self._steps.clear()
        verdicts: list[HealthVerdict] = []
        for _, step_s, wait_s in heartbeat.steps:
            if heartbeat.generation == self._generation:
                self._steps.append(step_s)
            health.compute_s.append(max(0.0, step_s - wait_s))
            verdicts += self._compare_compute(worker, health)
        return verdicts

    def find_lost(
        self,
        *,
        at: float,
        is_stopped: Callable[[int], bool],
        is_remote: Callable[[str], bool],
        busy: Iterable[int],
    ) -> list[HealthVerdict]:
        """Find lost workers.

        Args:
            at: Now; everything that has arrived was observed before.
            is_stopped: Whether the system reports a worker's process as stopped.
            is_remote: Whether a node is another machine.
            busy: Workers in a generation; spares need not make progress.
        """
        checked_at, self._checked_at = self._checked_at, at
        if checked_at is not None and at - checked_at > self.deadlines.late_s:
            self._discount_delay(at - checked_at)
            return []
        verdicts: dict[int, HealthVerdict] = {}
        for verdict in (
            *self._cut_off(at, is_remote),
            *self._silent(at, is_stopped),
            *self._stuck(at, set(busy)),
        ):
            verdicts.setdefault(verdict.worker, verdict)
        return list(verdicts.values())

    def status(self) -> dict[int, dict[str, float | int | str]]:
        """Step and phase of each worker."""
        return {
            worker: {"step": health.step, "phase": health.phase}
            for worker, health in self._workers.items()
        }

    def _discount_delay(self, late_s: float) -> None:
        for health in self._workers.values():
            health.heard_at += late_s
            health.moved_at += late_s
        for node in self._node_heard_at:
            self._node_heard_at[node] += late_s

    def _cut_off(self, at: float, is_remote: Callable[[str], bool]) -> list[HealthVerdict]:
        verdicts: list[HealthVerdict] = []
        for node, heard_at in self._node_heard_at.items():
            workers = {m: w for m, w in self._workers.items() if w.node == node}
            last = max([heard_at, *(health.heard_at for health in workers.values())])
            if is_remote(node) and workers and at - last > self.deadlines.node_silent_s:
                detail = f"no message from {node} for {at - last:.1f} s"
                verdicts += [
                    HealthVerdict(worker=m, what="cut off", detail=detail) for m in workers
                ]
        return verdicts

    def _silent(self, at: float, is_stopped: Callable[[int], bool]) -> list[HealthVerdict]:
        verdicts: list[HealthVerdict] = []
        for worker, health in self._workers.items():
            silent_s = at - health.heard_at
            if silent_s > self.deadlines.silent_s:
                detail = f"no heartbeat for {silent_s:.1f} s"
                verdicts.append(HealthVerdict(worker=worker, what="hung", detail=detail))
            elif silent_s > self.deadlines.stopped_s and is_stopped(worker):
                detail = f"its process is stopped; no heartbeat for {silent_s:.1f} s"
                verdicts.append(HealthVerdict(worker=worker, what="hung", detail=detail))
        return verdicts

    def _stuck(self, at: float, busy: set[int]) -> list[HealthVerdict]:
        late: dict[int, tuple[_WorkerHealth, float]] = {}
        for worker in busy & set(self._workers):
            health = self._workers[worker]
            allowed_s = self._allowed_s(health.phase)
            if at - health.moved_at > allowed_s:
                late[worker] = health, allowed_s
        blamed = [m for m, (health, _) in late.items() if health.phase != WAITING_PHASE]
        here = busy & set(self._workers)
        # A worker in a long phase within its limit is what the others wait for.
        if blamed and all(m in late or self._workers[m].phase == WAITING_PHASE for m in here):
            # Several at once: blame the least advanced.
            first = min(self._workers[m].step for m in blamed)
            return [
                HealthVerdict(worker=m, what="hung", detail=_describe_stall(*late[m]))
                for m in blamed
                if self._workers[m].step == first
            ]
        if late and not blamed and len(late) == len(here):
            return [
                HealthVerdict(worker=m, what="stalled", detail=_describe_stall(*stall))
                for m, stall in late.items()
            ]
        return []

    def _allowed_s(self, phase: str) -> float:
        limits = self.deadlines
        if phase in {"step", WAITING_PHASE}:
            return max(limits.step_s, limits.step_ratio * self.usual_step_s)
        return limits.forming_s if phase in {"forming", "starting"} else limits.long_s

    def _compare_compute(self, worker: int, health: _WorkerHealth) -> list[HealthVerdict]:
        """Compare the compute time of a step with the median of the other workers' last steps."""
        others = [
            other.compute_s[-1]
            for number, other in self._workers.items()
            if number != worker and other.compute_s and other.generation == health.generation
        ]
        if not others:
            return []
        usual_s = median(others)
        ratio = health.compute_s[-1] / usual_s if usual_s > 0 else 1.0
        is_slow = ratio > STRAGGLER_RATIO
        health.slow_steps = health.slow_steps + 1 if is_slow else 0
        health.normal_steps = 0 if is_slow else health.normal_steps + 1
        if health.slow_steps >= STRAGGLER_STEPS and not health.is_reported:
            health.is_reported = True
            detail = f"computes {ratio:.1f} times as long as the others"
            return [HealthVerdict(worker=worker, what="straggler", detail=detail, ratio=ratio)]
        if health.normal_steps >= STRAGGLER_STEPS and health.is_reported:
            health.is_reported = False
            detail = "keeps up with the others again"
            return [HealthVerdict(worker=worker, what="recovered", detail=detail, ratio=ratio)]
        return []


def _describe_stall(health: _WorkerHealth, allowed_s: float) -> str:
    return f"no progress in {health.phase!r} at step {health.step} for {allowed_s:.0f} s"
