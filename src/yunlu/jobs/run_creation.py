"""Run creation: the documents and the first event of a new run."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.secrets import mask_job_text
from yunlu.executors.worker_process import record_worker, this_process
from yunlu.runs.documents import write_job, write_submitted_plan
from yunlu.runs.events import StateChanged
from yunlu.runs.home import new_run, open_run
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState
from yunlu.spec.credentials import refuse_credentials

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job


def create_run(job: Job, source: Path | None, home: Path, plan: Plan | None = None) -> RunStore:
    """Create a pending run; it appears in its home whole or not at all."""
    refuse_credentials(job.model_dump(mode="json", exclude_unset=True), "job")
    name = job.name or _slug(source.stem if source else job.task)
    run_id = f"{_slug(name)}-{secrets.token_hex(3)}"
    with new_run(home, run_id) as run:
        if plan is not None:
            write_submitted_plan(run, plan)
        _fill(run, job.model_copy(update={"name": name}), source)
    return open_run(home / run_id)


def _fill(run: RunStore, job: Job, source: Path | None) -> None:
    write_job(run, job)
    if source is not None:
        text = source.read_bytes().decode(errors="replace")
        run.write(Document.JOB_SOURCE, mask_job_text(text))
    record_worker(run, this_process())
    submitted = StateChanged(state=RunState.PENDING, reason="submitted", directory=str(Path.cwd()))
    run.emit(submitted)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"
