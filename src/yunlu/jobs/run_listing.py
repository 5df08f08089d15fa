"""The runs of a home as a list, from their index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.files import check_home, name_if_foreign
from yunlu.jobs.run_index import FullDiskError, RunIndex
from yunlu.jobs.run_record import UNREADABLE, ListedRun, RunList, describe_problem

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.jobs.run_record import RunRecord, RunScan


def list_home(home: Path, *, most: int | None = None) -> RunList:
    """State and progress of the newest runs of a home, and of those that are active."""
    if not check_home(home).is_dir():
        return RunList(home=str(home))
    scan, older = _scan(home, most)
    runs: list[ListedRun] = []
    problems = dict(scan.problems)
    for record in scan.records:
        try:
            runs.append(_list_run(home, record))
        except UNREADABLE as error:
            problems[record.id] = describe_problem(error)
    return RunList(home=str(home), runs=tuple(runs), older=older, problems=problems)


def _scan(home: Path, most: int | None) -> tuple[RunScan, int]:
    try:
        with RunIndex(home) as index:
            return index.newest(most)
    except FullDiskError:
        # The index is derived from the runs: on a full disk they are read one by one.
        from yunlu.jobs.run import scan_directly  # noqa: PLC0415 (slow to import)

        return scan_directly(home), 0


def _list_run(home: Path, record: RunRecord) -> ListedRun:
    path = home / record.id
    if record.state.is_active or name_if_foreign(path.stat().st_uid) is not None:
        from yunlu.jobs.run_view import list_run  # noqa: PLC0415 (slow to import)
        from yunlu.runs.home import open_run  # noqa: PLC0415

        return list_run(open_run(path), record)
    fields = {name: getattr(record, name) for name in type(record).model_fields}
    return ListedRun.model_construct(**fields, dir=str(path.absolute()))
