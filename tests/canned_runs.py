"""Runs as a training leaves them behind, made without one."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu.core.settings import read_settings
from yunlu.executors.worker_process import WorkerProcess, record_worker
from yunlu.runs.events import StateChanged
from yunlu.runs.home import DirectoryRunStore, new_run
from yunlu.runs.run_store import Document, write_job
from yunlu.runs.states import RunState
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from collections.abc import Mapping

DAY_S = 86_400.0
_WAYS = {
    "running": (RunState.PLANNING, RunState.RUNNING),
    "finished": (RunState.PLANNING, RunState.RUNNING, RunState.FINISHED),
    "failed": (RunState.PLANNING, RunState.FAILED),
    "lost": (RunState.PLANNING, RunState.LOST),
    "stopped": (RunState.PLANNING, RunState.RUNNING, RunState.STOPPED),
}


def make_ended_run(
    name: str = "digits",
    *,
    state: str,
    age_days: float = 40,
    checkpoints: Mapping[int, Mapping[str, float] | None] = {},
    has_model: bool = False,
    **job: Any,
) -> DirectoryRunStore:
    """A run of the home whose last event is so old.

    ``checkpoints``: metrics by step; None for one without a manifest.
    """
    home = read_settings().home
    home.mkdir(mode=0o700, exist_ok=True)
    run_id, at = f"{name}-{secrets.token_hex(3)}", time.time() - age_days * DAY_S
    given = {"task": "tabular-classification", "model": "mlp", "data": "synthetic:x", **job}
    with new_run(home, run_id) as run:
        write_job(run, Job.model_validate({"name": name, **given}))
        run.write(Document.PLAN, json.dumps({"best_metric": "accuracy"}))
        nobody = WorkerProcess(pid=0, process_started_at=0.0, host="nowhere", detached=True)
        record_worker(run, nobody)
        run.emit(StateChanged(state=RunState.PENDING, at=at, directory=str(Path.cwd())))
        for step in _WAYS[state]:
            run.emit(StateChanged(state=step, at=at))
        for number, metrics in checkpoints.items():
            area = f"checkpoints/step-{number:010d}"
            run.write(f"{area}/0.safetensors", bytes(5000 + number), durable=False)
            if metrics is not None:
                manifest = json.dumps({"step": number, "metrics": metrics})
                run.write(f"{area}/manifest.json", manifest, durable=False)
        if has_model:
            run.write("model/model.safetensors", bytes(3000), durable=False)
    return DirectoryRunStore(home / run_id)
