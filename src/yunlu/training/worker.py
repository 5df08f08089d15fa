"""One worker process: from a run's directory to a trained, evaluated, exported model.

``python -m yunlu.training.worker RUN_DIR`` is how every executor starts it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil
import torch

from yunlu.core.errors import StoreError, TrainingError, YunluError, is_disk_full
from yunlu.core.rundir import EventKind, RunDir
from yunlu.core.states import RunState
from yunlu.planning.planner import cap_bytes
from yunlu.spec.job import Job
from yunlu.training import loop
from yunlu.training.checkpoint.state import seed_everything
from yunlu.training.determinism import set_deterministic
from yunlu.training.engine import Engine
from yunlu.training.environment import describe_environment
from yunlu.training.finish import finish
from yunlu.training.memory.shortage import is_out_of_memory, memory_capped
from yunlu.training.prepare import prepare, settle_plan
from yunlu.training.probe import probe_machine
from yunlu.training.trackers.open import TrackerThread, open_trackers
from yunlu.training.watch import StopRequest, TrainingWatch

if TYPE_CHECKING:
    from collections.abc import Generator

    from yunlu.catalog.machine import Machine
    from yunlu.training.tasks.task import Task


class RunBusyError(StoreError):
    """Another worker holds the run."""


def main() -> int:
    """The command line that executors use."""
    parser = argparse.ArgumentParser(prog="yunlu.training.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--plan-only", action="store_true")
    asked = parser.parse_args()
    state = run(asked.run_dir, plan_only=asked.plan_only)
    return 1 if state is RunState.FAILED else 0


def run(run_dir: Path, *, task: Task | None = None, plan_only: bool = False) -> RunState:
    """Live one life of a run; every way it can end is an event, never an escaped exception."""
    directory = RunDir(run_dir)
    try:
        with _only_worker(directory), _torch_as_it_was(), _signals_as_stop() as stop:
            life, started_at = _begin_life(directory)
            return _live(
                directory, task, stop, life=life, started_at=started_at, plan_only=plan_only
            )
    except RunBusyError as error:  # the other worker's run: nothing of ours belongs in its log
        sys.stderr.write(f"{error}\n")
        return RunState.FAILED
    except Exception as error:  # noqa: BLE001 (the last border: what went wrong becomes an event)
        _report_failure(directory, error)
        return RunState.FAILED


def _live(
    directory: RunDir,
    task: Task | None,
    stop: StopRequest,
    *,
    life: int,
    started_at: float,
    plan_only: bool,
) -> RunState:
    job = Job.model_validate_json(directory.job.read_text())
    _move(directory, RunState.PLANNING)
    machine = probe_machine()
    environment = describe_environment(machine)
    directory.emit(EventKind.ENVIRONMENT, **environment)
    set_deterministic(job.train.deterministic)
    parts = prepare(directory, job, task)
    plan = settle_plan(directory, job, parts, machine, started_at=started_at)
    if plan_only or stop.is_set:
        reason = (
            "only the plan was asked for" if plan_only else "asked to stop before the first step"
        )
        return _move(directory, RunState.STOPPED, reason=reason)

    torch.set_num_threads(plan.threads)
    seed_everything(job.train.seed)
    engine = Engine(job, plan, parts, directory.emit)
    trackers = TrackerThread(
        open_trackers(["tensorboard", *job.trackers]),
        warn=directory.warn,
    )
    watch = TrainingWatch(engine, directory, trackers=trackers, stop=stop, life=life)
    state, summary = RunState.FAILED, dict[str, Any]()
    try:
        resumed_from = watch.resume()
        trackers.start(directory, job, resumed=resumed_from is not None)
        _move(directory, RunState.RUNNING, resumed_from_step=resumed_from)
        if not watch.stopped_early:
            trace = _tracing(engine, directory) if job.train.profile else nullcontext()
            with memory_capped(cap_bytes(job, machine)), trace:
                loop.run(engine, watch)
        watch.log.flush()
        watch.checkpoints.wait()
        if engine.steps_done < plan.steps and not watch.stopped_early:
            state = RunState.STOPPED
        else:
            summary = finish(directory, engine, watch, environment, machine)
            state = RunState.FINISHED
    finally:
        with suppress(OSError, TrainingError):  # whatever failed before is what gets told
            watch.log.flush()
        watch.checkpoints.close()
        engine.close()
        trackers.finish(state=state, summary=summary)
    return _move(directory, state)


def _move(directory: RunDir, state: RunState, **data: Any) -> RunState:
    directory.emit(EventKind.STATE, state=state, **data)
    return state


def _tracing(engine: Engine, directory: RunDir) -> AbstractContextManager[None]:
    from yunlu.training.trace import traced  # noqa: PLC0415 - the profiler is slow to import

    return traced(engine, directory)


def _begin_life(directory: RunDir) -> tuple[int, float]:
    """Tell who lives, and since when; the process's own start tells it from a later namesake."""
    lives = sum(event.kind is EventKind.LIFE for event, _ in directory.read_events())
    process_at = psutil.Process().create_time()
    # In somebody's own Python process, the run begins now, not when that process did.
    began_at = process_at if _is_worker_process() else time.time()
    directory.emit(
        EventKind.LIFE,
        number=lives + 1,
        pid=os.getpid(),
        process_started_at=process_at,
        began_at=began_at,
    )
    return lives + 1, began_at


def _is_worker_process() -> bool:
    return __name__ == "__main__"


@contextmanager
def _only_worker(directory: RunDir) -> Generator[None]:
    """Hold the run's lock: two workers on one run would destroy each other's work."""
    with (directory.path / "worker.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunBusyError(
                f"Run {directory.id} already has a worker.", hint="`yunlu ps` shows it."
            ) from error
        _held_locks.append(file)
        try:
            yield
        finally:
            _held_locks.remove(file)


_held_locks: list[IO[str]] = []


def _let_go_of_locks() -> None:
    while _held_locks:
        _held_locks.pop().close()


# Loading processes outlive a killed worker for seconds; a copy of its lock would keep the run busy.
os.register_at_fork(after_in_child=_let_go_of_locks)


@contextmanager
def _torch_as_it_was() -> Generator[None]:
    """Put torch's global settings back: the run may live in somebody's own process."""
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        set_deterministic(strict, warn_only=warn_only)


@contextmanager
def _signals_as_stop() -> Generator[StopRequest]:
    """SIGTERM and Ctrl-C ask for a stop at the next step boundary."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals belong to the main thread
        return
    before = {number: signal.signal(number, stop.set) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, reaction in before.items():
            signal.signal(number, reaction)


def _report_failure(directory: RunDir, error: Exception) -> None:
    shown = _as_user_error(error)
    details = "".join(traceback.format_exception(error))
    sys.stderr.write(details)  # into the worker's own log
    data: dict[str, Any] = {"code": shown.code, "message": shown.message, "hint": shown.hint}
    try:
        directory.emit(EventKind.ERROR, **data, traceback=details)
        _move(directory, RunState.FAILED)
    except OSError:
        sys.stderr.write(json.dumps(data))  # not even the event log can be written


def _as_user_error(error: Exception) -> YunluError:
    if isinstance(error, YunluError):
        return error
    if is_disk_full(error):
        return TrainingError(
            f"The disk is full: {error}", hint="Free some space, then `yunlu resume`."
        )
    if is_out_of_memory(error):
        return TrainingError(
            f"Memory ran out: {error}", hint="Lower train.micro_batch, then `yunlu resume`."
        )
    internal = YunluError(
        f"{type(error).__name__}: {error}", hint="`--debug` shows where; worker.log keeps it."
    )
    internal.code = "internal"
    return internal


if __name__ == "__main__":
    sys.exit(main())
