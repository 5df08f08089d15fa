"""Profiling of a few steps with torch's profiler: a Chrome trace and a table of operators.

Opt-in: the engine and the loop do not know of it.
"""

from __future__ import annotations

import gzip
import heapq
import json
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from yunlu.core.files import make_directory, restrict_tree
from yunlu.runs.events import TraceWritten
from yunlu.runs.run_store import Area, require_local
from yunlu.training.device import accelerator_kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from pathlib import Path

    from torch.autograd.profiler_util import EventList, FunctionEvent, FunctionEventAvg

    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.training.engine import Engine

PHASES = ("data", "forward", "backward", "norm", "update")
"""The parts of a step, in order; each is a range in the trace."""

_FILE = "trace.json.gz"
_STEPS = 3
_WARM_UP = 10
_SEARCH_AHEAD = 200
_MANY_MICRO_BATCHES = 4
_MOST_EVENTS = 150_000
"""About 20 bytes each once compressed: a file of a few megabytes."""
_ROWS = 30
_PREFIX = "yunlu."
_OUTSIDE = "outside operators"
_ANNOTATIONS = {"ProfilerStep": "loop", "Optimizer.": "update", "enumerate(DataLoader)": "data"}


class TraceWindow(NamedTuple):
    """Which steps of an attempt are traced."""

    first_step: int
    """Counted from 1 at the start of the attempt."""
    steps: int


@contextmanager
def traced(engine: Engine, run: RunStore) -> Generator[None]:
    """Trace a few steps of the loop that runs inside; removes its hooks afterwards."""
    window = choose_window(engine.plan, steps_done=engine.steps_done)
    if window is None:
        run.warn("There are too few steps left to trace any.")
        yield
        return
    with ExitStack() as ranges, StepTrace(run, **window._asdict()) as trace:
        ranges.enter_context(with_ranges(engine, trace))
        trace.on_done = ranges.close
        yield


def choose_window(plan: Plan, *, steps_done: int) -> TraceWindow | None:
    """A few steps after warm-up, without an evaluation or a checkpoint among them if possible."""
    left = plan.steps - steps_done
    # Micro-batches repeat one another: one step of many of them shows all there is.
    most_steps = _STEPS if plan.accumulation <= _MANY_MICRO_BATCHES else 1
    steps = min(most_steps, left - 1)
    if steps < 1:
        return None
    earliest = min(_WARM_UP, left - steps) + 1
    latest = min(earliest + _SEARCH_AHEAD, left - steps + 1)
    pauses = [every for every in (plan.evaluate_every, plan.checkpoint_every) if every]

    def is_quiet(first: int) -> bool:
        covered = range(steps_done + first, steps_done + first + steps)
        return all(step % every for step in covered for every in pauses)

    candidates = range(earliest, latest + 1)
    return TraceWindow(next(filter(is_quiet, candidates), earliest), steps)


class StepTrace:
    """Profiles ``steps`` steps from ``first_step`` on, then writes ``trace.json.gz`` and an event.

    Both are counted within this attempt. The step before the first one warms the profiler up, so the
    first step of an attempt is never traced.
    """

    def __init__(self, run: RunStore, *, first_step: int, steps: int) -> None:
        if first_step < 2 or steps < 1:
            raise ValueError(f"cannot trace {steps} steps from step {first_step}")
        self._run, self._first_step, self._steps = run, first_step, steps
        self._steps_done = 0
        self._profiler: profile | None = None
        self.is_done = False
        self.on_done: Callable[[], None] = lambda: None
        """Called once no further step is traced."""

    def __enter__(self) -> Self:
        self._start_if_due()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """Record the end of a step."""
        if self.is_done:
            return
        self._steps_done += 1
        profiler = self._profiler
        if profiler is not None:
            profiler.step()
            if self.is_done:
                profiler.stop()
        self._start_if_due()

    def close(self) -> None:
        """End the trace now; a run that ended early has fewer traced steps, or none."""
        if self.is_done:
            return
        if self._profiler is None or self._steps_done < self._first_step - 1:
            self._run.warn(f"Nothing was traced: the run ended before its step {self._first_step}.")
        if self._profiler is not None:
            self._profiler.stop()
        self._finish()

    def _start_if_due(self) -> None:
        if self._profiler is not None or self._steps_done != self._first_step - 2:
            return
        kind = accelerator_kind()
        activities = [ProfilerActivity.CPU, *(kind_of(kind).profiler_activities if kind else ())]
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._profiler.start()

    def _write(self, profiler: profile) -> None:
        path = require_local(self._run).directory(Area.TRACES) / _FILE
        aside = path.with_name(f".{_FILE}")
        try:
            make_directory(path.parent)
            events = list(profiler.events() or ())
            if len(events) > _MOST_EVENTS:
                _write_longest(events, aside)
            else:
                profiler.export_chrome_trace(str(aside))
            restrict_tree(path.parent)
            aside.replace(path)
        except OSError as error:  # a full disk costs the trace, not the run
            self._run.warn(f"The trace cannot be written: {error.strerror or error}.")
            aside.unlink(missing_ok=True)
            path = None
        self._run.emit(
            TraceWritten(
                path=None if path is None else f"{Area.TRACES}/{path.name}",
                first_step=self._first_step,
                **summarize(profiler.key_averages()),
            )
        )
        self._finish()

    def _finish(self) -> None:
        if not self.is_done:
            self.is_done, self._profiler = True, None
            self.on_done()


def summarize(averages: EventList) -> dict[str, Any]:
    """Data of a trace event: seconds by phase and by operator, with their shares."""
    rows: list[FunctionEventAvg] = list(averages)
    steps = [row for row in rows if str(row.key).startswith("ProfilerStep")]
    wall_s = sum(row.cpu_time_total for row in steps) / 1e6
    spent_s = {
        phase: sum(row.cpu_time_total for row in rows if row.key == _PREFIX + phase) / 1e6
        for phase in PHASES
    }
    spent_s["other"] = max(wall_s - sum(spent_s.values()), 0.0)
    return {
        "steps": sum(row.count for row in steps),
        "wall_s": wall_s,
        "phases": [
            {"name": name, "total_s": seconds, "share": seconds / wall_s if wall_s else 0.0}
            for name, seconds in spent_s.items()
        ],
        "table": _table(rows),
    }


@contextmanager
def with_ranges(engine: Engine, trace: StepTrace) -> Generator[None]:
    """Give the phases of each step their names in the trace, and tell the trace where steps end.

    The engine is wrapped, not changed: on the way out it is what it was.
    """
    wrapped = (
        (engine.task, "loss", "forward"),
        (engine.precision, "backward", "backward"),
        (engine, "norm", "norm"),
        (engine, "update", "update"),
    )
    with ExitStack() as undo:
        for owner, name, phase in wrapped:
            undo.enter_context(_replaced(owner, name, _in_range(_PREFIX + phase)))
        undo.enter_context(_replaced(engine, "batches", lambda batches: _fetch(batches, trace)))
        yield


@contextmanager
def _replaced(owner: object, name: str, wrap: Callable[[Any], Any]) -> Generator[None]:
    """Wrap a method of one object; immutable objects keep theirs."""
    method, is_own = getattr(owner, name), name in getattr(owner, "__dict__", {})
    try:
        setattr(owner, name, wrap(method))
    except (AttributeError, TypeError):
        yield
        return
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


def _in_range(label: str) -> Callable[[Any], Any]:
    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            with record_function(label):
                return method(*args, **kwargs)

        return ranged

    return wrap


def _fetch(batches: Callable[[], Iterator[Any]], trace: StepTrace) -> Callable[[], Iterator[Any]]:
    """Wrap fetching in a range; a step has ended when the next batch is requested."""

    def ranged() -> Iterator[Any]:
        source = batches()
        while not trace.is_done:
            with record_function(_PREFIX + "data"):
                fetched = next(source, None)
            if fetched is None:
                return
            yield fetched
            trace.step()
        yield from source

    return ranged


def _table(rows: Iterable[FunctionEventAvg]) -> list[dict[str, Any]]:
    """Self time by operator, largest first; on the device's clock where there is a device."""
    rows = [row for row in rows if row.device_type.name == "CPU"]
    on_device = any(row.self_device_time_total for row in rows)
    spent: dict[str, tuple[float, int]] = {}
    for row in rows:
        self_us = row.self_device_time_total if on_device else row.self_cpu_time_total
        if self_us <= 0:
            continue
        name = _name(row)
        seconds, calls = spent.get(name, (0.0, 0))
        spent[name] = seconds + self_us / 1e6, calls + row.count
    whole_s = sum(seconds for seconds, _ in spent.values())
    return [
        {"name": name, "self_s": seconds, "share": seconds / whole_s, "calls": calls}
        for name, (seconds, calls) in heapq.nlargest(
            _ROWS, spent.items(), key=lambda item: item[1][0]
        )
    ]


def _name(row: FunctionEventAvg) -> str:
    """Name of a row; time outside operators (Python, waiting) is named by its range."""
    name = str(row.key)
    if name.startswith(_PREFIX):
        return f"{_OUTSIDE} ({name.removeprefix(_PREFIX)})"
    for prefix, phase in _ANNOTATIONS.items():
        if name.startswith(prefix):
            return f"{_OUTSIDE} ({phase})"
    return name


def _write_longest(events: Iterable[FunctionEvent], path: Path) -> None:
    """Write the longest events in Chrome's format, where all would make too large a file."""
    longest = heapq.nlargest(_MOST_EVENTS, events, key=_duration_us)
    drawn = [
        {
            "ph": "X",
            "name": event.name,
            "pid": str(event.device_type).rpartition(".")[2],
            "tid": event.thread,
            "ts": event.time_range.start,
            "dur": _duration_us(event),
        }
        for event in longest
    ]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": drawn}, file)


def _duration_us(event: FunctionEvent) -> float:
    return event.time_range.elapsed_us()
