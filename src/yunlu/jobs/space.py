"""Who takes the space: runs and their parts, studies, caches, data sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from yunlu.core.disk_usage import DiskMeter, DiskSize
from yunlu.core.files import find_set_aside
from yunlu.core.settings import hub_cache, read_settings
from yunlu.core.value import Value
from yunlu.jobs import lifecycle
from yunlu.jobs.cleanup import submitted_in
from yunlu.jobs.run import UNREADABLE
from yunlu.runs.home import find_runs, find_stale
from yunlu.runs.run_store import Area, Document, read_json
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from yunlu.runs.run_store import RunStore

SpaceKind = Literal[
    "checkpoints", "models", "records", "traces", "studies", "other", "leftovers",
    "made-data", "measurements", "hub", "own-data",
]  # fmt: skip
"""What takes the space: the first seven lie in the home, the next two in the cache."""

_AREAS: Mapping[str, SpaceKind] = {
    Area.CHECKPOINTS: "checkpoints",
    Area.SERVERS: "checkpoints",
    Area.MODEL: "models",
    Area.TENSORBOARD: "traces",
    Area.TRACES: "traces",
    Area.TRACKERS: "traces",
}
_MADE_DATA = ("synthetic", "python-docs-")
_STUDIES = "studies"
_PARTS = ("train", "validation", "test")
_MOST_FILES = 100_000
"""Of data sets that are somebody's own: counting ends there, on a disk that may be far away."""


class RunSpace(Value):
    """Space of one run."""

    id: str
    state: RunState | None = None
    """None where its record cannot be read."""
    updated_at: float = 0.0
    checkpoints: DiskSize
    model: DiskSize
    size: DiskSize
    """Everything together."""


class SpaceShare(Value):
    """Space of one kind of thing."""

    kind: SpaceKind
    path: str
    """Directory where it lies; of data sets their own place."""
    size: DiskSize


class DiskUsage(Value):
    """Space of a home and its caches."""

    home: str
    cache: str
    runs: tuple[RunSpace, ...] = ()
    """Largest first."""
    shares: tuple[SpaceShare, ...] = ()
    """By kind: what belongs to Yunlu, then what it only reads."""

    @property
    def size(self) -> DiskSize:
        """What belongs to Yunlu, together."""
        sizes = (share.size for share in self.shares if share.kind not in {"hub", "own-data"})
        return sum(sizes, DiskSize())


def measure_space() -> DiskUsage:
    """Measure the home, the cache, and the data sets that runs of this home name."""
    home, cache, meter = lifecycle.home(), read_settings().cache, DiskMeter()
    records = {record.id: record for record in lifecycle.scan_runs().records}
    totals: dict[SpaceKind, DiskSize] = {}
    runs: list[RunSpace] = []
    for run in find_runs(home):
        if run.id not in records and not run.has(Document.JOB):
            continue
        parts = _measure_run(Path(run.address), meter)
        for kind, size in parts.items():
            totals[kind] = totals.get(kind, DiskSize()) + size
        record = records.get(run.id)
        runs.append(
            RunSpace(
                id=run.id,
                state=record.state if record else None,
                updated_at=record.updated_at if record else 0.0,
                checkpoints=parts.get("checkpoints", DiskSize()),
                model=parts.get("models", DiskSize()),
                size=sum(parts.values(), DiskSize()),
            )
        )
    for kind, size in _measure_rest(home, {run.id for run in runs}, meter):
        totals[kind] = totals.get(kind, DiskSize()) + size
    shares = [SpaceShare(kind=kind, path=str(home), size=size) for kind, size in totals.items()]
    shares += _measure_cache(cache, meter)
    shares.sort(key=lambda share: -share.size.bytes)
    shares += _measure_data(home, meter)
    runs.sort(key=lambda run: (-run.size.bytes, run.id))
    return DiskUsage(home=str(home), cache=str(cache), runs=tuple(runs), shares=tuple(shares))


def _measure_run(path: Path, meter: DiskMeter) -> dict[SpaceKind, DiskSize]:
    parts: dict[SpaceKind, DiskSize] = {}
    for child in _children(path):
        kind = _AREAS.get(child.name, "records")
        parts[kind] = parts.get(kind, DiskSize()) + meter.measure(child)
    return parts


def _measure_rest(
    home: Path, runs: set[str], meter: DiskMeter
) -> Iterator[tuple[SpaceKind, DiskSize]]:
    """What lies in a home beside its runs."""
    unfinished = {*find_set_aside(home), *find_stale(home)}
    for child in _children(home):
        if child.name in runs:
            continue
        kind = (
            "leftovers" if child in unfinished else "studies" if child.name == _STUDIES else "other"
        )
        yield kind, meter.measure(child)


def _measure_cache(cache: Path, meter: DiskMeter) -> Iterator[SpaceShare]:
    sizes: dict[SpaceKind, DiskSize] = {}
    for child in _children(cache):
        kind = "made-data" if child.name.startswith(_MADE_DATA) else "measurements"
        sizes[kind] = sizes.get(kind, DiskSize()) + meter.measure(child)
    for kind, size in sizes.items():
        yield SpaceShare(kind=kind, path=str(cache), size=size)


def _measure_data(home: Path, meter: DiskMeter) -> Iterator[SpaceShare]:
    """What runs read and Yunlu does not own: the cache of the hub, files that jobs name."""
    hub = hub_cache()
    if hub.is_dir():
        yield SpaceShare(kind="hub", path=str(hub), size=meter.measure(hub, most=_MOST_FILES))
    named: set[Path] = set()
    for run in find_runs(home):
        try:
            named |= {*_named_data(run)}
        except UNREADABLE:
            continue
    ours = {home.resolve(), read_settings().cache.resolve()}
    for path in sorted(named):
        if not {*path.parents} & (named | ours):
            yield SpaceShare(
                kind="own-data", path=str(path), size=meter.measure(path, most=_MOST_FILES)
            )


def _named_data(run: RunStore) -> Iterator[Path]:
    data = (read_json(run, Document.JOB) or {}).get("data")
    names = [data.get(key) for key in _PARTS] if isinstance(data, dict) else []
    for name in names:
        if isinstance(name, str) and "\0" not in name and "://" not in name:
            path = (submitted_in(run) / Path(name).expanduser()).resolve()
            if path.exists():
                yield path


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
