"""The workers of a run with a supervisor, seen from outside: who lives, and how to end them."""

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
from yunlu.runs.worker_group import Crew, ask, read_crew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.runs.run_store import RunStore


def living_workers(run: RunStore) -> Iterator[WorkerProcess]:
    """Workers of the crew that run on this machine.

    They go on without their supervisor, and start another one within seconds.
    """
    crew = read_crew(run)
    for member in crew.members if crew else ():
        if member.host == socket.gethostname():
            worker = WorkerProcess(
                pid=member.pid,
                process_started_at=member.process_started_at,
                host=member.host,
                detached=True,
            )
            if worker.is_alive():
                yield worker


def end_workers(run: RunStore) -> None:
    """End every worker of the crew on this machine at once."""
    for worker in living_workers(run):
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)


def find_run(host: str, port: int, token: str) -> RunStore:
    """Where the run of a supervisor lies, on a file system that all nodes share."""
    crew = Crew(
        host=host, port=port, token=token, pid=0, process_started_at=0, node_module="", target=0
    )
    return open_run(Path(str(ask(crew, {"kind": "locate_run"}).get("text"))))


def run_node(run: RunStore, *, name: str, devices: int, directory: Path | None = None) -> int:
    """Be a node of a run until it ends; the exit code."""
    crew = read_crew(run)
    assert crew is not None
    words = [sys.executable, "-m", crew.node_module, run.address]
    child = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        [*words, "--node", name, "--devices", str(devices)],
        cwd=directory,
        env=worker_environment(threads=1),
    )

    # Who is told to go passes it on: the node's workers leave with notice.
    def pass_on(*_: object) -> None:
        child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    return child.wait()
