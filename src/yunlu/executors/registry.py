"""Executor registry by address: ``local``, ``slurm://PARTITION?account=x``, ``ray://HOST:PORT``.

Addresses of clusters that the user has named: the only ones that are ever contacted.
A run says with which executor it is, but runs are files, and may come from somebody else: connecting to
an address that stands there would be to trust whoever wrote it. So an address counts only if it is in
the user's settings: ``YUNLU_EXECUTORS``, or the list of addresses that the user has started something on.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from yunlu.core.errors import StoreError, did_you_mean
from yunlu.core.files import make_directory, open_private, open_to_read, require_private
from yunlu.core.settings import read_settings
from yunlu.executors.executor import Executor, ExecutorError
from yunlu.executors.lease_executor import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

LOCAL = "local"
_FILE = "executors"


def scheme_of(address: str) -> str:
    """The name of the executor in an address."""
    return address.partition("?")[0].partition(":")[0]


def is_known(address: str) -> bool:
    """Whether the user has named this very address; processes of this machine need no address."""
    return scheme_of(address) == LOCAL or address in _known_addresses()


def require_known(address: str, *, named_by: str) -> None:
    """Refuse an address that only a file names.

    Args:
        address: Of an executor.
        named_by: The run or pool whose file names it.
    """
    if not is_known(address):
        raise ExecutorError(
            f"{named_by} names the executor {address}, which is not one of yours: "
            "it was not contacted",
            hint=f"if it is yours: export YUNLU_EXECUTORS={address!r}",
        )


def remember_address(address: str) -> None:
    """Add an address that the user has given to the list; without a place for it, it is not kept."""
    if is_known(address) or not address.isprintable() or address != address.strip():
        return
    with suppress(OSError, StoreError):
        make_directory(_file().parent)
        with open_private(_file(), "a", encoding="utf-8") as file:
            file.write(f"{address}\n")


def _known_addresses() -> frozenset[str]:
    known = read_settings().executors
    try:
        with open_to_read(_file()) as file:
            require_private(_file())
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return known
    return known | {line.strip() for line in lines if line.strip()}


def _file() -> Path:
    return read_settings().config / _FILE


def open_executor(address: str) -> Executor:
    """The executor of this address; errors of the cluster appear at the first call."""
    from yunlu.core.imports import (  # noqa: PLC0415 (slow: who has no executor pays not)
        EXECUTORS,
        load_registered,
    )

    scheme = scheme_of(address)
    return load_registered(EXECUTORS, scheme, kind="executor", error=ExecutorError)(address)


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
