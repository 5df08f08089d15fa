"""Another number of workers for a run that is training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.value import Value
from yunlu.executors.registry import is_elsewhere
from yunlu.jobs.lifecycle import read_record
from yunlu.runs.run_store import Area, Document
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import ask, read_crew

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore


class WorkerResize(Value):
    """What a running run will change to."""

    text: str
    layout: str
    """How the work will be split."""


def resize(run: RunStore, *, devices: int) -> WorkerResize:
    """Ask the supervisor of a run to go on with so many workers."""
    if devices < 1:
        raise StoreError(
            f"{devices} workers cannot train anything", hint="give one or more: --devices 2"
        )
    record = read_record(run)
    if record.state not in {RunState.PLANNING, RunState.RUNNING}:
        again = f"yunlu resume {run.id} goes on first" if record.state.can_resume else None
        raise StoreError(f"{run.id} is {record.state}: it has no workers to resize", hint=again)
    if run.has(Area.SERVERS):  # asynchronous workers: who keeps them alive reads this
        run.write(Document.TARGET_WORKERS, str(devices))
        return WorkerResize(text=f"{devices} workers from now on", layout=f"dp{devices}")
    if is_elsewhere(run):
        raise StoreError(
            f"{run.id} has its devices from a cluster",
            hint=f"the pool gives and takes them: yunlu pool why {run.id}",
        )
    crew = read_crew(run)
    if crew is None:
        raise StoreError(
            f"{run.id} is trained by one plain worker, which cannot be joined by others",
            hint="start it with --devices 2 or more; such a run can shrink and grow",
        )
    answer = ask(crew, {"kind": "resize", "devices": devices})
    if not answer.get("is_accepted"):
        raise StoreError(f"{run.id} was not resized: {answer.get('text')}")
    return WorkerResize(text=str(answer.get("text")), layout=str(answer.get("layout")))
