"""Scheduler service: one process per home, started by ``yunlu pool up``.

``python -m yunlu.scheduler.service HOME`` runs it in the foreground.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from yunlu.core.errors import YunluError
from yunlu.core.files import check_home, make_directory, open_lock, write_atomically
from yunlu.core.processes import start_time
from yunlu.core.secrets import make_process_private
from yunlu.executors.registry import open_executor, require_known
from yunlu.scheduler.executor_adapter import ExecutorAdapter
from yunlu.scheduler.loop import Scheduler
from yunlu.scheduler.policies import open_estimator, open_policy
from yunlu.scheduler.pool_store import PoolSettings, PoolStore, ServiceRecord
from yunlu.scheduler.scaling import make_scaler

if TYPE_CHECKING:
    from collections.abc import Generator

_LOCK_S = 2.0
_AFTER_FAULT_S = 5.0
_REST = 9.0
"""Idle seconds per second of work."""


def main() -> int:
    """The command line."""
    home = Path(sys.argv[1])
    make_process_private()
    ended = threading.Event()

    def end(*_: object) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        with only_service(home) as pool_store:
            serve(home, pool_store, ended)
    except BlockingIOError:
        sys.stderr.write("this home has a pool service already\n")
        return 1
    except YunluError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def serve(home: Path, pool_store: PoolStore, ended: threading.Event) -> None:
    """Run the loop until it is stopped; the runs continue."""
    settings = pool_store.read_settings() or PoolSettings()
    require_known(settings.executor, named_by=f"the pool of {home}")
    executor = open_executor(settings.executor)
    executor.nodes()  # an unreachable cluster is reported to whoever starts the pool
    able = executor.capabilities()
    scheduler = Scheduler(
        home,
        ExecutorAdapter(executor),
        open_policy(settings.policy),
        open_estimator,
        settings=settings,
        pool_store=pool_store,
        scaler=make_scaler(executor, settings) if able.scales else None,
        limits=able.limits,
        name=secrets.token_hex(4),
    )
    result = ""
    while not ended.is_set():
        began, busy_then_s = time.monotonic(), time.process_time()
        pause_s = settings.look_s
        try:
            scheduler.step()
            result = ""
        except Exception as error:  # noqa: BLE001 (the last border: the pool outlives its faults)
            text = repr(error)
            if text != result:  # reported once, not every second
                result = text
                with suppress(OSError):
                    traceback.print_exc()
            pause_s = _AFTER_FAULT_S
        # With many runs it observes less often, to leave the CPU to the runs.
        rest_s = _REST * (time.process_time() - busy_then_s)
        ended.wait(max(pause_s - (time.monotonic() - began), rest_s))
    scheduler.registry.keep_all()


@contextmanager
def only_service(home: Path) -> Generator[PoolStore]:
    """Hold the lock of the home: two services would give the same devices away twice."""
    pool_store = PoolStore(home)
    make_directory(check_home(home))
    make_directory(pool_store.path)
    with open_lock(pool_store.lock) as file:
        _lock(file)
        record = ServiceRecord(
            pid=os.getpid(),
            process_started_at=start_time(),
            host=socket.gethostname(),
            began_at=time.time(),
        )
        with suppress(OSError):  # on a full disk it works without its record
            write_atomically(pool_store.service, json.dumps(record.model_dump()))
        yield pool_store


def _lock(file: IO[str]) -> None:
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process may only be testing the lock
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
