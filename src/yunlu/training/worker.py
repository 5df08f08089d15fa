"""One worker process: from a run's directory to a trained, evaluated, exported model.

``python -m yunlu.training.worker RUN_DIR`` is how every executor starts it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import TrainingError
from yunlu.core.private_process import make_process_private
from yunlu.core.secrets import mask, mask_value
from yunlu.planning.layout import Layout
from yunlu.planning.planner import cap_bytes
from yunlu.planning.splitting import fit_plan
from yunlu.runs.documents import read_job
from yunlu.runs.events import EnvironmentRecorded, ErrorRaised
from yunlu.runs.home import open_run
from yunlu.runs.states import RunState
from yunlu.training import loop
from yunlu.training.attempt import (
    RunBusyError,
    as_user_error,
    begin_attempt,
    change_state,
    run_lock,
    signals_as_stop,
)
from yunlu.training.callbacks import TrainingCallbacks
from yunlu.training.checkpoint.state import seed_everything
from yunlu.training.determinism import set_deterministic
from yunlu.training.engine import Engine
from yunlu.training.environment import describe_environment
from yunlu.training.finalize import finalize
from yunlu.training.memory.out_of_memory import memory_capped
from yunlu.training.prepare import load_or_make_plan, prepare
from yunlu.training.probe import probe_machine
from yunlu.training.trackers.registry import TrackerThread, open_trackers

if TYPE_CHECKING:
    from collections.abc import Generator

    from yunlu.runs.run_store import RunStore
    from yunlu.training.callbacks import StopRequest
    from yunlu.training.tasks.task import Task


def main() -> int:
    """The command line that executors use."""
    parser = argparse.ArgumentParser(prog="yunlu.training.worker")
    parser.add_argument("run", type=Path)
    parser.add_argument("--plan-only", action="store_true")
    arguments = parser.parse_args()
    make_process_private()
    state = run(arguments.run, plan_only=arguments.plan_only)
    return 1 if state is RunState.FAILED else 0


def run(run: Path, *, task: Task | None = None, plan_only: bool = False) -> RunState:
    """Run one attempt; every outcome is reported as an event, no exception escapes."""
    directory = open_run(run)
    try:
        with run_lock(directory), _torch_settings_restored(), signals_as_stop() as stop:
            # In a user's own Python process the run begins now, not when that process did.
            began_at = None if _is_worker_process() else time.time()
            attempt, started_at = begin_attempt(directory, began_at=began_at)
            return _run_attempt(
                directory, task, stop, attempt=attempt, started_at=started_at, plan_only=plan_only
            )
    except (
        RunBusyError
    ) as error:  # the run belongs to another worker: nothing of ours goes into its log
        sys.stderr.write(f"{error}\n")
        return RunState.FAILED
    except Exception as error:  # noqa: BLE001 (the last handler: every failure becomes an event)
        _report_failure(directory, error)
        return RunState.FAILED


def _run_attempt(
    directory: RunStore,
    task: Task | None,
    stop: StopRequest,
    *,
    attempt: int,
    started_at: float,
    plan_only: bool,
) -> RunState:
    job = read_job(directory)
    change_state(directory, RunState.PLANNING)
    machine = probe_machine()
    environment = describe_environment(machine)
    directory.emit(EnvironmentRecorded(**environment))
    set_deterministic(job.train.deterministic)
    inputs = prepare(directory, job, task)
    plan = load_or_make_plan(directory, job, inputs, machine, started_at=started_at)
    if plan_only or stop.is_set:
        reason = (
            "only the plan was requested" if plan_only else "stop requested before the first step"
        )
        return change_state(directory, RunState.STOPPED, reason=reason)

    if not plan.layout.is_single:  # of an earlier attempt on several workers
        plan = fit_plan(plan, job, Layout(), cores=machine.cores)
    torch.set_num_threads(plan.threads)
    seed_everything(job.train.seed)
    engine = Engine(job, plan, inputs, directory.emit)
    trackers = TrackerThread(
        open_trackers(["tensorboard", *job.trackers]),
        warn=directory.warn,
    )
    callbacks = TrainingCallbacks(engine, directory, trackers=trackers, stop=stop, attempt=attempt)
    state, summary = RunState.FAILED, dict[str, Any]()
    try:
        resumed_from = callbacks.resume()
        trackers.start(directory, job, resumed=resumed_from is not None)
        change_state(directory, RunState.RUNNING, resumed_from_step=resumed_from)
        if not callbacks.stopped_early:
            trace = _tracing(engine, directory) if job.train.profile else nullcontext()
            with memory_capped(cap_bytes(job, machine)), trace:
                loop.run(engine, callbacks)
        callbacks.log.flush()
        callbacks.checkpoints.wait()
        if engine.steps_done < engine.batch_schedule.steps and not callbacks.stopped_early:
            state = RunState.STOPPED
        else:
            summary = finalize(directory, engine, callbacks, environment, machine)
            state = RunState.FINISHED
    finally:
        with suppress(OSError, TrainingError):  # an earlier failure takes precedence
            callbacks.log.flush()
        callbacks.checkpoints.close()
        engine.close()
        trackers.finish(state=state, summary=summary)
    reason = {} if callbacks.decision is None else {"reason": callbacks.decision.reason}
    return change_state(directory, state, **reason)


def _tracing(engine: Engine, directory: RunStore) -> AbstractContextManager[None]:
    from yunlu.training.trace import traced  # noqa: PLC0415 - the profiler is slow to import

    return traced(engine, directory)


def _is_worker_process() -> bool:
    return __name__ == "__main__"


@contextmanager
def _torch_settings_restored() -> Generator[None]:
    """Restore torch's global settings: the run may share a user's own process."""
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        set_deterministic(strict, warn_only=warn_only)


def _report_failure(directory: RunStore, error: Exception) -> None:
    user_error = as_user_error(error)
    details = mask("".join(traceback.format_exception(error)))
    sys.stderr.write(details)  # into the worker's own log
    data: dict[str, Any] = {
        "code": user_error.code,
        "message": user_error.message,
        "hint": user_error.hint,
    }
    try:
        directory.emit(ErrorRaised(**data, traceback=details))
        change_state(directory, RunState.FAILED)
    except OSError:
        sys.stderr.write(json.dumps(mask_value(data)))  # not even the event log can be written


if __name__ == "__main__":
    sys.exit(main())
