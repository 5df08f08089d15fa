"""Clean up: what of a home and its caches may go, with the reason; and its removal.

Three beats: ``RunContents`` are loaded, ``choose`` decides (pure), ``remove`` acts. Before each removal it looks again,
under the lock that a start of the run needs. Everything is hidden by one rename before it is deleted, so that a killed
process leaves nothing that looks whole; the next ``plan_prune`` finds what it left.
"""

from __future__ import annotations

import math
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.disk_usage import DiskMeter, DiskSize
from yunlu.core.errors import StoreError
from yunlu.core.files import find_set_aside, name_if_foreign, set_aside, sync_directories
from yunlu.core.limits import decode_json
from yunlu.core.settings import read_settings
from yunlu.core.value import Value
from yunlu.executors.registry import is_elsewhere, is_held
from yunlu.executors.worker_process import launch_lock, running_workers, worker_lock_is_free
from yunlu.jobs import lifecycle
from yunlu.jobs.run import UNREADABLE, RunRecord, describe_problem
from yunlu.runs.home import find_runs, find_stale, open_run
from yunlu.runs.run_store import (
    Area,
    Document,
    LocalRunStore,
    read_json,
    require_own,
)
from yunlu.runs.states import RunState
from yunlu.spec.fields import read_span_s
from yunlu.spec.search import lower_is_better

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from yunlu.runs.run_store import RunStore

    FindHold = Callable[[RunStore, RunRecord], "RunHold | None"]

ItemKind = Literal["run", "checkpoint", "cache", "leftover"]
RemovalReason = Literal[
    "asked", "failed", "lost", "exported", "superseded", "unused", "unfinished", "damaged"
]
KeepReason = Literal["used", "queued", "study", "study-best", "foreign", "unreadable"]

_MANIFEST = "manifest.json"
_WEIGHTS = (".safetensors", ".keras")
_DAY_S = 86_400.0
_CACHES = ("synthetic/*", "python-docs-*.txt", "shapes/*")
"""Below the cache directory: what is made again, and the same, when it is missing. What was measured stays: it
decides settings, and with them the rounding of later runs."""


class RemovableItem(Value):
    """One thing that may go."""

    kind: ItemKind
    path: str
    run: str = ""
    """The run that it is, or is part of."""
    reason: RemovalReason
    size: DiskSize
    used_at: float = 0.0
    """When it was written last."""


class RetainedRun(Value):
    """A run that stays, although its age and state would let something of it go."""

    run: str
    reason: KeepReason
    by: str = ""
    """What needs it: a run, a study, a user."""


class CleanupPlan(Value):
    """What would be removed; nothing is yet."""

    home: str
    items: tuple[RemovableItem, ...] = ()
    retained: tuple[RetainedRun, ...] = ()
    last_models: tuple[str, ...] = ()
    """Names of jobs whose only trained model is among the runs."""

    @property
    def size(self) -> DiskSize:
        """Everything together."""
        return sum((item.size for item in self.items), DiskSize())


class SkippedItem(Value):
    """Something that was to go and stayed."""

    path: str
    problem: str


class CleanupResult(Value):
    """What was removed."""

    removed: tuple[RemovableItem, ...] = ()
    skipped: tuple[SkippedItem, ...] = ()

    @property
    def size(self) -> DiskSize:
        """Everything together."""
        return sum((item.size for item in self.removed), DiskSize())


class RunHold(Value):
    """Who needs a run besides the runs themselves."""

    reason: KeepReason
    by: str
    is_live: bool = True
    """It is needed now: not even somebody who names the run may remove it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One checkpoint in the directory of a run."""

    path: Path
    is_whole: bool
    """It has a manifest that can be read."""
    metrics: Mapping[str, float]
    size: DiskSize


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """What a run that has ended holds."""

    record: RunRecord
    path: Path
    size: DiskSize
    has_model: bool
    """Its exported model is there."""
    metric: str
    """What the best checkpoint is the best by."""
    checkpoints: tuple[CheckpointFile, ...]
    """Oldest first."""


def plan_removal(runs: Sequence[RunStore], *, find_hold: FindHold) -> CleanupPlan:
    """The runs that a user names, whole; refused where one is alive, needed, or somebody else's."""
    chosen = {run.address: run for run in runs}
    records = {address: _require_removable(run, find_hold) for address, run in chosen.items()}
    for home in {Path(address).parent for address in chosen}:
        for user, used in find_uses(home).items():
            needed = sorted(used & {Path(address).name for address in chosen})
            if needed and str(home / user) not in chosen:
                raise StoreError(
                    f"{needed[0]} is the base of {user}, which names its files",
                    hint=f"yunlu rm {needed[0]} {user} removes both",
                )
    meter = DiskMeter()
    items = [
        RemovableItem(
            kind="run",
            path=address,
            run=run.id,
            reason="asked",
            size=meter.measure(Path(address)),
            used_at=records[address].updated_at,
        )
        for address, run in chosen.items()
    ]
    return CleanupPlan(
        home=str(Path(next(iter(chosen))).parent) if chosen else "",
        items=tuple(items),
        last_models=_last_models(records),
    )


def plan_prune(
    *, older: str, keep_best: bool, find_hold: FindHold, now: float | None = None
) -> CleanupPlan:
    """What is older than a span and no longer needed: checkpoints, failed runs, caches, leftovers."""
    span_s = read_span_s(older)
    if span_s is None:
        raise StoreError(f"--older: {older!r} is not a time", hint="for example: 30d, 12h, 1d 12h")
    now = time.time() if now is None else now
    home = lifecycle.home()
    scan = lifecycle.scan_runs()
    old = [
        record
        for record in scan.records
        if not record.state.is_active and record.updated_at <= now - span_s
    ]
    uses = _users(home) if old else {}
    failed = {record.name for record in old if record.state.is_failure}
    named = {
        record.name
        for record in scan.records
        if record.name in failed and _holds_model(open_run(home / record.id), record)
    }
    meter, items, retained = DiskMeter(), list[RemovableItem](), list[RetainedRun]()
    for record in old:
        run = open_run(home / record.id)
        try:
            contents = load_contents(run, record, meter)
            removable = choose(contents, keep_best=keep_best, is_model_known=record.name in named)
            hold = _find_hold(run, record, uses, find_hold) if removable else None
        except UNREADABLE as error:
            retained.append(
                RetainedRun(run=record.id, reason="unreadable", by=describe_problem(error))
            )
            continue
        if hold is None:
            items += removable
        else:
            retained.append(RetainedRun(run=record.id, reason=hold.reason, by=hold.by))
    taken = {item.run for item in items if item.kind == "run"}
    items += _leftovers(home, scan.records, taken, meter)
    active = [open_run(home / record.id) for record in scan.records if record.state.is_active]
    items += _old_caches(now - max(span_s, _DAY_S), {*_made_data(active)}, meter)
    problems = (
        RetainedRun(run=name, reason="unreadable", by=text) for name, text in scan.problems.items()
    )
    return CleanupPlan(home=str(home), items=tuple(items), retained=(*retained, *problems))


def choose(contents: RunContents, *, keep_best: bool, is_model_known: bool) -> list[RemovableItem]:
    """What may go of a run that has ended long ago; pure.

    Args:
        contents: The run.
        keep_best: Keep the best checkpoint of each run.
        is_model_known: A finished run of the same job name holds a trained model.
    """
    record, whole = contents.record, [c for c in contents.checkpoints if c.is_whole]
    if record.state.is_failure:
        is_last_copy = bool(whole) and not is_model_known
        if not (is_last_copy or (keep_best and whole)):
            return [_whole_run(contents)]
        retained = {_best(contents).path}
    elif record.state is RunState.FINISHED and contents.has_model:
        retained = {_best(contents).path} if keep_best and whole else set[Path]()
    elif not whole:
        return []  # nothing here is known to be good: nothing goes
    elif record.state is RunState.FINISHED:
        retained = {_best(contents).path}  # its model was not exported: this is the only copy
    else:  # stopped: it can continue
        retained = {whole[-1].path} | ({_best(contents).path} if keep_best else set[Path]())
    has_model = record.state is RunState.FINISHED and contents.has_model
    return [
        RemovableItem(
            kind="checkpoint",
            path=str(checkpoint.path),
            run=record.id,
            reason="damaged"
            if not checkpoint.is_whole
            else "exported"
            if has_model
            else "superseded",
            size=checkpoint.size,
            used_at=record.updated_at,
        )
        for checkpoint in contents.checkpoints
        if checkpoint.path not in retained
    ]


def _whole_run(contents: RunContents) -> RemovableItem:
    record = contents.record
    return RemovableItem(
        kind="run",
        path=str(contents.path),
        run=record.id,
        reason="lost" if record.state is RunState.LOST else "failed",
        size=contents.size,
        used_at=record.updated_at,
    )


def _best(contents: RunContents) -> CheckpointFile:
    """As the training ranks them: by the metric, then by the loss; the newest where none has one."""
    whole = [checkpoint for checkpoint in contents.checkpoints if checkpoint.is_whole]
    sign = 1.0 if lower_is_better(contents.metric) else -1.0
    scored = [c for c in whole if math.isfinite(c.metrics.get(contents.metric, math.nan))]
    if not scored:
        return whole[-1]
    return min(
        scored,
        key=lambda c: (sign * c.metrics[contents.metric], _or_worst(c.metrics.get("loss"))),
    )


def _or_worst(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss


def load_contents(run: RunStore, record: RunRecord, meter: DiskMeter) -> RunContents:
    """Read what a run holds."""
    plan = read_json(run, Document.PLAN) or {}
    checkpoints = tuple(_load_checkpoints(run, meter))
    rest = (path for path in Path(run.address).iterdir() if path.name != Area.CHECKPOINTS)
    size = sum(map(meter.measure, rest), sum((c.size for c in checkpoints), DiskSize()))
    return RunContents(
        record=record,
        path=Path(run.address),
        size=size,
        has_model=_holds_model(run, record),
        metric=str(plan.get("best_metric") or "loss"),
        checkpoints=checkpoints,
    )


def _load_checkpoints(run: RunStore, meter: DiskMeter) -> Iterator[CheckpointFile]:
    for name in run.names(Area.CHECKPOINTS):
        path = Path(run.location(f"{Area.CHECKPOINTS}/{name}"))
        if path.is_symlink() or not path.is_dir():
            continue
        manifest = read_json(run, f"{Area.CHECKPOINTS}/{name}/{_MANIFEST}")
        metrics = (manifest or {}).get("metrics")
        yield CheckpointFile(
            path=path,
            is_whole=isinstance(metrics, dict),
            metrics={
                key: float(value)
                for key, value in (metrics.items() if isinstance(metrics, dict) else ())
                if isinstance(value, int | float)
            },
            size=meter.measure(path),
        )


def _holds_model(run: RunStore, record: RunRecord) -> bool:
    """Whether the model of a finished run is there: it was exported as a whole, by one rename."""
    if record.state is not RunState.FINISHED or run.foreign_owner is not None:
        return False
    return any(name.endswith(_WEIGHTS) for name in run.names(Area.MODEL))


def _last_models(records: Mapping[str, RunRecord]) -> tuple[str, ...]:
    """Names of jobs of which no trained model is left without these runs."""
    names = {
        record.name
        for address, record in records.items()
        if _holds_model(open_run(address), record)
    }
    if not names:
        return ()
    gone = {record.id for record in records.values()}
    left = {
        record.name
        for record in lifecycle.list_runs()
        if record.name in names
        and record.id not in gone
        and _holds_model(open_run(lifecycle.home() / record.id), record)
    }
    return tuple(sorted(names - left))


def _require_removable(run: RunStore, find_hold: FindHold) -> RunRecord:
    require_own(run)
    record = lifecycle.read_record(run)
    if record.state.is_active:
        raise StoreError(f"{run.id} is alive: it is {record.state}", hint=f"yunlu stop {run.id}")
    if _has_worker(run):
        raise StoreError(
            f"{run.id} has ended, but its worker has not", hint="try again in a moment"
        )
    hold = find_hold(run, record)
    if hold is not None and hold.is_live:
        raise StoreError(_describe_hold(run.id, hold), hint=_release(run.id, hold))
    return record


def _has_worker(run: RunStore) -> bool:
    """Whether a process still works on a run that has ended: a worker's last moments, a group, a lease."""
    is_worked_on = not worker_lock_is_free(run) or any(True for _ in running_workers(run))
    return is_worked_on or (is_elsewhere(run) and is_held(run))


def _describe_hold(run_id: str, hold: RunHold) -> str:
    if hold.reason == "queued":
        return f"{run_id} waits in the queue of the pool"
    return f"{run_id} belongs to the study {hold.by}, which is running"


def _release(run_id: str, hold: RunHold) -> str:
    if hold.reason == "queued":
        return f"yunlu stop {run_id} takes it out"
    return f"yunlu study stop {hold.by}"


def find_uses(home: Path) -> dict[str, set[str]]:
    """By run: the other runs of its home whose files its job names, such as the weights it started from."""
    known = {run.id for run in find_runs(home)}
    root, uses = home.resolve(), dict[str, set[str]]()
    for run_id in known:
        run = open_run(home / run_id)
        with suppress(*UNREADABLE):
            used = {
                name
                for document in (Document.JOB, Document.TRIAL)
                for text in _texts(_decode(run.read(document)))
                if (name := _run_of(text, run, root)) in known and name != run_id
            }
            if used:
                uses[run_id] = used
    return uses


def _users(home: Path) -> dict[str, list[str]]:
    """By run: the runs that name its files."""
    users: dict[str, list[str]] = {}
    for user, used in sorted(find_uses(home).items()):
        for run_id in used:
            users.setdefault(run_id, []).append(user)
    return users


def _find_hold(
    run: RunStore, record: RunRecord, users: Mapping[str, list[str]], find_hold: FindHold
) -> RunHold | None:
    if run.foreign_owner is not None:
        return RunHold(reason="foreign", by=run.foreign_owner)
    if record.id in users:
        return RunHold(reason="used", by=", ".join(users[record.id]))
    return find_hold(run, record)


def _decode(content: bytes | None) -> Any:
    return None if content is None else decode_json(content, replace_lone=True)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _run_of(text: str, run: RunStore, root: Path) -> str | None:
    """The run of a home inside whose directory a path of a job lies; links are followed."""
    name = text.removeprefix("hf:")
    if "/" not in name or "://" in name or "\0" in name or "\n" in name:
        return None
    path = Path(name).expanduser()
    if not path.is_absolute():
        path = submitted_in(run) / path
    try:
        inside = path.resolve().relative_to(root)
    except (OSError, ValueError, RuntimeError):
        return None
    return inside.parts[0] if inside.parts else None


def submitted_in(run: RunStore) -> Path:
    """Where the run was submitted: what relative paths of its job begin at."""
    first = next(iter(run.read_events()), None)
    return Path(getattr(first[0], "directory", None) or ".") if first is not None else Path()


def _leftovers(
    home: Path, records: Sequence[RunRecord], taken: set[str], meter: DiskMeter
) -> Iterator[RemovableItem]:
    """What killed processes left half-written or half-deleted: hidden names, of any age."""
    leftovers = [("", path) for path in (*find_set_aside(home), *find_stale(home))]
    for record in records:
        run = open_run(home / record.id)
        if record.state.is_active or record.id in taken or run.foreign_owner is not None:
            continue
        if isinstance(run, LocalRunStore):
            leftovers += [(record.id, path) for path in _hidden_in(run)]
    for run_id, path in leftovers:
        with suppress(OSError):
            if not _is_own(path):
                continue
            yield RemovableItem(
                kind="leftover",
                path=str(path),
                run=run_id,
                reason="unfinished",
                size=meter.measure(path),
                used_at=path.lstat().st_mtime,
            )


def _hidden_in(run: LocalRunStore) -> Iterator[Path]:
    checkpoints = run.directory(Area.CHECKPOINTS)
    for directory in (checkpoints.parent, checkpoints):
        if not directory.is_symlink():
            yield from find_set_aside(directory)
    if not checkpoints.is_symlink():
        yield from (path for path in checkpoints.glob(".part-*") if not path.is_symlink())
    exported = run.directory(Area.MODEL).with_name(".model.part")
    if exported.is_dir() and not exported.is_symlink():
        yield exported


def _made_data(runs: Sequence[RunStore]) -> Iterator[str]:
    """Names of the made data sets that these runs read."""
    for run in runs:
        with suppress(*UNREADABLE):
            for text in _texts(_decode(run.read(Document.JOB))):
                if text.startswith("synthetic:"):
                    yield text.removeprefix("synthetic:").partition("?")[0]


def _old_caches(until: float, used: set[str], meter: DiskMeter) -> Iterator[RemovableItem]:
    cache = read_settings().cache
    for pattern in _CACHES:
        folder = cache / Path(pattern).parent
        if folder.is_symlink():  # kept elsewhere on purpose
            continue
        for path in sorted(cache.glob(pattern)):
            is_used = any(path.name.startswith(f"{name}-") for name in used)
            if is_used or not _is_own(path) or (used_at := _used_at(path)) > until:
                continue
            yield RemovableItem(
                kind="cache",
                path=str(path),
                reason="unused",
                size=meter.measure(path),
                used_at=used_at,
            )
        for path in find_set_aside(folder):
            yield RemovableItem(
                kind="leftover", path=str(path), reason="unfinished", size=meter.measure(path)
            )


def _is_own(path: Path) -> bool:
    try:
        about = path.lstat()
    except OSError:  # removed meanwhile
        return False
    return not stat.S_ISLNK(about.st_mode) and name_if_foreign(about.st_uid) is None


def _used_at(path: Path) -> float:
    """When any file of it was written or read last, as far as the file system says."""
    files = [path] if path.is_file() else [*path.rglob("*")]
    newest = 0.0
    for file in files:
        with suppress(OSError):
            about = file.lstat()
            newest = max(newest, about.st_mtime, about.st_atime if file.is_file() else 0.0)
    return newest


def remove(plan: CleanupPlan, *, find_hold: FindHold) -> CleanupResult:
    """Remove what a plan lists; what became alive or needed since then stays, and is reported.

    First everything is hidden, each item under the lock of its run; then the renames are made durable, and
    only then anything is deleted.
    """
    hidden, skipped = list[tuple[RemovableItem, Path]](), list[SkippedItem]()
    uses = {home: _users(home) for home in {_home_of(item) for item in plan.items if item.run}}
    gone = {item.run for item in plan.items if item.kind == "run"}
    for item in plan.items:
        users = uses[_home_of(item)].get(item.run, []) if item.run else []
        try:
            others = [user for user in users if user not in gone]
            hidden.append((item, _hide_item(item, others, find_hold)))
        except (StoreError, OSError, ValueError) as error:
            problem = error.message if isinstance(error, StoreError) else str(error)
            skipped.append(SkippedItem(path=item.path, problem=problem))
    sync_directories({path.parent for _, path in hidden})
    removed: list[RemovableItem] = []
    for item, path in hidden:
        if _delete(path):
            removed.append(item)
        else:
            problem = f"it is hidden as {path.name}, but not all of it could be deleted"
            skipped.append(SkippedItem(path=item.path, problem=problem))
    return CleanupResult(removed=tuple(removed), skipped=tuple(skipped))


def _home_of(item: RemovableItem) -> Path:
    return Path(item.path).parent if item.kind == "run" else lifecycle.home()


def _hide_item(item: RemovableItem, users: Sequence[str], find_hold: FindHold) -> Path:
    path = Path(item.path)
    if item.kind != "run":
        _require_inside(path, lifecycle.home(), read_settings().cache)
    if not item.run:
        return set_aside(path)
    run = open_run(path if item.kind == "run" else lifecycle.home() / item.run)
    if users and item.kind != "leftover":
        raise StoreError(f"{item.run} is the base of {', '.join(users)}")
    try:
        with launch_lock(run, wait=False):
            _require_removable(run, find_hold)
            return set_aside(path)
    except BlockingIOError as error:
        raise StoreError(f"{item.run} is being started or stopped by another process") from error


def _require_inside(path: Path, *roots: Path) -> None:
    """A plan may have come over a wire: nothing outside of the home and the cache is ever touched."""
    parent = path.parent.resolve()
    if not any(parent == root.resolve() or root.resolve() in parent.parents for root in roots):
        raise StoreError(f"{path} is not in {' or '.join(map(str, roots))}")


def _delete(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return not path.exists()
