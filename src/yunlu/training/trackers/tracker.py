"""The ``Tracker`` extension point: destinations of metrics besides the run's own files.

Trackers are found by name; each has a thread of its own, so that none blocks the training loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from yunlu.core.errors import JobError, YunluError
from yunlu.core.imports import TRACKERS, load_registered, make_object, names_object
from yunlu.core.secrets import mask, mask_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run. A failing tracker is disabled with a warning; the run goes on.

    Built with no arguments. Called from one thread that is not the training loop's.
    """

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        """Start tracking this run; ``resumed`` is true for a later attempt of the same run."""
        ...

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Log metrics of one step, such as ``train/loss`` or ``validation/accuracy``."""
        ...

    def finish(self, *, state: str, summary: dict[str, Any]) -> None:
        """Close: the run ended in ``state`` (a ``RunState`` value) with these final metrics."""
        ...


def public_config(job: Job) -> dict[str, Any]:
    """The job as nested plain values, with credentials masked."""
    return mask_value(job.model_dump(mode="json"))


def flatten(config: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """``{"train": {"batch": 8}}`` → ``{"train.batch": 8}``; lists are not flattened."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, prefix=f"{name}."))
        else:
            flat[name] = value
    return flat


ALWAYS = "tensorboard"


def open_trackers(names: Sequence[str]) -> list[Tracker]:
    """TensorBoard and the named trackers, by entry point or ``module:Class``."""
    return [_make(name) for name in dict.fromkeys([ALWAYS, *names])]


def _make(name: str) -> Tracker:
    if names_object(name):
        tracker = make_object(name)
    else:
        tracker = load_registered(TRACKERS, name, kind="tracker")()
    if not isinstance(tracker, Tracker):
        raise JobError(
            f"trackers: {name} is not a tracker.", hint="it needs the methods start, log and finish"
        )
    return tracker


class TrackerThread:
    """Passes logged metrics to the trackers, each on a thread of its own.

    A tracker that raises is disabled with one warning; a slow one delays only itself, and if its
    backlog is full, every second record is dropped. ``warn``
    is called from those threads.
    """

    def __init__(
        self, trackers: Sequence[Tracker], warn: Callable[[str], None], *, capacity: int = 10_000
    ) -> None:
        self._queues = [_TrackerQueue(tracker, warn, capacity) for tracker in trackers]

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        """Start every tracker, without waiting."""
        for queue in self._queues:
            queue.put(partial(queue.tracker.start, run, job, resumed=resumed))

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Log the metrics of one step; does not block."""
        record = _Record(metrics=dict(metrics), step=step)
        for queue in self._queues:
            queue.put(record)

    def finish(self, *, state: str, summary: dict[str, Any], timeout_s: float = 60.0) -> None:
        """Finish every tracker after its backlog; waits up to the timeout."""
        for queue in self._queues:
            queue.put(partial(queue.tracker.finish, state=state, summary=dict(summary)))
        self.close(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads after their backlog. May be called at any time, more than once."""
        for queue in self._queues:
            queue.end()
        deadline = time.monotonic() + timeout_s
        for queue in self._queues:
            queue.join(max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True, slots=True)
class _Record:
    metrics: dict[str, float]
    step: int


_Item: TypeAlias = "_Record | Callable[[], None]"


def _thin(backlog: deque[_Item]) -> deque[_Item]:
    """Drop every second of neighbouring records with the same names; at least one record.

    Halving keeps the full curve at a lower resolution, and rare records (an evaluation between
    steps) stay.
    """
    thinned: deque[_Item] = deque()
    skipped = False
    for item in backlog:
        skipped = not skipped and bool(thinned) and _has_same_names(thinned[-1], item)
        if not skipped:
            thinned.append(item)
    if len(thinned) == len(backlog):
        oldest = next((item for item in thinned if isinstance(item, _Record)), None)
        if oldest is not None:
            thinned.remove(oldest)
    return thinned


def _has_same_names(one: _Item, other: _Item) -> bool:
    if not isinstance(one, _Record) or not isinstance(other, _Record):
        return False
    return one.metrics.keys() == other.metrics.keys()


class _TrackerQueue:
    """One tracker, its backlog and its thread."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None], capacity: int) -> None:
        self.tracker = tracker
        self._name = type(tracker).__name__
        self._warn = warn
        self._capacity = capacity
        self._backlog: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._ending = self._thinned = self._has_warned = False
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
        if self._thread.is_alive() and not self._has_warned:
            self._has_warned = True
            left = len(self._backlog)
            self._warn(f"{self._name} did not finish in time; {left} records were not delivered.")

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                if isinstance(item, _Record):
                    self.tracker.log(item.metrics, step=item.step)
                else:
                    item()
            except Exception as error:  # noqa: BLE001 (third-party code: training continues after any error)
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
        self._warn(f"{self._name} failed and is disabled for this run: {mask(cause)}")
