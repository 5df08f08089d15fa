"""Runs as values for people and programs: the list, one run, its log, why it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from yunlu.core.errors import StoreError, YunluError, error_of_code
from yunlu.core.secrets import mask
from yunlu.core.value import Value
from yunlu.executors.registry import unknown_executor
from yunlu.jobs.run import error_of, log_tail, remaining_s
from yunlu.jobs.run_log import LogCursor, RunUpdate, end_of
from yunlu.jobs.run_record import ListedRun, RunRecord
from yunlu.planning.plan import Plan
from yunlu.runs.events import (  # noqa: TC001 - pydantic reads them
    BatchChanged,
    CheckpointSaved,
    CommunicationChosen,
    Evaluated,
)
from yunlu.runs.fold import GroupGeneration, LostWorker, read_view
from yunlu.runs.run_store import WORKER_LOG, Area, Document, Log, last_record
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore

_LAST_LINES = 8


class RunDetails(ListedRun):
    """One run: state, plan, workers, evaluations, checkpoints, warnings, paths."""

    plan: Plan | None = None
    worker_group: GroupGeneration | None = None
    """The newest generation."""
    communication: CommunicationChosen | None = None
    """The newest choice of a communication method."""
    batch: BatchChanged | None = None
    """The newest change of the batch."""
    noise: dict[str, float] = Field(default_factory=dict)
    """The newest figures of the gradient noise."""
    lost_workers: tuple[LostWorker, ...] = ()
    evaluations: tuple[Evaluated, ...] = ()
    """Without confusion counts and examples."""
    checkpoints: tuple[CheckpointSaved, ...] = ()
    """Those that are still there."""
    warnings: tuple[str, ...] = ()
    paths: dict[str, str] = Field(default_factory=dict)


class StartedRun(Value):
    """A run that was started, resumed or queued."""

    id: str
    dir: str
    task: str
    cursor: LogCursor = LogCursor()
    """Where the log of this attempt begins."""
    is_queued: bool = False
    """The pool will start it."""
    is_launched: bool = False
    """Trained by the processes of a launcher (torchrun, srun, mpirun), of which this is one."""
    exit_code: int | None = None
    """Of a launched process that is not rank 0: it has trained to the end; rank 0 shows the run."""


class JoinTarget(Value):
    """A run that this machine can lend devices to."""

    run: str
    dir: str
    node: str
    """Name of this machine in the run."""


class RunFailure(Value):
    """Why a run failed or was lost."""

    code: str
    message: str
    hint: str | None = None
    traceback: str | None = None
    """Of the worker."""

    def to_error(self) -> YunluError:
        """The error that the worker raised."""
        return error_of_code(self.code, self.message, hint=self.hint, traceback=self.traceback)


class LogText(Value):
    """Lines of a text log."""

    lines: tuple[str, ...] = ()
    end: int = 0
    """Offset after the last line."""


def list_run(run: RunStore, record: RunRecord) -> ListedRun:
    """State and progress of a run."""
    return ListedRun(**_summary(run, record))


def describe_run(run: RunStore, record: RunRecord) -> RunDetails:
    """Everything that one screen shows of a run."""
    view, plan = read_view(run), run.read(Document.PLAN)
    checkpoints = {checkpoint.step: checkpoint for checkpoint in view.checkpoints}.values()
    return RunDetails(
        **_summary(run, record),
        plan=None if plan is None else Plan.model_validate_json(plan),
        worker_group=view.worker_group,
        communication=view.communications[-1] if view.communications else None,
        batch=view.batches[-1] if view.batches else None,
        noise=_read_noise(run),
        lost_workers=view.lost_workers,
        evaluations=tuple(
            evaluation.model_copy(update={"confusion": None, "examples": ()})
            for evaluation in view.evaluations
        ),
        # Old checkpoints are removed as new ones come.
        checkpoints=tuple(checkpoint for checkpoint in checkpoints if run.has(checkpoint.path)),
        warnings=tuple(warning.message for warning in view.warnings),
        paths=_list_paths(run),
    )


def read_update(run: RunStore, *, since: LogCursor | None = None) -> RunUpdate:
    """Events after a cursor, without their metrics; does not wait."""
    end = end_of(run)
    start = since.events if since is not None else 0
    items = tuple(event for event, after in run.read_events(offset=start) if after <= end.events)
    return RunUpdate(items=items, cursor=end)


def find_failure(run: RunStore, state: RunState) -> RunFailure | None:
    """Why the run is failed or lost; None where it does not say."""
    error = error_of(event for event, _ in run.read_events())
    if error is None:
        return None
    message, hint = error.message, error.hint
    if state is RunState.LOST:
        tail = "".join(f"\n  {line}" for line in log_tail(run, _LAST_LINES))
        message += f"; its last output:{tail}" if tail else ""
        hint = f"yunlu resume {run.id} continues it"
    trace = None if error.__cause__ is None else str(error.__cause__.args[0])
    return RunFailure(code=error.code, message=message, hint=hint, traceback=trace)


def read_text_log(
    run: RunStore,
    *,
    rank: int | None = None,
    worker: str | None = None,
    lines: int | None = None,
    since: int | None = None,
) -> LogText:
    """Whole lines of the log of a run, or of one of its workers.

    Args:
        run: The run.
        rank: The worker that has this rank now.
        worker: The same by the number of the worker, which does not change with its rank.
        lines: At most so many, the last ones.
        since: From this offset on; a line that is not complete is left for later.
    """
    name = WORKER_LOG
    if rank is not None or worker is not None:
        name = _find_worker_log(run, rank=rank, worker=worker)
    if name == WORKER_LOG and since is None:
        return LogText(lines=tuple(log_tail(run, lines or 0)) if lines else ())
    content = run.read(name, offset=since or 0) or b""
    if since is not None:
        content = content[: content.rfind(b"\n") + 1]
    every = content.decode(errors="replace").splitlines()
    retained = every if lines is None else every[-lines:] if lines > 0 else []
    return LogText(lines=tuple(mask(line) for line in retained), end=(since or 0) + len(content))


def _summary(run: RunStore, record: RunRecord) -> dict[str, Any]:
    return {
        **{name: getattr(record, name) for name in RunRecord.model_fields},
        "dir": run.address,
        "caution": _find_caution(run, record),
        "eta_s": remaining_s(run, record) if record.state.is_active else None,
    }


def newest_worker_group(run: RunStore) -> GroupGeneration | None:
    """The current layout of a run; None where it has a single worker."""
    if not any(map(run.has, (Document.WORKER_GROUP, Log.RANK_METRICS, Area.LOGS))):
        return None  # avoids reading every log when many runs are listed
    return read_view(run).worker_group


def _find_caution(run: RunStore, record: RunRecord) -> str:
    if run.foreign_owner is not None:
        return f"it belongs to {run.foreign_owner}; shown as its files say"
    address = unknown_executor(run) if record.state.is_active else None
    if address is not None:
        return (
            f"its executor {address} is not one of yours, and was not asked; shown as its files say"
        )
    return ""


def _read_noise(run: RunStore) -> dict[str, float]:
    last = last_record(run, Log.METRICS) or {}
    return {key: value for key, value in last.items() if key.startswith("noise_")}


def _list_paths(run: RunStore) -> dict[str, str]:
    job = Document.JOB_SOURCE if run.has(Document.JOB_SOURCE) else Document.JOB
    items = {
        "job": job,
        "model": Area.MODEL,
        "report": Document.REPORT_PAGE,
        "log": WORKER_LOG,
        "logs": Area.LOGS,
    }
    paths = {name: run.location(item) for name, item in items.items() if run.has(item)}
    return {"run": run.address, **paths}


def _find_worker_log(run: RunStore, *, rank: int | None, worker: str | None) -> str:
    """The log of one worker; a rank is looked up in the newest layout."""
    if rank is not None:
        group = newest_worker_group(run)
        workers = {assigned.rank: assigned.worker for assigned in group.ranks} if group else {}
        if rank not in workers:
            raise StoreError(
                f"{run.id} has no rank {rank}",
                hint=f"it has the ranks 0 to {len(workers) - 1}"
                if workers
                else f"one worker trains it: yunlu logs {run.id}",
            )
        if worker not in {None, workers[rank]}:
            raise StoreError(
                f"rank {rank} is worker {workers[rank]}, not {worker}", hint="give one of the two"
            )
        worker = workers[rank]
    logs = run.names(Area.LOGS)
    name = f"worker-{worker}.log"
    if name not in logs:  # so a name is never a way out of the directory
        known = sorted(
            log.removeprefix("worker-").removesuffix(".log")
            for log in logs
            if log.startswith("worker-")
        )
        hint = f"there are: {', '.join(known)}" if known else f"try: yunlu logs {run.id}"
        raise StoreError(f"{run.id} has no log of worker {worker}", hint=hint)
    return f"{Area.LOGS}/{name}"
