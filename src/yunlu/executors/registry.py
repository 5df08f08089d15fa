"""Executor registry by address: ``local``, ``slurm://PARTITION?account=x``, ``ray://HOST:PORT``."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from yunlu.core.errors import did_you_mean
from yunlu.executors.executor import GROUP, Executor, ExecutorError
from yunlu.executors.known_addresses import LOCAL, is_known, require_known, scheme_of
from yunlu.executors.lease_record import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.runs.run_store import RunStore


def open_executor(address: str) -> Executor:
    """The executor of this address; errors of the cluster appear at the first call."""
    from importlib.metadata import entry_points  # noqa: PLC0415 (slow: who has no executor pays not)

    name = scheme_of(address)
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise ExecutorError(f"there is no executor {name!r}", hint=did_you_mean(name, [*points]))
    return points[name].load()(address)


def executor_of(run: RunStore) -> Executor | None:
    """Executor of a run; None if it was started without one. Refused if the user has not named it."""
    record = read_record(run)
    if record is None:
        return None
    require_known(record.address, named_by=run.id)
    return _opened(record.address)


@cache  # may hold a connection
def _opened(address: str) -> Executor:
    return open_executor(address)


def is_elsewhere(run: RunStore) -> bool:
    """Whether the run is at an executor other than this machine."""
    record = read_record(run)
    return record is not None and scheme_of(record.address) != LOCAL


def unknown_executor(run: RunStore) -> str | None:
    """Address of the executor that a run names and the user has not; it is never contacted."""
    record = read_record(run)
    return None if record is None or is_known(record.address) else record.address


def is_held(run: RunStore) -> bool:
    """Whether an executor holds devices for the run, or waits for them; changes nothing.

    True if it does not answer, or if the user has not named it.
    """
    try:
        executor = executor_of(run)
        return executor is not None and executor.observe(run).is_alive
    except ExecutorError:
        return True


def last_reason(run: RunStore) -> str:
    """Why an executor no longer holds devices for the run."""
    record = read_record(run)
    if record is None:
        return "it is with no executor any more"
    node, reason = "", ""
    with suppress(ExecutorError):
        executor = executor_of(run)
        assert executor is not None
        leases = sorted(executor.observe(run).leases, key=lambda status: not status.lease.is_lead)
        node, reason = (leases[0].lease.node, leases[0].reason) if leases else ("", "")
    where = f" on {node}" if node else ""
    return f"its lease{where} is gone: {reason or 'unknown reason'} ({record.address})"


def read_address(address: str, known: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The part after ``://`` and the options after ``?``; unknown options are refused."""
    index, _, requested = address.partition("?")
    options = dict(parse_qsl(requested, keep_blank_values=True))
    for name in options:
        if name not in set(known):
            raise ExecutorError(
                f"{address}: there is no option {name!r}", hint=did_you_mean(name, known)
            )
    return index.partition("://")[2].strip("/"), options
