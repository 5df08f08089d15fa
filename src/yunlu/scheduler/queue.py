"""Queue: priority, bounds, deadline and wishes of each queued run.

``queue.json`` holds what people want; only the verbs write it. ``allocation.json`` holds what the pool has
done and is about to do (see ``yunlu.scheduler.allocation_record``); only the service writes that. Neither needs the
other's lock.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from yunlu.core.errors import JobError, StoreError, YunluError
from yunlu.core.value import Value
from yunlu.executors.worker_process import (
    WorkerProcess,
    launch_lock,
    record_worker,
    recorded_worker,
)
from yunlu.jobs import lifecycle
from yunlu.runs.home import find_runs
from yunlu.runs.run_store import Area, Document, read_job, read_submitted_plan, require_own
from yunlu.runs.states import RunState
from yunlu.scheduler.run_status import ResourceRequest, make_request
from yunlu.spec.fields import read_span_s

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

MOST_PRIORITY = 1_000_000
_NONE = "none"
_NOBODY = WorkerProcess(pid=0, process_started_at=0.0, host="(queue)", detached=False)
"""Worker record of a waiting run: no process, so none that can be found dead."""

Wish = Literal["run", "pause", "stop"]


class QueueEntry(Value):
    """Queue entry of one run."""

    submitted_at: float
    priority: int = 0
    """Higher goes first."""
    team: str = ""
    request: ResourceRequest
    deadline_at: float | None = None
    budget_dollars: float | None = Field(default=None, gt=0)
    samples: float | None = None
    """Samples it will train on in all, if its plan or its job says."""
    most_batch: int | None = None
    """Largest batch with more workers; None if the batch is fixed."""
    signature: str = ""
    """Runs with the same signature have the same speed."""
    wish: Wish = "run"
    ticket: int = 1
    """Counts how often it was queued; failures of earlier tickets do not count."""


class SubmitOptions(Value):
    """Options of ``yunlu submit`` besides the job."""

    priority: int = 0
    team: str = ""
    min_devices: int | None = Field(default=None, ge=1)
    max_devices: int | None = Field(default=None, ge=1)
    deadline_s: float | None = Field(default=None, gt=0)
    budget_dollars: float | None = Field(default=None, gt=0)


def read_options(*, deadline: str | None = None, **options: Any) -> SubmitOptions:
    """Validate the options; the deadline is given as text."""
    deadline_s = None if deadline is None else read_span_s(deadline)
    if deadline is not None and deadline_s is None:
        raise JobError(f"deadline: {deadline!r} is not a time", hint="say 90min, 36h or 1d 12h")
    _check_priority(options.get("priority", 0))
    for key in ("min_devices", "max_devices"):
        if options.get(key) is not None and options[key] < 1:
            raise JobError(
                f"{key}: {options[key]} is not a number of devices", hint="say 1 or more"
            )
    budget = options.get("budget_dollars")
    if budget is not None and not budget > 0:
        raise JobError(f"budget: {budget:g} is not above 0")
    return SubmitOptions(deadline_s=deadline_s, **options)


def enqueue(
    job: Job,
    options: SubmitOptions | None = None,
    *,
    source: Path | None = None,
    plan: Plan | None = None,
) -> RunStore:
    """Create a run that waits for the pool. Returns at once, whether or not a pool is up."""
    options = options or SubmitOptions()
    request = make_request(job, plan, least=options.min_devices, most=options.max_devices)
    run = lifecycle.submit(job, source=source, plan=plan)
    now = time.time()
    deadline_s = options.deadline_s if options.deadline_s is not None else _deadline_s(job)
    entry = QueueEntry(
        submitted_at=now,
        priority=options.priority,
        team=options.team,
        request=request,
        deadline_at=None if deadline_s is None else now + deadline_s,
        budget_dollars=options.budget_dollars or job.goal.budget,
        samples=_count_samples(job) if plan is None else float(plan.steps * plan.batch),
        most_batch=job.train.adapt_batch.max if job.train.adapt_batch else None,
        signature=job_signature(job),
    )
    try:
        with launch_lock(run, wait=True):
            _write(run, entry)
            # From here on the run waits for a pool and does not depend on this process.
            record_worker(run, _NOBODY)
    except OSError as error:
        raise StoreError(f"{run.id} cannot be queued: {error}") from error
    return run


def read_entry(run: RunStore) -> QueueEntry | None:
    """Queue entry of a run; None if it is not in the queue."""
    try:
        content = run.read(Document.QUEUE_ENTRY)
        return None if content is None else QueueEntry.model_validate_json(content)
    except (OSError, ValidationError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise StoreError(
            f"{run.location(Document.QUEUE_ENTRY)} cannot be read: {first}",
            hint="if another version of Yunlu wrote it, use that one; else submit the job again",
        ) from error


def change_entry(run: RunStore, **changes: Any) -> QueueEntry:
    """Change the entry of a queued run."""
    require_own(run)
    try:
        with launch_lock(run, wait=True):
            entry = read_entry(run)
            if entry is None:
                raise StoreError(
                    f"{run.id} is not in the queue",
                    hint="yunlu submit puts a job there; yunlu stop and resume work on any run",
                )
            entry = entry.model_copy(update=changes)
            _write(run, entry)
            return entry
    except OSError as error:
        raise StoreError(f"{run.id} cannot be changed: {error}") from error


def change_terms(
    run: RunStore,
    *,
    priority: int | None = None,
    deadline: str | None = None,
    budget: str | None = None,
    min_devices: int | None = None,
    max_devices: int | None = None,
) -> QueueEntry:
    """Change the options of a queued run; those not given stay.

    Args:
        run: The run.
        priority: Higher goes first.
        deadline: A span from now, such as ``36h``; ``none`` takes it away.
        budget: Dollars, what is spent already included; ``none`` takes it away.
        min_devices: It is not started on fewer.
        max_devices: It is never given more.
    """
    changes: dict[str, Any] = {} if priority is None else {"priority": priority}
    _check_priority(priority or 0)
    if deadline is not None:
        span_s = None if deadline == _NONE else read_options(deadline=deadline).deadline_s
        changes["deadline_at"] = None if span_s is None else time.time() + span_s
    if budget is not None:
        changes["budget_dollars"] = None if budget == _NONE else _read_dollars(budget)
    if min_devices is not None or max_devices is not None:
        read_options(min_devices=min_devices, max_devices=max_devices)
        before = read_entry(run)
        least = min_devices if min_devices is not None or before is None else before.request.least
        most = max_devices if max_devices is not None or before is None else before.request.most
        plan = read_submitted_plan(run)
        changes["request"] = make_request(read_job(run), plan, least=least, most=most)
    return change_entry(run, **changes)


def pause(run: RunStore) -> QueueEntry:
    """Save and stop a run, and keep its position in the queue."""
    _refuse_over(run)
    entry = change_entry(run, wish="pause")
    lifecycle.request_stop(run)
    return entry


def withdraw(run: RunStore) -> None:
    """Take a run out of the queue, if it is in it. Called before a run is stopped."""
    require_own(run)
    if run.has(Document.QUEUE_ENTRY) and not _is_finished(run):
        with suppress(StoreError):  # the pool ignores a run whose entry cannot be read
            change_entry(run, wish="stop")


def requeue(run: RunStore) -> QueueEntry:
    """Queue a run again that was paused, stopped or given up."""
    _refuse_over(run)
    entry = read_entry(run)
    entry = change_entry(run, wish="run", ticket=entry.ticket + 1 if entry else 1)
    _hand_over(run)
    return entry


def scan(home: Path) -> Iterator[RunStore]:
    """Every run of this home that was ever queued; what other users put there is not for us to run."""
    for run in find_runs(home, having=Document.QUEUE_ENTRY):
        if run.foreign_owner is None:
            yield run


def job_signature(job: Job) -> str:
    """Signature shared by jobs of the same speed."""
    import hashlib  # noqa: PLC0415 (needed once for each job)

    train = job.train
    parts = (job.task, job.model.model_dump_json(), job.data.model_dump_json(exclude={"limit"}))
    own = (str(train.batch), str(train.micro_batch), str(train.precision), str(job.layout))
    return hashlib.blake2b("\n".join((*parts, *own)).encode(), digest_size=8).hexdigest()


def _check_priority(priority: int) -> None:
    if abs(priority) > MOST_PRIORITY:
        raise JobError(
            f"priority: {priority} is out of bounds",
            hint=f"say -{MOST_PRIORITY} to {MOST_PRIORITY}",
        )


def _read_dollars(text: str) -> float:
    try:
        dollars = float(text.removeprefix("$"))
    except ValueError:
        dollars = 0.0
    if not 0 < dollars < math.inf:
        raise JobError(f"budget: {text!r} is not a sum of dollars", hint="say 12.50, or none")
    return dollars


def _hand_over(run: RunStore) -> None:
    """Make a pending run whose process is gone wait for the pool."""
    with launch_lock(run, wait=True):
        worker = recorded_worker(run)
        if worker is not None and not worker.detached:
            record_worker(run, _NOBODY)


def _is_finished(run: RunStore) -> bool:
    return lifecycle.read_record(run).state is RunState.FINISHED


def _refuse_over(run: RunStore) -> None:
    if _is_finished(run):
        raise StoreError(
            f"{run.id} is finished: there is nothing left to do",
            hint=f"its model is in {run.location(Area.MODEL)}",
        )


def _write(run: RunStore, entry: QueueEntry) -> None:
    run.write(Document.QUEUE_ENTRY, entry.model_dump_json(indent=2))


def _deadline_s(job: Job) -> float | None:
    from yunlu.spec.fields import read_span_s  # noqa: PLC0415 (needed once for each job)

    return read_span_s(job.goal.deadline) if job.goal.deadline else None


def _count_samples(job: Job) -> float | None:
    """Number of samples, where it is cheap to know."""
    from yunlu.jobs.dataset_size import block_length, measure_dataset  # noqa: PLC0415 (as above)

    train = job.train
    if train.steps is not None:
        return float(train.steps * train.batch) if train.batch != "auto" else None
    try:
        seq = job.data.max_length if job.data.max_length != "auto" else block_length(job)
        return (train.epochs or 10.0) * measure_dataset(job, seq=seq).train
    except (YunluError, OSError, ValueError):
        return None  # a stream, a hub: the plan will say
