"""Index of runs: SQLite in the home of the runs, derived from their events.

Deleting it loses nothing. Each transaction is one short write, so that many processes share it.
"""

from __future__ import annotations

import fcntl
import sqlite3
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy import event
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError

from yunlu.core.errors import StoreError
from yunlu.core.files import (
    WRITABLE_HOME,
    check_home,
    check_regular,
    create_private,
    make_directory,
    open_lock,
)
from yunlu.jobs.run import (
    UNREADABLE,
    RunRecord,
    RunScan,
    describe_problem,
    detect_lost,
    new_record,
)
from yunlu.runs.home import find_links, find_runs
from yunlu.runs.run_store import Log, not_a_run

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from sqlalchemy.engine.interfaces import DBAPIConnection
    from sqlalchemy.pool import ConnectionPoolEntry

    from yunlu.runs.run_store import RunStore

T = TypeVar("T")

SCHEMA = "0001"
"""The newest migration: known here so that Alembic is imported only to migrate."""

_COLUMNS = tuple(RunRecord.model_fields)
_RUNS = sa.table("runs", *(sa.column(name) for name in _COLUMNS))
_BUSY_S = 10
_PAUSES_S = (0.02, 0.1, 0.5)
_FAULTS = (DatabaseError, sqlite3.DatabaseError)


class FullDiskError(StoreError):
    """The index cannot grow."""


class RunIndex:
    """Index of the runs of one home."""

    def __init__(self, home: Path) -> None:
        """Open the index; create, migrate or rebuild it where needed."""
        self.home = home
        self.path = home / "index.sqlite"
        try:
            make_directory(check_home(home))
            for suffix in ("", "-wal", "-shm", "-journal"):  # SQLite itself follows links
                check_regular(self.path.with_name(self.path.name + suffix))
            self._engine = _connect(self.path)
            self._is_ready = False
            self._retry(self._ensure_schema)
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
        self._engine.dispose()

    def reconcile(self) -> RunScan:
        """Update every row from the runs; returns all records, newest first, and what cannot be read.

        Folds new events, adds unknown runs, drops runs that were removed, and marks a run lost when
        its worker vanished.
        """
        known = {record.id: record for record in self.records()}
        runs = {run.id: run for run in find_runs(self.home)}
        current: list[RunRecord] = []
        problems = find_links(self.home)
        for run_id, run in runs.items():
            before = known.get(run_id)
            try:
                after = _update(run, before)
            except UNREADABLE as error:
                problems[run_id] = describe_problem(error)
                continue
            if after is None:  # a directory that is no run
                continue
            current.append(after)
            if after != before:
                self._put(after)
        self._forget(known.keys() - runs.keys())
        newest_first = sorted(current, key=lambda record: record.created_at, reverse=True)
        return RunScan(records=tuple(newest_first), problems=problems)

    def refresh(self, run: RunStore) -> RunRecord:
        """Update one row."""
        start = self.get(run.id) or new_record(run)
        if start is None:
            raise not_a_run(run)
        record = detect_lost(run, start)
        self._put(record)
        return record

    def records(self) -> list[RunRecord]:
        """All rows, without an update."""
        rows = self._do(lambda connection: connection.execute(sa.select(_RUNS)).mappings().all())
        return [record for row in rows if (record := _as_record(row)) is not None]

    def get(self, run_id: str) -> RunRecord | None:
        """One row, without an update."""
        query = sa.select(_RUNS).where(_RUNS.c.id == run_id)
        row = self._do(lambda connection: connection.execute(query).mappings().one_or_none())
        return None if row is None else _as_record(row)

    def _put(self, record: RunRecord) -> None:
        values = record.model_dump(mode="json")
        values |= {"metric_value": record.metric_value}  # a float column, also when not finite
        statement = insert(_RUNS).values(values)
        # The record that has read further wins: a slow reader never turns the index back.
        statement = statement.on_conflict_do_update(
            index_elements=["id"],
            set_={name: statement.excluded[name] for name in _COLUMNS if name != "id"},
            where=(_RUNS.c.offset <= statement.excluded.offset)
            | (_RUNS.c.created_at < statement.excluded.created_at),
        )
        self._do(lambda connection: connection.execute(statement))

    def _forget(self, run_ids: Iterable[str]) -> None:
        gone = [run_id for run_id in run_ids if not (self.home / run_id).exists()]
        if gone:
            statement = sa.delete(_RUNS).where(_RUNS.c.id.in_(gone))
            self._do(lambda connection: connection.execute(statement))

    def _do(self, work: Callable[[sa.Connection], T]) -> T:
        """One short transaction."""

        def act() -> T:
            self._ensure_schema()
            with self._engine.begin() as connection:
                return work(connection)

        return self._retry(act)

    def _retry(self, act: Callable[[], T]) -> T:
        """Try again when the index was deleted, replaced or damaged meanwhile: it is derived."""
        for pause_s in _PAUSES_S:
            try:
                return act()
            except _FAULTS as error:
                self._is_ready = False
                self._engine.dispose()
                if _is_damage(error):
                    self._put_aside()
                time.sleep(pause_s)
        try:
            return act()
        except _FAULTS as error:
            is_full = "disk is full" in str(error)
            raise (FullDiskError if is_full else StoreError)(
                f"the index {self.path} cannot be read or written: {getattr(error, 'orig', error)}",
                hint="if this stays so, delete the file: it is rebuilt from the run directories",
            ) from error

    def _put_aside(self) -> None:
        """Move a damaged index aside, unless another process has."""
        with _index_lock(self.home):
            try:
                with self._engine.connect() as connection:
                    connection.execute(sa.select(_RUNS)).all()
            except _FAULTS as error:
                self._engine.dispose()
                if _is_damage(error) and self.path.exists():
                    self.path.rename(self.path.with_suffix(f".damaged-{time.time():.0f}"))
                    self._remove_logs()

    def _remove_logs(self) -> None:
        """The write-ahead log of an index that is gone must not be replayed into a new one."""
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _ensure_schema(self) -> None:
        if not self._is_ready and not (self.path.exists() and _schema_of(self._engine) == SCHEMA):
            with _index_lock(self.home):
                if not self.path.exists():
                    self._remove_logs()
                self._migrate()
        self._is_ready = True

    def _migrate(self) -> None:
        version = _schema_of(self._engine)
        if version == SCHEMA:
            return
        if version is not None and version > SCHEMA:
            raise StoreError(
                f"{self.path} has schema {version}, made by a newer Yunlu; this one knows {SCHEMA}",
                hint="upgrade Yunlu, or delete the file: it is rebuilt from the run directories",
            )
        from alembic import command  # noqa: PLC0415 (half a second, needed once per schema)
        from alembic.config import Config  # noqa: PLC0415

        _use_write_ahead_log(self._engine)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        with self._engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


MIGRATIONS = Path(__file__).parent / "migrations"


def _connect(path: Path) -> sa.Engine:
    create_private(path)  # the database's other files get its mode
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)), connect_args={"timeout": _BUSY_S}
    )

    # The driver opens transactions late and not before DDL, so BEGIN is sent explicitly.
    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.isolation_level = None  # pyright: ignore[reportAttributeAccessIssue]
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.exec_driver_sql("BEGIN")

    return engine


def _as_record(row: sa.RowMapping) -> RunRecord | None:
    """None for a row of an unknown schema: its run is read again."""
    try:
        return RunRecord.model_validate(dict(row))
    except ValidationError:
        return None


def _is_damage(error: Exception) -> bool:
    return "malformed" in str(error) or "not a database" in str(error)


def _use_write_ahead_log(engine: sa.Engine) -> None:
    """Readers do not wait for writers. The file keeps the mode; no transaction may be open."""
    connection = engine.raw_connection()
    try:
        connection.cursor().execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()


def _schema_of(engine: sa.Engine) -> str | None:
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        version: Any = connection.exec_driver_sql(
            "SELECT version_num FROM alembic_version"
        ).scalar()
        return version


@contextmanager
def _index_lock(home: Path) -> Generator[None]:
    """Lock: one process at a time creates, migrates or replaces the index."""
    with open_lock(home / ".index.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _update(run: RunStore, before: RunRecord | None) -> RunRecord | None:
    start = before or new_record(run)
    if start is None:
        return None
    return detect_lost(run, start) if _may_change(run, before) else start


def _may_change(run: RunStore, record: RunRecord | None) -> bool:
    """Whether to read the run: not if it ended and has no new events."""
    if record is None or record.state.is_active:
        return True
    stat = run.stat(Log.EVENTS)
    return stat is None or stat.size != record.offset
