"""Worker group of a run as seen from outside: its running processes, and how to kill them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.settings import worker_environment
from yunlu.executors.worker_process import WorkerProcess
from yunlu.runs.home import open_run
from yunlu.runs.worker_group import WorkerGroup, read_worker_group, send_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.runs.run_store import RunStore


def running_workers(run: RunStore) -> Iterator[WorkerProcess]:
    """Worker processes of the run on this machine.

    They continue without their supervisor, and restart it within seconds.
    """
    group = read_worker_group(run)
    for worker in group.workers if group else ():
        if worker.host == socket.gethostname():
            process = WorkerProcess(
                pid=worker.pid,
                process_started_at=worker.process_started_at,
                host=worker.host,
                detached=True,
            )
            if process.is_alive():
                yield process


def kill_workers(run: RunStore) -> None:
    """Kill every worker of the run on this machine."""
    for process in running_workers(run):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def find_run(host: str, port: int, token: str) -> RunStore:
    """Ask a supervisor for its run, on a shared file system."""
    group = WorkerGroup(
        host=host, port=port, token=token, pid=0, process_started_at=0, node_module="", target=0
    )
    return open_run(Path(str(send_request(group, {"kind": "locate_run"}).get("text"))))


def run_node(run: RunStore, *, name: str, devices: int, directory: Path | None = None) -> int:
    """Run a node of a worker group until the run ends; returns the exit code."""
    group = read_worker_group(run)
    assert group is not None
    command = [sys.executable, "-m", group.node_module, run.address]
    child = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        [*command, "--node", name, "--devices", str(devices)],
        cwd=directory,
        env=worker_environment(threads=1),
    )

    # Forward stop signals: the node's workers leave with notice.
    def forward(*_: object) -> None:
        child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    return child.wait()
