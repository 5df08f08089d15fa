"""Worker processes on this machine, detached: they outlive who started them. Also those of a worker group."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError, missing_part
from yunlu.core.files import require_private
from yunlu.core.limits import decode_json
from yunlu.core.processes import (
    ProcessHandle,
    forward_signals,
    is_same_start,
    reap_in_background,
    start_process,
    start_time,
)
from yunlu.core.settings import read_accelerators, worker_environment
from yunlu.hardware.accelerators import VisibleDevices, find_devices, worker_defaults
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Area, Claim, Document, require_local
from yunlu.runs.worker_group import WorkerGroup, read_worker_group, send_request

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from yunlu.runs.run_store import RunStore

WORKER = (sys.executable, "-m", "yunlu.training.worker")
"""Started by module name: nothing here imports ``yunlu.training``."""
SUPERVISOR = (sys.executable, "-m", "yunlu.training.elastic.supervisor")
"""Supervisor of several workers."""
ASYNCHRONOUS = (sys.executable, "-m", "yunlu.training.asynchronous.supervisor")
"""Supervisor of asynchronous workers."""

_TELL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    """One process, identified by pid and start time: a pid alone may have been reused."""

    pid: int
    process_started_at: float
    host: str
    detached: bool
    """Started by us as the leader of its own process group. Only such a process may be signalled."""

    def is_alive(self) -> bool:
        """Whether it still runs. A process on another host is assumed to."""
        return self.host != socket.gethostname() or self._is_running()

    def stop(self) -> None:
        """Ask it to save and stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and its process group."""
        self._signal(signal.SIGKILL, to_group=True)

    def exit_code(self) -> int | None:
        """Exit code (negative: signal) of a child that has exited."""
        child = self._child()
        if child is None:
            return None
        if child.poll() is None and not self._is_running():
            # A background thread waits for it and is about to store the code.
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_TELL_S)
        return child.returncode

    def _child(self) -> subprocess.Popen[bytes] | None:
        started_at, child = _children.get(self.pid, (0.0, None))
        return child if is_same_start(started_at, self.process_started_at) else None

    def _is_running(self) -> bool:
        child = self._child()
        if child is not None and child.poll() is not None:  # reaps it, too
            return False
        return self._handle().is_alive()

    def _signal(self, number: int, *, to_group: bool = False) -> None:
        if self.detached and self._is_running():
            self._handle().send_signal(number, to_group=to_group)

    def _handle(self) -> ProcessHandle:
        return ProcessHandle(self.pid, self.process_started_at)


# Exit codes are known only of our own children.
_children: dict[int, tuple[float, subprocess.Popen[bytes]]] = {}


def require_training() -> None:
    """Fail before anything is written if the packages for training are not installed."""
    try:
        is_there = find_spec("torch") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise missing_part("torch", "train", "Training")


def is_asynchronous(run: RunStore, method: object) -> bool:
    """Whether its workers are asynchronous: by the job, or chosen by its worker group."""
    return method == "asynchronous" or run.has(Area.SERVERS)


def program_for(
    devices: int,
    *,
    spares: int,
    is_asynchronous: bool = False,
    is_elastic: bool = False,
    shares: int | None = None,
) -> tuple[str, ...]:
    """Command for a run on so many devices; the run's directory is appended.

    One worker alone needs nobody to answer for it, unless others are to join it. ``shares``: workers
    that asynchronous ones expect to be, those elsewhere among them.
    """
    if is_asynchronous:
        parts = (*ASYNCHRONOUS, "--devices", str(devices))
        return parts if shares is None else (*parts, "--shares", str(max(shares, devices)))
    if devices == 1 and not is_elastic:
        return WORKER
    return (*SUPERVISOR, "--devices", str(devices), "--spares", str(spares))


def visible_devices() -> VisibleDevices:
    """Accelerators that a process started here may use, found without importing torch."""
    declared, environment = read_accelerators()
    return find_devices(environment, declared=declared)


def count_gpus() -> int:
    """How many accelerators a process started here may use."""
    return len(visible_devices())


def this_process() -> WorkerProcess:
    """This process: a launcher, or a program that trains in-process."""
    return WorkerProcess(
        pid=os.getpid(),
        process_started_at=start_time(),
        host=socket.gethostname(),
        detached=False,
    )


def start_worker(
    run: RunStore,
    command: Sequence[str] | None = None,
    *,
    directory: Path | None = None,
    plan_only: bool = False,
    own_session: bool = True,
    environment: Mapping[str, str] | None = None,
) -> WorkerProcess:
    """Start the worker of a run in its own session, its output appended to ``worker.log``.

    Args:
        run: The run, whose ``job.json`` is written.
        command: Another program instead of the worker, given the run's directory as last argument.
        directory: Where it runs: relative paths in the job are relative to this.
        plan_only: Ask for the plan, not for training.
        own_session: Not where a launcher is to find and end it with this process.
        environment: Variables that it is to have besides ours.
    """
    text = list(command or WORKER)
    text += [run.address] + ["--plan-only"] * plan_only
    if directory is not None and not directory.is_dir():
        raise StoreError(
            f"the run was submitted from {directory}, which is no longer there",
            hint="put the directory back: relative paths in the job start from it",
        )
    with require_local(run).open_text_log(WORKER_LOG) as log:
        child = start_process(
            text,
            log=log,
            directory=directory,
            environment={**worker_defaults(), **worker_environment(), **(environment or {})},
            own_session=own_session,
            own_group=not own_session,
        )
    # A child that is not yet waited for keeps its pid, even when it has exited.
    started_at = start_time(child.pid)
    _children[child.pid] = (started_at, child)
    reap_in_background(child)
    worker = WorkerProcess(
        pid=child.pid, process_started_at=started_at, host=socket.gethostname(), detached=True
    )
    record_worker(run, worker)
    return worker


def record_worker(run: RunStore, worker: WorkerProcess) -> None:
    """Record the process responsible for the run, before the worker can do so itself."""
    run.write(Document.WORKER, json.dumps(asdict(worker)))


def recorded_worker(run: RunStore) -> WorkerProcess | None:
    """The process last recorded for the run."""
    try:
        return WorkerProcess(**decode_json(run.read(Document.WORKER) or b""))
    except (OSError, ValueError, TypeError):  # absent, or of another version
        return None


@contextmanager
def launch_lock(run: RunStore, *, wait: bool) -> Generator[None]:
    """Lock for starting, stopping or reaping the run's worker; ``BlockingIOError`` when taken."""
    with run.claim(Claim.LAUNCH, wait=wait):
        yield


def worker_lock_is_free(run: RunStore) -> bool:
    """Whether no worker holds the run: a worker keeps ``worker.lock`` while it is alive."""
    return not run.is_claimed(Claim.WORKER)


NODE_MODULES = ("yunlu.training.topology.elastic", "yunlu.training.asynchronous.node")
"""Programs that can join a run: started by name, since nothing here imports the training room."""


def running_workers(run: RunStore) -> Iterator[ProcessHandle]:
    """Worker processes of the run on this machine.

    They continue without their supervisor, and restart it within seconds.
    """
    group = read_worker_group(run)
    for worker in group.workers if group else ():
        if worker.host == socket.gethostname():
            process = ProcessHandle(worker.pid, worker.process_started_at)
            if process.is_alive():
                yield process


def kill_workers(run: RunStore) -> None:
    """Kill every worker of the run on this machine."""
    for process in running_workers(run):
        process.send_signal(signal.SIGKILL)


def find_run(host: str, port: int, token: str) -> RunStore:
    """Ask a supervisor for its run, on a shared file system; only one of ours is taken for it."""
    group = WorkerGroup(
        host=host, port=port, token=token, pid=0, process_started_at=0, node_module="", target=0
    )
    answer = Path(str(send_request(group, {"kind": "locate_run"}).get("text")))
    if not answer.is_absolute() or not answer.is_dir():
        raise StoreError(
            f"the supervisor at {host}:{port} says that its run is in {answer}, "
            "which is no directory of this machine",
            hint="share it between the machines, at the same path and for the same user",
        )
    run = open_run(answer)
    check_joinable(run)
    return run


def check_joinable(run: RunStore) -> None:
    """Refuse a run whose record of the worker group somebody else may have written."""
    for item in ("", Document.WORKER_GROUP):
        if run.has(item):
            require_private(Path(run.location(item)))


def node_command(run: RunStore, group: WorkerGroup) -> list[str]:
    """Command of a node of the group; its program is one of ours, whatever the record says."""
    if group.node_module not in NODE_MODULES:
        raise StoreError(
            f"the {Document.WORKER_GROUP} of {run.id} names the program {group.node_module!r}, "
            "which is no node of a worker group: it was not started",
            hint=f"known: {', '.join(NODE_MODULES)}; do not join a run whose files you do not know",
        )
    return [sys.executable, "-m", group.node_module, run.address]


def run_node(run: RunStore, *, name: str, devices: int) -> int:
    """Run a node of a worker group until the run ends; returns the exit code."""
    check_joinable(run)
    group = read_worker_group(run)
    assert group is not None
    child = start_process(
        [*node_command(run, group), "--node", name, "--devices", str(devices)],
        environment=worker_defaults() | worker_environment(threads=1),
    )
    with forward_signals(child.terminate):  # the node's workers leave with notice
        return child.wait()
