"""From tracker names to trackers that never make the training loop wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias

from yunlu.core.errors import JobError, YunluError, did_you_mean
from yunlu.core.imports import make_object, names_object
from yunlu.training.environment import hide_credentials
from yunlu.training.trackers.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

GROUP = "yunlu.trackers"
ALWAYS = "tensorboard"


def open_trackers(names: Sequence[str]) -> list[Tracker]:
    """TensorBoard, then the trackers asked for, each by its entry point or ``module:Class``."""
    return [_make(name) for name in dict.fromkeys([ALWAYS, *names])]


def _make(name: str) -> Tracker:
    if names_object(name):
        tracker = make_object(name)
    else:
        known = {point.name: point for point in entry_points(group=GROUP)}
        if name not in known:
            raise JobError(
                f"trackers: there is no tracker {name!r}.", hint=did_you_mean(name, known)
            )
        tracker = known[name].load()()
    if not isinstance(tracker, Tracker):
        raise JobError(
            f"trackers: {name} is not a tracker.", hint="it needs the methods start, log and finish"
        )
    return tracker


class TrackerThread:
    """Hands what the loop logs to the trackers, each on a thread of its own, so none waits.

    A tracker that raises is dropped with one warning; a slow one delays only itself, and when its
    backlog is full loses every second record of it rather than memory or training time. ``warn``
    is called from those threads.
    """

    def __init__(
        self, trackers: Sequence[Tracker], warn: Callable[[str], None], *, capacity: int = 10_000
    ) -> None:
        self._lanes = [_TrackerQueue(tracker, warn, capacity) for tracker in trackers]

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        """Open every tracker, without waiting for it."""
        for lane in self._lanes:
            lane.put(partial(lane.tracker.start, run, job, resumed=resumed))

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Hand over the numbers of one step; returns at once."""
        record = _Record(metrics=dict(metrics), step=step)
        for lane in self._lanes:
            lane.put(record)

    def finish(self, *, state: str, summary: dict[str, Any], timeout_s: float = 60.0) -> None:
        """Close every tracker after all it was given; waits, but not longer than the timeout."""
        for lane in self._lanes:
            lane.put(partial(lane.tracker.finish, state=state, summary=dict(summary)))
        self.close(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the threads end after what they were given. Safe at any time, more than once."""
        for lane in self._lanes:
            lane.end()
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.join(max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True, slots=True)
class _Record:
    metrics: dict[str, float]
    step: int


_Item: TypeAlias = "_Record | Callable[[], None]"


def _thin(backlog: deque[_Item]) -> deque[_Item]:
    """Drop every second of neighbouring records with the same names; at least one record goes.

    Halving keeps the whole curve at a lower resolution, and rare records (an evaluation between
    steps) keep their place.
    """
    kept: deque[_Item] = deque()
    skipped = False
    for item in backlog:
        skipped = not skipped and bool(kept) and _alike(kept[-1], item)
        if not skipped:
            kept.append(item)
    if len(kept) == len(backlog):
        oldest = next((item for item in kept if isinstance(item, _Record)), None)
        if oldest is not None:
            kept.remove(oldest)
    return kept


def _alike(one: _Item, other: _Item) -> bool:
    if not isinstance(one, _Record) or not isinstance(other, _Record):
        return False
    return one.metrics.keys() == other.metrics.keys()


class _TrackerQueue:
    """One tracker, its backlog, and the thread that works it off."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None], capacity: int) -> None:
        self.tracker = tracker
        self._name = type(tracker).__name__
        self._warn = warn
        self._capacity = capacity
        self._backlog: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._ending = self._thinned = self._given_up = False
        # Daemon: a tracker that hangs must not keep a finished worker alive.
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        with self._changed:
            if self._ending:
                return
            crowded = len(self._backlog) >= self._capacity
            if crowded:
                self._backlog = _thin(self._backlog)
            first_time, self._thinned = crowded and not self._thinned, self._thinned or crowded
            self._backlog.append(item)
            self._changed.notify()
        if first_time:
            self._warn(f"{self._name} is slower than training: its curves have fewer points.")

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self._given_up:
            self._given_up = True
            left = len(self._backlog)
            self._warn(f"{self._name} did not finish in time; {left} records were not delivered.")

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                if isinstance(item, _Record):
                    self.tracker.log(item.metrics, step=item.step)
                else:
                    item()
            except Exception as error:  # noqa: BLE001 (foreign code: whatever it raises, training goes on)
                self._drop(error)
                return

    def _next(self) -> _Item | None:
        with self._changed:
            while not self._backlog and not self._ending:
                self._changed.wait()
            return self._backlog.popleft() if self._backlog else None

    def _drop(self, error: Exception) -> None:
        with self._changed:
            self._ending = True
            self._backlog.clear()
        cause = str(error) if isinstance(error, YunluError) else f"{type(error).__name__}: {error}"
        self._warn(f"{self._name} failed and is off for this run: {hide_credentials(cause)}")
