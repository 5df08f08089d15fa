"""The storage of one run: documents, append-only logs, claims and artifacts.

Everything that reads or writes a run does so through ``RunStore``. Nothing outside an implementation
knows whether the run is a directory of this machine, of a shared file system, or objects in a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import ValidationError

from yunlu.core.errors import StoreError
from yunlu.core.limits import decode_json
from yunlu.core.secrets import mask_value
from yunlu.runs.events import WarningRaised, is_step, parse_event, to_record
from yunlu.runs.items import WORKER_LOG, Area, Claim, Document, Log
from yunlu.runs.metric_log import read_lines, read_tail

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import IO

    from yunlu.planning.plan import Plan
    from yunlu.runs.events import Event, StepMetrics
    from yunlu.spec.job import Job

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemStat:
    """Size and age of a stored item."""

    size: int
    """Bytes; the offset after the last record of a log."""
    modified_at: float
    """Seconds since the epoch."""
    version: tuple[int, ...]
    """Differs after every write."""


class HeldClaim(Protocol):
    """A claim that this process holds."""

    def pass_on(self) -> str:
        """Text with which the program that replaces this process (``exec``) keeps the claim."""
        ...


class RunStore(Protocol):
    """One run. Names are those of ``Document``, ``Log`` and ``Area``, or ``area/file``."""

    is_quiet: bool
    """Drops events: set in a worker for which another worker reports."""

    @property
    def id(self) -> str:
        """Name of the run, unique in its home."""
        ...

    @property
    def address(self) -> str:
        """Text with which another process opens the run: ``open_run(address)``."""
        ...

    @property
    def foreign_owner(self) -> str | None:
        """User that the run belongs to, if that is not ours: then it is only read, as data."""
        return None

    def location(self, name: str) -> str:
        """Path or URL of an item, for people and for libraries that open it by themselves."""
        ...

    def stat(self, name: str) -> ItemStat | None:
        """Size and age of a document, log or area; None where there is none."""
        ...

    def read(self, name: str, *, offset: int = 0) -> bytes | None:
        """Content from an offset on, or its last ``-offset`` bytes; None where there is none."""
        ...

    def write(self, name: str, content: str | bytes, *, durable: bool = True) -> None:
        """Replace a document: readers see the old or the new content, never a part.

        Readable by its owner alone, as all that a store holds.

        Args:
            name: Of the document.
            content: The whole of it.
            durable: On return it survives a power cut, not only the death of the process.
        """
        ...

    def remove(self, name: str) -> None:
        """Delete a document, or an area with all that is in it; nothing where there is none."""
        ...

    def names(self, area: str) -> list[str]:
        """Names of the items directly in an area, sorted."""
        ...

    def append(self, log: str, records: Iterable[Any]) -> None:
        """Append JSON records in one write: records of two writers never mix."""
        ...

    def read_log(self, log: str, *, offset: int = 0) -> Iterator[tuple[Any, int]]:
        """Whole records from an offset on, each with the offset after it; torn ones are skipped."""
        ...

    def claim(
        self, claim: Claim, *, wait: bool, passed_on: str | None = None
    ) -> AbstractContextManager[HeldClaim]:
        """Hold a claim; ``BlockingIOError`` where another process holds it and ``wait`` is false.

        ``passed_on`` is what ``HeldClaim.pass_on`` gave the program that this process was before.
        """
        ...

    def is_claimed(self, claim: Claim) -> bool:
        """Whether a process holds the claim."""
        ...

    # What follows is built on the methods above; implementations inherit it.

    def has(self, name: str) -> bool:
        """Whether a document, log or area is there."""
        return self.stat(name) is not None

    def emit(self, event: Event) -> None:
        """Append one event, its secrets masked."""
        if not self.is_quiet:
            self.append(Log.EVENTS, [mask_value(to_record(event))])

    def warn(self, message: str) -> None:
        """Report something that does not end the run."""
        self.emit(WarningRaised(message=message))

    def read_events(self, *, offset: int = 0) -> Iterator[tuple[Event, int]]:
        """Events from an offset on, each with the offset after it."""
        for record, after in self.read_log(Log.EVENTS, offset=offset):
            if (event := parse_event(record)) is not None:
                yield event, after

    def read_metrics(self, *, offset: int = 0) -> Iterator[tuple[StepMetrics, int]]:
        """Metrics of steps from a position on, each with the position after it.

        Positions count records, and stay when the writer seals older ones.
        """
        for record, after in read_lines(self, offset=offset):
            if is_step(record):
                yield record, after

    def metric_end(self) -> int:
        """Position after the newest metrics."""
        return read_tail(self).end


@runtime_checkable
class LocalRunStore(Protocol):
    """A store whose artifacts are files of this machine: what a worker needs."""

    @property
    def home(self) -> Path:
        """Directory of all runs, and of what they share."""
        ...

    def directory(self, area: Area) -> Path:
        """Directory of an area; it may not be there yet."""
        ...

    def open_text_log(self, name: str) -> IO[bytes]:
        """Text log to append to, as a file with a descriptor: output of a process can go there."""
        ...


def require_local(run: RunStore) -> LocalRunStore:
    """The store, if its artifacts are files of this machine."""
    if isinstance(run, LocalRunStore):
        return run
    raise StoreError(
        f"{run.id} is stored in {run.address}, which is no directory of this machine",
        hint="use a machine that mounts the home of the run",
    )


def require_own(run: RunStore) -> None:
    """Refuse to act on a run of another user: what its files name, we would do in our own name."""
    owner = run.foreign_owner
    if owner is not None:
        raise StoreError(
            f"{run.id} in {run.address} belongs to {owner}: it can be read, not changed",
            hint=f"do this as {owner}; if its files are yours: export YUNLU_TRUSTED_USERS={owner}",
        )


def last_record(run: RunStore, log: Log) -> Any:
    """Last whole record of a log; None where there is none."""
    tail = run.read(log, offset=-_TAIL_BYTES)
    for line in reversed((tail or b"").split(b"\n")[:-1]):  # after the last line end: a torn record
        try:
            return decode_json(line, replace_lone=True)
        except ValueError:
            continue
    return None


def text_logs(run: RunStore) -> tuple[str, ...]:
    """Names of the text logs of a run, that of its worker or supervisor first."""
    names = [f"{Area.LOGS}/{name}" for name in run.names(Area.LOGS) if name.endswith(".log")]
    return tuple(name for name in (WORKER_LOG, *names) if run.has(name))


def log_end(run: RunStore, log: Log) -> int:
    """Offset after the last record of a log."""
    stat = run.stat(log)
    return 0 if stat is None else stat.size


def read_job(run: RunStore) -> Job:
    """The job; refused where there is none."""
    from yunlu.spec.job import Job  # noqa: PLC0415 (slow to import: many only list runs)

    content = run.read(Document.JOB)
    if content is None:
        raise not_a_run(run)
    try:
        return Job.model_validate_json(content)
    except ValidationError as error:
        raise _damaged(run, Document.JOB, error) from error


def read_raw_job(run: RunStore) -> dict[str, Any] | None:
    """The job as plain JSON; None where it is missing or damaged."""
    return read_json(run, Document.JOB)


def write_job(run: RunStore, job: Job) -> None:
    """Store the job; only done while a run is created."""
    run.write(Document.JOB, job.model_dump_json(indent=2))


def read_plan(run: RunStore) -> Plan | None:
    """The plan; None where the run has not been planned yet."""
    return _read_plan(run, Document.PLAN)


def read_submitted_plan(run: RunStore) -> Plan | None:
    """The plan that was made before the run; None where there was none."""
    return _read_plan(run, Document.SUBMITTED_PLAN)


def _read_plan(run: RunStore, document: Document) -> Plan | None:
    from yunlu.planning.plan import Plan  # noqa: PLC0415 (slow to import: many only list runs)

    content = run.read(document)
    try:
        return None if content is None else Plan.model_validate_json(content)
    except ValidationError as error:
        raise _damaged(run, document, error) from error


def require_plan(run: RunStore) -> Plan:
    """The plan; refused where the run has not been planned yet."""
    plan = read_plan(run)
    if plan is None:
        raise StoreError(f"{run.id} has no plan yet", hint="wait until its workers have planned it")
    return plan


def write_plan(run: RunStore, plan: Plan) -> None:
    """Store the plan."""
    run.write(Document.PLAN, plan.model_dump_json(indent=2))


def write_submitted_plan(run: RunStore, plan: Plan) -> None:
    """Store the plan that was made before the run; only done while a run is created."""
    run.write(Document.SUBMITTED_PLAN, plan.model_dump_json(indent=2))


def read_json(run: RunStore, document: str) -> dict[str, Any] | None:
    """A document that holds a JSON object; None where it is missing or damaged."""
    content = run.read(document)
    try:
        value = None if content is None else decode_json(content, replace_lone=True)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_number(run: RunStore, document: str) -> int | None:
    """A document that holds a whole number; None where it is missing or damaged."""
    content = run.read(document)
    try:
        return None if content is None else int(content)
    except ValueError:
        return None


def _damaged(run: RunStore, document: Document, error: ValidationError) -> StoreError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    problem = f"{where}: {first['msg']}" if where else first["msg"]
    return StoreError(f"{run.address}: its {document} is damaged: {problem}")


def not_a_run(run: RunStore) -> StoreError:
    """The error of an address without a run."""
    return StoreError(f"{run.address} is not a run: its {Document.JOB} is missing or damaged")
