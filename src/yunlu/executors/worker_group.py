"""Worker group of a run as seen from outside: its running processes, and how to kill them."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.processes import ProcessHandle, forward_signals, start_process
from yunlu.core.settings import worker_environment
from yunlu.core.users import require_private
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document
from yunlu.runs.worker_group import WorkerGroup, read_worker_group, send_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.runs.run_store import RunStore

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


def run_node(run: RunStore, *, name: str, devices: int, directory: Path | None = None) -> int:
    """Run a node of a worker group until the run ends; returns the exit code."""
    check_joinable(run)
    group = read_worker_group(run)
    assert group is not None
    child = start_process(
        [*node_command(run, group), "--node", name, "--devices", str(devices)],
        directory=directory,
        environment=worker_environment(threads=1),
    )
    with forward_signals(child.terminate):  # the node's workers leave with notice
        return child.wait()
