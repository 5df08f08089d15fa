"""One worker process: from a run's directory to a trained, evaluated, exported model.

``python -m yunlu.training.worker RUN_DIR`` is how every executor starts it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.launch import detect_launch
from yunlu.core.processes import die_with_parent
from yunlu.core.secrets import make_process_private, mask, mask_value
from yunlu.core.settings import launch_variables
from yunlu.runs.events import ErrorRaised
from yunlu.runs.home import open_run
from yunlu.runs.run_store import read_job
from yunlu.runs.states import RunState
from yunlu.training.attempt import (
    RunBusyError,
    StopRequestedError,
    as_user_error,
    begin_attempt,
    change_state,
    run_lock,
    signals_as_stop,
)
from yunlu.training.determinism import set_deterministic
from yunlu.training.runner import Runner
from yunlu.training.topology.single import SingleTopology

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from yunlu.runs.run_store import RunStore
    from yunlu.training.tasks.task import Task


def main() -> int:
    """The command line that executors use."""
    parser = argparse.ArgumentParser(prog="yunlu.training.worker")
    parser.add_argument("run", type=Path, help="the run's directory; - on launched ranks but 0")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument(
        "--launched", action="store_true", help="as one of a launch (torchrun, ...)"
    )
    parser.add_argument("--parent", type=int, help="end when this process ends")
    parser.add_argument("--run-index", type=int, default=0, help="runs this launch trained before")
    arguments = parser.parse_args()
    make_process_private()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    if not arguments.launched:
        state = run(arguments.run, plan_only=arguments.plan_only)
        return 1 if state is RunState.FAILED else 0
    launch, is_follower = detect_launch(launch_variables()), str(arguments.run) == "-"
    if launch is None or (launch.rank == 0) == is_follower:
        parser.error("for externally launched processes only; rank 0 is given the directory")
    # A single worker imports no code of worker groups.
    from yunlu.training.topology.launched import run_launched  # noqa: PLC0415

    path = None if is_follower else arguments.run.absolute()
    state = run_launched(path, launch, run_index=arguments.run_index)
    return 1 if state is RunState.FAILED else 0


def run(
    run: Path,
    *,
    task: Task | None = None,
    callbacks: Sequence[Any] = (),
    plan_only: bool = False,
) -> RunState:
    """Run one attempt; every outcome is reported as an event, no exception escapes.

    ``task`` and ``callbacks`` are objects of the user's own process.
    """
    directory = open_run(run)

    def report_stop() -> None:
        change_state(directory, RunState.STOPPED, reason=_STOPPED)

    # A user's own process is not ours to end.
    on_stuck = report_stop if _is_worker_process() else None
    try:
        with run_lock(directory), _torch_settings_restored(), signals_as_stop(on_stuck) as stop:
            # In a user's own Python process the run begins now, not when that process did.
            began_at = None if _is_worker_process() else time.time()
            attempt, started_at = begin_attempt(directory, began_at=began_at)
            job = read_job(directory)
            change_state(directory, RunState.PLANNING)
            topology = SingleTopology(stop, task=task, plan_only=plan_only)
            runner = Runner(directory, job, topology, attempt=attempt)
            runner.own_callbacks = callbacks
            try:
                return runner.run_attempt(started_at=started_at)
            except StopRequestedError:
                return change_state(directory, RunState.STOPPED, reason=_STOPPED)
    except (
        RunBusyError
    ) as error:  # the run belongs to another worker: nothing of ours goes into its log
        sys.stderr.write(f"{error}\n")
        return RunState.FAILED
    except Exception as error:  # noqa: BLE001 (the last handler: every failure becomes an event)
        _report_failure(directory, error)
        return RunState.FAILED


_STOPPED = "stop requested"


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
