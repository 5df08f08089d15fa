"""Child processes that train on behalf of externally launched ones, and end with them."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.launch import detect_launch
from yunlu.core.processes import forward_signals, start_process
from yunlu.core.settings import launch_variables

if TYPE_CHECKING:
    from yunlu.core.launch import LaunchInfo

_WORKER = (sys.executable, "-m", "yunlu.training.worker", "--launched")
_run_indices = itertools.count()
"""Runs trained by this process; all ranks count alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """Result of a worker on a rank other than 0."""

    path: Path | None
    """Directory of the run, if rank 0 shared it."""
    code: int


def current_launch() -> LaunchInfo | None:
    """Rank of this process in an external launch; None if it was started alone."""
    return detect_launch(launch_variables())


def worker_command() -> tuple[str, ...]:
    """Command of rank 0 for the next run; the run's directory is appended."""
    return (*_WORKER, "--parent", str(os.getpid()), "--run-index", str(next(_run_indices)))


def run_follower() -> ChildResult:
    """Train the run of rank 0 until it ends."""
    child = start_process([*worker_command(), "-"], is_piped=True, own_group=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    with forward_signals(child.terminate), child.stdout as lines:
        path = os.fsdecode(lines.readline().strip())
        code = child.wait()
    return ChildResult(path=Path(path) if path else None, code=code)
