"""Who hangs, who is cut off, and who is only slow. Pure: the clock is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from yunlu.training.elastic.messages import Heartbeat

WAITING = "sync"
"""The phase of who waits for others; such a one is never to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long is too long. A busy machine may delay a sign of life by a second or two."""

    node_silent_s: float = 2.5
    """A whole node, none of whose processes is heard: cut off."""
    silent_s: float = 6.0
    """One process whose own thread gives no sign of life."""
    stopped_s: float = 1.0
    """The same, where the system says that the process is stopped."""
    step_s: float = 15.0
    step_ratio: float = 5.0
    """A step may take this many times the usual, and at least ``step_s``."""
    forming_s: float = 60.0
    long_s: float = 1800.0
    """Loading, a first step, evaluating, saving, exporting; each sign of progress starts it anew."""
    late_s: float = 1.0
    """If we ourselves were not run for so long, the others' silence says nothing."""


STRAGGLER_RATIO = 1.3
STRAGGLER_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthVerdict:
    """What is the matter with a member."""

    worker: int
    what: Literal["hung", "cut off", "stalled", "straggler", "recovered"]
    """``stalled``: everyone waits, nobody is to blame: break the generation off, kill nobody."""
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
    brisk_steps: int = 0
    is_named: bool = False


class Watchdog:
    """Takes in signs of life, gives out verdicts."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self.deadlines = deadlines or Deadlines()
        self._members: dict[int, _WorkerHealth] = {}
        self._voices: dict[str, float] = {}
        self._steps: deque[float] = deque(maxlen=64)
        self._generation = -1
        self._looked_at: float | None = None

    @property
    def usual_step_s(self) -> float:
        """How long a step of this generation takes; 0 before one was completed."""
        return median(self._steps) if self._steps else 0.0

    def watch(self, worker: int, *, node: str, at: float) -> None:
        """Begin to expect signs of life."""
        self._members[worker] = _WorkerHealth(node=node, heard_at=at, moved_at=at)

    def forget(self, worker: int) -> None:
        """It is gone."""
        self._members.pop(worker, None)

    def observe_node(self, node: str, *, at: float) -> None:
        """The node itself gave a sign of life."""
        self._voices[node] = at

    def forget_node(self, node: str) -> None:
        """It is gone."""
        self._voices.pop(node, None)

    def observe(self, worker: int, heartbeat: Heartbeat, *, at: float) -> list[HealthVerdict]:
        """A sign of life; who becomes, or is no longer, a straggler by it."""
        watched = self._members.get(worker)
        if watched is None:
            return []
        watched.heard_at = at
        if (heartbeat.generation, heartbeat.progress) != (watched.generation, watched.progress):
            watched.moved_at = at
        if heartbeat.generation != watched.generation:
            watched.compute_s.clear()
        watched.generation, watched.progress = heartbeat.generation, heartbeat.progress
        watched.step, watched.phase = heartbeat.step, heartbeat.phase
        if heartbeat.generation > self._generation:
            # Another layout has another pace: its first step may take long, and tells the next.
            self._generation = heartbeat.generation
            self._steps.clear()
        found: list[HealthVerdict] = []
        for _, step_s, wait_s in heartbeat.steps:
            if heartbeat.generation == self._generation:
                self._steps.append(step_s)
            watched.compute_s.append(max(0.0, step_s - wait_s))
            found += self._weigh(worker, watched)
        return found

    def find_lost(
        self,
        *,
        at: float,
        is_stopped: Callable[[int], bool],
        is_remote: Callable[[str], bool],
        busy: Iterable[int],
    ) -> list[HealthVerdict]:
        """Who is lost.

        Args:
            at: Now; everything that has arrived was heard before.
            is_stopped: Whether the system says that a member's process is stopped.
            is_remote: Whether a node is another machine.
            busy: Members that are in a generation: who stands by need not make progress.
        """
        looked_at, self._looked_at = self._looked_at, at
        if looked_at is not None and at - looked_at > self.deadlines.late_s:
            self._excuse(at - looked_at)
            return []
        found: dict[int, HealthVerdict] = {}
        for verdict in (
            *self._cut_off(at, is_remote),
            *self._silent(at, is_stopped),
            *self._stuck(at, set(busy)),
        ):
            found.setdefault(verdict.worker, verdict)
        return list(found.values())

    def figures(self) -> dict[int, dict[str, float | int | str]]:
        """Step and phase of each member."""
        return {
            worker: {"step": watched.step, "phase": watched.phase}
            for worker, watched in self._members.items()
        }

    def _excuse(self, late_s: float) -> None:
        for watched in self._members.values():
            watched.heard_at += late_s
            watched.moved_at += late_s
        for node in self._voices:
            self._voices[node] += late_s

    def _cut_off(self, at: float, is_remote: Callable[[str], bool]) -> list[HealthVerdict]:
        found: list[HealthVerdict] = []
        for node, heard_at in self._voices.items():
            workers = {m: w for m, w in self._members.items() if w.node == node}
            last = max([heard_at, *(watched.heard_at for watched in workers.values())])
            if is_remote(node) and workers and at - last > self.deadlines.node_silent_s:
                words = f"nothing heard from {node} for {at - last:.1f} s"
                found += [HealthVerdict(worker=m, what="cut off", detail=words) for m in workers]
        return found

    def _silent(self, at: float, is_stopped: Callable[[int], bool]) -> list[HealthVerdict]:
        found: list[HealthVerdict] = []
        for worker, watched in self._members.items():
            silent_s = at - watched.heard_at
            if silent_s > self.deadlines.silent_s:
                words = f"no sign of life for {silent_s:.1f} s"
                found.append(HealthVerdict(worker=worker, what="hung", detail=words))
            elif silent_s > self.deadlines.stopped_s and is_stopped(worker):
                words = f"its process is stopped; no sign of life for {silent_s:.1f} s"
                found.append(HealthVerdict(worker=worker, what="hung", detail=words))
        return found

    def _stuck(self, at: float, busy: set[int]) -> list[HealthVerdict]:
        late: dict[int, tuple[_WorkerHealth, float]] = {}
        for worker in busy & set(self._members):
            watched = self._members[worker]
            allowed_s = self._allowed_s(watched.phase)
            if at - watched.moved_at > allowed_s:
                late[worker] = watched, allowed_s
        blamed = [m for m, (watched, _) in late.items() if watched.phase != WAITING]
        here = busy & set(self._members)
        # Whoever is rightly at something long is what the others wait for.
        if blamed and all(m in late or self._members[m].phase == WAITING for m in here):
            # Several at once: the least advanced.
            first = min(self._members[m].step for m in blamed)
            return [
                HealthVerdict(worker=m, what="hung", detail=_stuck_words(*late[m]))
                for m in blamed
                if self._members[m].step == first
            ]
        if late and not blamed and len(late) == len(here):
            return [
                HealthVerdict(worker=m, what="stalled", detail=_stuck_words(*found))
                for m, found in late.items()
            ]
        return []

    def _allowed_s(self, phase: str) -> float:
        limits = self.deadlines
        if phase in {"step", WAITING}:
            return max(limits.step_s, limits.step_ratio * self.usual_step_s)
        return limits.forming_s if phase in {"forming", "starting"} else limits.long_s

    def _weigh(self, worker: int, watched: _WorkerHealth) -> list[HealthVerdict]:
        """Compare a step's compute time with the median of the others' last."""
        others = [
            other.compute_s[-1]
            for number, other in self._members.items()
            if number != worker and other.compute_s and other.generation == watched.generation
        ]
        if not others:
            return []
        usual_s = median(others)
        ratio = watched.compute_s[-1] / usual_s if usual_s > 0 else 1.0
        is_slow = ratio > STRAGGLER_RATIO
        watched.slow_steps = watched.slow_steps + 1 if is_slow else 0
        watched.brisk_steps = 0 if is_slow else watched.brisk_steps + 1
        if watched.slow_steps >= STRAGGLER_STEPS and not watched.is_named:
            watched.is_named = True
            words = f"computes {ratio:.1f} times as long as the others"
            return [HealthVerdict(worker=worker, what="straggler", detail=words, ratio=ratio)]
        if watched.brisk_steps >= STRAGGLER_STEPS and watched.is_named:
            watched.is_named = False
            words = "keeps up with the others again"
            return [HealthVerdict(worker=worker, what="recovered", detail=words, ratio=ratio)]
        return []


def _stuck_words(watched: _WorkerHealth, allowed_s: float) -> str:
    return f"no progress in {watched.phase!r} at step {watched.step} for {allowed_s:.0f} s"
