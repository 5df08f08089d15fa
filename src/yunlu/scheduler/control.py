"""Start and stop the scheduler service, and find out whether it runs."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.files import open_regular, open_to_read
from yunlu.core.settings import worker_environment
from yunlu.executors.worker_process import WorkerProcess
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
"""To connect to a cluster takes a while on a busy machine."""
_DOWN_S = 30.0
_TAIL = 12


def find_service(home: Path) -> ServiceRecord | None:
    """The service of this home; none where none is up."""
    pool_store = PoolStore(home)
    if not pool_store.lock.exists() or _is_free(pool_store.lock):
        return None
    try:
        return pool_store.read_service()
    except (OSError, ValueError):
        return ServiceRecord(pid=0, process_started_at=0.0, host=socket.gethostname(), began_at=0.0)


def is_queued_again(run: RunStore) -> bool:
    """Put a run of the pool back into its queue; false where nobody would start it from there."""
    if read_entry(run) is None:
        return False
    requeue(run)
    return find_service(lifecycle.home()) is not None


def bring_up(home: Path, settings: PoolSettings) -> ServiceRecord:
    """Start the service of this home, and wait until it works. Runs that go on are adopted."""
    service = find_service(home)
    if service is not None:
        raise StoreError(
            f"the pool of {home} is up already (process {service.pid})",
            hint="yunlu pool shows it; yunlu pool down ends it, and its runs go on",
        )
    pool_store = PoolStore(home)
    try:
        pool_store.write_settings(settings)
        pool_store.view.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_regular(pool_store.log, flags), "ab") as log:
            told_before = log.tell()
            child = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [*PROGRAM, str(home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(),
                start_new_session=True,
            )
    except OSError as error:
        raise StoreError(f"the pool cannot be brought up in {home}: {error}") from error
    # Waited for in the background: a program that brings pools up and down collects no zombies.
    threading.Thread(target=child.wait, name=f"wait-{child.pid}", daemon=True).start()
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        if pool_store.view.exists() and (service := find_service(home)) is not None:
            return service
        if child.returncode is not None:
            break
        time.sleep(_POLL_S)
    else:
        child.terminate()  # it may have come up by now, but nobody would know of it
    raise StoreError(_last_words(pool_store, told_before), hint=f"see {pool_store.log}")


def _last_words(pool_store: PoolStore, told_before: int) -> str:
    given = pool_store.log.read_bytes()[told_before:].decode(errors="replace").strip()
    text = "\n".join(given.splitlines()[-_TAIL:])
    return f"the pool did not come up: {text or 'nobody says why'}"


def bring_down(home: Path, *, stop_jobs: bool = False) -> bool:
    """End the service, and wait until it is gone; its runs go on, unless they are to stop, too."""
    service = find_service(home)
    if service is not None:
        _end(service)
        deadline = time.monotonic() + _DOWN_S
        while find_service(home) is not None:
            if time.monotonic() > deadline:
                raise StoreError(f"the pool's service (process {service.pid}) does not end")
            time.sleep(_POLL_S)
    if stop_jobs:
        # They keep their place in the queue: the next service goes on with them.
        leaving = PendingAction(kind="stop", reason="the pool went down")
        for run in scan(home):
            allocation = read_allocation(run)
            if allocation.shares:
                allocation = allocation.model_copy(update={"pending": leaving})
                write_allocation(run, allocation, is_pending=True)
                lifecycle.request_stop(run)
    return service is not None


def _end(found: ServiceRecord) -> None:
    if found.host != socket.gethostname():
        raise StoreError(
            f"the pool's service runs on {found.host}", hint=f"yunlu pool down, on {found.host}"
        )
    process = WorkerProcess(
        pid=found.pid,
        process_started_at=found.process_started_at,
        host=found.host,
        detached=True,
    )
    if found.pid and process.is_alive():
        os.kill(found.pid, signal.SIGTERM)


def _is_free(lock: Path) -> bool:
    with open_to_read(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
