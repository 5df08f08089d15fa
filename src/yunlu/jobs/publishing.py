"""A new run's directory: made aside, shown by one rename."""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.files import sync_directory, write_atomically
from yunlu.executors.worker_process import record_worker, this_process
from yunlu.runs.events import StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

_STALE_S = 3600


def publish(job: Job, source: Path | None, parent: Path) -> RunStore:
    """The directory of a new run, whole from the moment at which it can be seen."""
    name = job.name or _slug(source.stem if source else job.task)
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    try:
        aside.chmod(0o755)
        _fill(open_run(aside), job.model_copy(update={"name": name}), source)
        # A run's directory is never empty, so the rename fails rather than replace one.
        path = aside.rename(parent / f"{_slug(name)}-{secrets.token_hex(3)}")
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_directory(parent)
    return open_run(path)


def _fill(run: RunStore, job: Job, source: Path | None) -> None:
    write_atomically(run.job, job.model_dump_json(indent=2))
    if source is not None:
        shutil.copyfile(source, run.job_source)
    record_worker(run, this_process())
    state, directory = RunState.PENDING.value, str(Path.cwd())
    run.emit(StateChanged(state=state, reason="submitted", directory=directory))


def sweep(parent: Path) -> None:
    """Remove what a submit that crashed long ago left behind."""
    for path in parent.glob(".new-*"):
        with suppress(FileNotFoundError):  # published while we looked
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"
