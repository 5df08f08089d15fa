"""Change the number of workers of a running run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.value import Value
from yunlu.executors.registry import is_elsewhere
from yunlu.jobs.lifecycle import read_record
from yunlu.runs.run_store import Area, Document, require_own
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import read_worker_group, send_request

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore


class WorkerResize(Value):
    """Accepted change of the number of workers."""

    text: str
    layout: str
    """Parallel layout for the new number."""


def resize(run: RunStore, *, devices: int) -> WorkerResize:
    """Ask the supervisor of a run to continue with this number of workers."""
    if devices < 1:
        raise StoreError(
            f"a run needs at least one worker, not {devices}", hint="for example: --devices 2"
        )
    require_own(run)
    record = read_record(run)
    if record.state not in {RunState.PLANNING, RunState.RUNNING}:
        hint = f"resume it first: yunlu resume {run.id}" if record.state.can_resume else None
        raise StoreError(f"{run.id} is {record.state}: it has no workers to resize", hint=hint)
    if run.has(Area.SERVERS):  # read by the supervisor of asynchronous workers
        run.write(Document.TARGET_WORKERS, str(devices))
        return WorkerResize(text=f"{devices} workers from now on", layout=f"dp{devices}")
    if is_elsewhere(run):
        raise StoreError(
            f"the devices of {run.id} belong to a cluster",
            hint=f"the pool allocates them; see: yunlu pool why {run.id}",
        )
    group = read_worker_group(run)
    if group is None:
        raise StoreError(
            f"{run.id} is trained by one plain worker without a supervisor, which no worker can join",
            hint="start it with --devices 2 or more: then it can shrink and grow",
        )
    answer = send_request(group, {"kind": "resize", "devices": devices})
    if not answer.get("is_accepted"):
        raise StoreError(f"{run.id} was not resized: {answer.get('text')}")
    return WorkerResize(text=str(answer.get("text")), layout=str(answer.get("layout")))
