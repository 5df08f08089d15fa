"""Index of runs: SQLite in the home of the runs, derived from their events.

Deleting it loses nothing. Each transaction is one short write, so that many processes share it. Kept current by
marks (``runs.changes``) of those who write events: a look at it reads the runs that are marked, new or active,
and the names in the home; no other run is touched.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import ValidationError

from yunlu.core.errors import StoreError
from yunlu.core.files import (
    WRITABLE_HOME,
    check_home,
    check_regular,
    create_private,
    make_directory,
    open_lock,
)
from yunlu.jobs.run_record import UNREADABLE, RunRecord, RunScan, describe_problem
from yunlu.runs.changes import drop_marks, open_marks, take_marks
from yunlu.runs.items import Log
from yunlu.runs.states import ACTIVE, RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

T = TypeVar("T")

SCHEMA = 2
"""A database with an older one is made anew: it is derived."""

_COLUMNS = {
    "id": "TEXT PRIMARY KEY",
    "name": "TEXT NOT NULL",
    "task": "TEXT NOT NULL",
    "model": "TEXT NOT NULL",
    "state": "TEXT NOT NULL",
    "created_at": "REAL NOT NULL",
    "updated_at": "REAL NOT NULL",
    "offset": "INTEGER NOT NULL",
    "pid": "INTEGER",
    "process_started_at": "REAL",
    "step": "INTEGER",
    "steps": "INTEGER",
    "metric": "TEXT",
    "metric_value": "REAL",
    "error": "TEXT",
    "layout": "TEXT",
    "workers": "INTEGER",
}
_NAMES = ", ".join(f'"{name}"' for name in _COLUMNS)
_STATES = ", ".join(f"'{state}'" for state in sorted(ACTIVE))
_DEFINITIONS = ", ".join(f'"{name}" {kind}' for name, kind in _COLUMNS.items())
_MAKE = (
    "DROP TABLE IF EXISTS runs",
    f"CREATE TABLE runs ({_DEFINITIONS})",
    "CREATE INDEX runs_by_age ON runs (created_at)",
    "CREATE INDEX runs_by_state ON runs (state)",
    f"PRAGMA user_version = {SCHEMA}",
)
# The record that has read further wins: a slow reader never turns the index back.
_PUT = (
    f"INSERT INTO runs ({_NAMES}) VALUES ({', '.join('?' * len(_COLUMNS))}) "  # noqa: S608 (own names)
    "ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f'"{name}" = excluded."{name}"' for name in _COLUMNS if name != "id")
    + ' WHERE runs."offset" <= excluded."offset" OR runs.created_at < excluded.created_at'
)
_SELECT = f"SELECT {_NAMES} FROM runs"  # noqa: S608 (own names)
_NEWEST = (
    f"{_SELECT} WHERE state IN ({_STATES}) "  # noqa: S608 (own names)
    "OR id IN (SELECT id FROM runs ORDER BY created_at DESC LIMIT ?) ORDER BY created_at DESC"
)
_BUSY_S = 10
_PAUSES_S = (0.02, 0.1, 0.5)


class FullDiskError(StoreError):
    """The index cannot grow."""


class RunIndex:
    """Index of the runs of one home."""

    def __init__(self, home: Path) -> None:
        """Open the index; create or rebuild it where needed."""
        self.home = home
        self.path = home / "index.sqlite"
        self._connection: sqlite3.Connection | None = None
        self._problems: dict[str, str] = {}
        try:
            make_directory(check_home(home))
            self._is_sure = open_marks(home)
            for suffix in ("", "-wal", "-shm", "-journal"):  # SQLite itself follows links
                check_regular(self.path.with_name(self.path.name + suffix))
            self._retry(self._connect)
        except OSError as error:
            raise StoreError(
                f"the run store {home} cannot be used: {error.strerror or error}",
                hint=WRITABLE_HOME,
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def reconcile(self) -> RunScan:
        """All records, newest first, and what cannot be read; after an ``update``."""
        self.update()
        records = self._as_records(self._select(f"{_SELECT} ORDER BY created_at DESC"))
        return RunScan(records=records, problems=self._problems)

    def newest(self, most: int | None) -> tuple[RunScan, int]:
        """So many of the newest records and all that are active; and how many runs are left out."""
        self.update()
        rows = self._select(_NEWEST, (-1 if most is None else most,))
        records = self._as_records(rows, is_checked=True)
        ((every,),) = self._select("SELECT count(*) FROM runs")
        return RunScan(records=records, problems=self._problems), max(every - len(rows), 0)

    def update(self) -> None:
        """Read the runs that may have changed since the last look.

        Adds unknown runs, drops runs that were removed, and marks a run lost when its worker vanished.
        """
        names, self._problems = _list_home(self.home)
        marked = take_marks(self.home)
        known: dict[str, str] = dict(self._select("SELECT id, state FROM runs"))
        settled = {run_id for run_id, state in known.items() if state in _SETTLED}
        wanted = names - settled | marked & names if self._is_sure else names
        self._forget(known.keys() - names)
        self._read(wanted)
        drop_marks(self.home, marked)
        self._is_sure = True

    def refresh(self, run: RunStore) -> RunRecord:
        """Update one row."""
        from yunlu.jobs.run import detect_lost, new_record  # noqa: PLC0415 (slow to import)
        from yunlu.runs.run_store import not_a_run  # noqa: PLC0415

        start = self.get(run.id) or new_record(run)
        if start is None:
            raise not_a_run(run)
        record = detect_lost(run, start)
        self._put(record)
        return record

    def records(self) -> list[RunRecord]:
        """All rows that can be read, without an update."""
        rows = self._select(_SELECT)
        return [record for row in rows if (record := _as_record(row)) is not None]

    def get(self, run_id: str) -> RunRecord | None:
        """One row, without an update."""
        rows = self._select(f"{_SELECT} WHERE id = ?", (run_id,))
        return _as_record(rows[0]) if rows else None

    def _read(self, run_ids: Iterable[str]) -> list[RunRecord]:
        """Records of these runs as they are now, which are stored; what cannot be read is a problem."""
        if not (names := sorted(run_ids)):
            return []
        from yunlu.jobs.run import detect_lost, new_record  # noqa: PLC0415 (slow to import)
        from yunlu.runs.home import open_run  # noqa: PLC0415

        before = {record.id: record for record in self.records()} if len(names) > 1 else {}
        current: list[RunRecord] = []
        for name in names:
            run = open_run(self.home / name)
            known = before.get(name) if before else self.get(name)
            try:
                start = known or new_record(run)
                if start is not None:  # else a directory that is no run
                    current.append(detect_lost(run, start))
            except UNREADABLE as error:
                self._problems[name] = describe_problem(error)
        self._put(*(record for record in current if record != before.get(record.id)))
        return current

    def _as_records(
        self, rows: Sequence[tuple[Any, ...]], *, is_checked: bool = False
    ) -> tuple[RunRecord, ...]:
        """Records in order; those of damaged rows, and with a check those that fell behind, read afresh."""
        read = [(str(row[0]), _as_record(row)) for row in rows]
        stale = {
            run_id
            for run_id, record in read
            if record is None or (is_checked and not self._is_current(record))
        }
        fresh = {record.id: record for record in self._read(stale)}
        records = [fresh.get(run_id, record) for run_id, record in read]
        return tuple(
            record for record in records if record is not None and record.id not in self._problems
        )

    def _is_current(self, record: RunRecord) -> bool:
        """Whether a record has taken in all events: one look at a file, without opening it."""
        if record.state.is_active:
            return True  # just read
        try:
            size = os.lstat(self.home / record.id / Log.EVENTS).st_size
        except OSError:
            return False
        return size == record.offset

    def _put(self, *records: RunRecord) -> None:
        values = [tuple(getattr(record, name) for name in _COLUMNS) for record in records]
        if values:
            self._do(lambda connection: connection.executemany(_PUT, values))

    def _forget(self, run_ids: Iterable[str]) -> None:
        gone = [(run_id,) for run_id in run_ids if not (self.home / run_id).exists()]
        if gone:
            self._do(
                lambda connection: connection.executemany("DELETE FROM runs WHERE id = ?", gone)
            )

    def _select(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._retry(lambda: self._connect().execute(query, values).fetchall())

    def _do(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """One short transaction."""

        def act() -> None:
            connection = self._connect()
            with _transaction(connection):
                work(connection)

        self._retry(act)

    def _retry(self, act: Callable[[], T]) -> T:
        """Try again when the index was deleted, replaced or damaged meanwhile: it is derived."""
        for pause_s in _PAUSES_S:
            try:
                return act()
            except sqlite3.DatabaseError as error:
                self.close()
                if _is_damage(error):
                    self._put_aside()
                time.sleep(pause_s)
        try:
            return act()
        except sqlite3.DatabaseError as error:
            raise (FullDiskError if _is_full(error) else StoreError)(
                f"the index {self.path} cannot be read or written: {error}",
                hint="if this stays so, delete the file: it is rebuilt from the run directories",
            ) from error

    def _put_aside(self) -> None:
        """Move a damaged index aside, unless another process has."""
        with _index_lock(self.home):
            try:
                with closing(sqlite3.connect(self.path, timeout=_BUSY_S)) as connection:
                    connection.execute(_SELECT).fetchall()
            except sqlite3.DatabaseError as error:
                if _is_damage(error) and self.path.exists():
                    self.path.rename(self.path.with_suffix(f".damaged-{time.time():.0f}"))
                    self._remove_logs()

    def _remove_logs(self) -> None:
        """The write-ahead log of an index that is gone must not be replayed into a new one."""
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        if not self.path.exists():
            with _index_lock(self.home):
                if not self.path.exists():
                    self._remove_logs()
                    create_private(self.path)  # the database's other files get its mode
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous=NORMAL")
            if _schema_of(connection) != SCHEMA:
                with _index_lock(self.home):
                    self._make(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _make(self, connection: sqlite3.Connection) -> None:
        """Make the table, unless another process has meanwhile; the file keeps its mode."""
        version = _schema_of(connection)
        if version > SCHEMA:
            raise StoreError(
                f"{self.path} has schema {version}, made by a newer Yunlu; this one knows {SCHEMA}",
                hint="upgrade Yunlu, or delete the file: it is rebuilt from the run directories",
            )
        if version < SCHEMA:
            connection.execute("PRAGMA journal_mode=WAL")  # readers do not wait for writers
            with _transaction(connection):
                for statement in _MAKE:
                    connection.execute(statement)


_SETTLED = frozenset(state.value for state in RunState) - frozenset(state.value for state in ACTIVE)
"""States that no worker leaves by itself."""


def _as_record(row: Sequence[Any]) -> RunRecord | None:
    """None for a damaged row: its run is read again."""
    try:
        return RunRecord.model_validate(dict(zip(_COLUMNS, row, strict=True)))
    except ValidationError:
        return None


def _list_home(home: Path) -> tuple[set[str], dict[str, str]]:
    """Names of the directories in a home, and what leads elsewhere, which is not read as its runs."""
    names: set[str] = set()
    links: dict[str, str] = {}
    with os.scandir(home) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                names.add(entry.name)
            elif entry.is_symlink() and entry.is_dir():
                links[entry.name] = (
                    f"{entry.path} is a symbolic link to a directory: it is not read as a run"
                )
    return names, links


def _is_full(error: sqlite3.DatabaseError) -> bool:
    # Without room for the memory that processes share beside the index, SQLite reports an I/O error.
    code = getattr(error, "sqlite_errorcode", 0)  # missing in errors of Python's own module
    return code & 0xFF in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}


def _is_damage(error: Exception) -> bool:
    return "malformed" in str(error) or "not a database" in str(error)


def _schema_of(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


@contextmanager
def _index_lock(home: Path) -> Generator[None]:
    """Lock: one process at a time creates, makes or replaces the index."""
    with open_lock(home / ".index.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
