"""Start and stop the scheduler service, and find out whether it runs."""

from __future__ import annotations

import fcntl
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.files import WRITABLE_HOME, open_private, open_to_read
from yunlu.core.processes import ProcessHandle, reap_in_background, start_process
from yunlu.jobs import lifecycle
from yunlu.scheduler.allocation_record import PendingAction, read_allocation, write_allocation
from yunlu.scheduler.pool_store import PoolSettings, PoolStore, ServiceRecord
from yunlu.scheduler.queue import read_entry, requeue, scan

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

PROGRAM = (sys.executable, "-m", "yunlu.scheduler.service")
_POLL_S = 0.05
_UP_S = 180.0
"""Connecting to a cluster takes a while on a busy machine."""
_DOWN_S = 30.0
_TAIL = 12


def find_service(home: Path) -> ServiceRecord | None:
    """The service of this home; None if none runs."""
    pool_store = PoolStore(home)
    if not pool_store.lock.exists() or _is_free(pool_store.lock):
        return None
    try:
        return pool_store.read_service()
    except (OSError, ValueError):
        return ServiceRecord(pid=0, process_started_at=0.0, host=socket.gethostname(), began_at=0.0)


def is_queued_again(run: RunStore) -> bool:
    """Put a run of the pool back into its queue; False if no service would start it from there."""
    if read_entry(run) is None:
        return False
    requeue(run)
    return find_service(lifecycle.home()) is not None


def bring_up(home: Path, settings: PoolSettings) -> ServiceRecord:
    """Start the service of this home and wait until it is ready. Active runs are adopted."""
    service = find_service(home)
    if service is not None:
        raise StoreError(
            f"the pool of {home} is up already (process {service.pid})",
            hint="yunlu pool shows it; yunlu pool down ends it, and its runs continue",
        )
    pool_store = PoolStore(home)
    try:
        pool_store.write_settings(settings)
        pool_store.view.unlink(missing_ok=True)
        with open_private(pool_store.log, "ab") as log:
            told_before = log.tell()
            child = start_process([*PROGRAM, str(home)], log=log, own_session=True)
    except OSError as error:
        raise StoreError(
            f"the pool cannot be brought up in {home}: {error.strerror or error}",
            hint=WRITABLE_HOME,
        ) from error
    reap_in_background(child)
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        if pool_store.view.exists() and (service := find_service(home)) is not None:
            return service
        if child.returncode is not None:
            break
        time.sleep(_POLL_S)
    else:
        child.terminate()  # it may be up by now, but its record is missing
    raise StoreError(_last_words(pool_store, told_before), hint=f"see {pool_store.log}")


def _last_words(pool_store: PoolStore, told_before: int) -> str:
    given = pool_store.log.read_bytes()[told_before:].decode(errors="replace").strip()
    text = "\n".join(given.splitlines()[-_TAIL:])
    return f"the pool did not come up: {text or 'unknown reason'}"


def bring_down(home: Path, *, stop_jobs: bool = False) -> bool:
    """Stop the service and wait until it is gone; its runs continue unless they are to be stopped too."""
    service = find_service(home)
    if service is not None:
        _end(service)
        deadline = time.monotonic() + _DOWN_S
        while find_service(home) is not None:
            if time.monotonic() > deadline:
                raise StoreError(f"the pool's service (process {service.pid}) does not end")
            time.sleep(_POLL_S)
    if stop_jobs:
        # They keep their position in the queue: the next service continues them.
        leaving = PendingAction(kind="stop", reason="the pool went down")
        for run in scan(home):
            allocation = read_allocation(run)
            if allocation.shares:
                allocation = allocation.model_copy(update={"pending": leaving})
                write_allocation(run, allocation, is_pending=True)
                lifecycle.request_stop(run)
    return service is not None


def _end(service: ServiceRecord) -> None:
    if service.host != socket.gethostname():
        raise StoreError(
            f"the pool's service runs on {service.host}", hint=f"yunlu pool down, on {service.host}"
        )
    ProcessHandle(service.pid, service.process_started_at).send_signal(signal.SIGTERM)


def _is_free(lock: Path) -> bool:
    with open_to_read(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
