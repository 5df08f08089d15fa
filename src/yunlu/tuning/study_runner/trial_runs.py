"""Runs of trials: created once, given verdicts, cleaned up at their end."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from yunlu.core.json_decode import decode_json
from yunlu.core.settings import read_settings
from yunlu.runs.documents import read_job
from yunlu.runs.events import AttemptStarted
from yunlu.runs.home import find_runs, is_run_id, open_if_run
from yunlu.runs.run_store import Area, Document

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.tuning.study_dir import StudyRequest
    from yunlu.tuning.study_runner.slots import Slots
    from yunlu.tuning.values import Params

_SUFFIX = re.compile(r"-[0-9a-f]{6}")


def trial_name(study: str, number: int) -> str:
    """Name of a trial's run."""
    return f"{study}-{number:03d}"


def make_job(request: StudyRequest, number: int, params: Params, *, keep: int = 1) -> Job:
    """The job of a trial: the study's, with the trial's setting applied.

    ``keep`` is how many of its newest checkpoints stay: trials are many, and disks are not.
    """
    from yunlu.tuning.space import apply_params  # noqa: PLC0415 - the space is read late

    assert request.job is not None
    job = apply_params(request.job, params)
    checkpoint = job.train.checkpoint.model_copy(update={"keep_last": keep})
    metric = request.metrics[0]
    if checkpoint.metric == "auto" and metric not in {"cost", "seconds"}:
        # The best by the study's objective is exported; an unknown metric is refused.
        checkpoint = checkpoint.model_copy(update={"metric": metric})
    train = job.train.model_copy(update={"checkpoint": checkpoint})
    return job.model_copy(update={"train": train, "name": trial_name(request.name, number)})


def make_run(
    request: StudyRequest,
    number: int,
    params: Params,
    job: Job,
    slots: Slots,
    *,
    saves_checkpoints: bool,
    is_copy: bool = False,
) -> RunStore:
    """The run of a trial, not yet started; reused if an earlier runner was killed just after creating it."""
    run = _find_orphan(job) or slots.submit(job)
    control = {
        "study": request.name,
        "study_id": request.id,
        "number": number,
        "params": params,
        "rungs": request.rungs,
        "saves": saves_checkpoints,
        "is_copy": is_copy,
    }
    run.write(Document.TRIAL, json.dumps(control))
    return run


def find_run(run_id: str) -> RunStore | None:
    """Directory of a trial's run; None if it was deleted."""
    return open_if_run(read_settings().home / run_id) if is_run_id(run_id) else None


def write_verdict(run: RunStore, verdict: dict[str, Any]) -> None:
    """Write the worker's instruction: ``until``, a rung; ``hold`` or ``prune``, a reason; empty: to the end."""
    run.write(Document.TRIAL_CONTROL, json.dumps(verdict))


def read_verdict(run: RunStore) -> dict[str, Any]:
    """The last instruction to the worker."""
    content = run.read(Document.TRIAL_CONTROL)
    return {} if content is None else decode_json(content)


def drop_checkpoints(run: RunStore) -> None:
    """Delete the checkpoints of a run that will not continue."""
    run.remove(Area.CHECKPOINTS)


def _find_orphan(job: Job) -> RunStore | None:
    """A run that was submitted for this job and never started."""
    home, name = read_settings().home, str(job.name)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    for run in sorted(find_runs(home), key=lambda run: run.id):
        if not _SUFFIX.fullmatch(run.id.removeprefix(slug)) or not run.has(Document.JOB):
            continue
        same = read_job(run) == job
        if same and not any(isinstance(event, AttemptStarted) for event, _ in run.read_events()):
            return run
    return None
