"""Watchdog between a Ray actor and its lease program: nothing outlives the actor.

Ray ends the direct children of an actor, and not even those where the actor itself is killed; the
workers of a worker group have sessions of their own and outlive their parents. The watchdog is nobody's child,
adopts whoever loses its parent, and ends all of them as soon as the actor or its raylet is gone: a
node that the cluster has given up does not go on training. It knows nothing of Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from yunlu.core.files import make_directory, open_private
from yunlu.core.processes import (
    SignalPipe,
    adopt_orphans,
    describe_exit,
    kill_descendants,
    reap_children,
    start_process,
)
from yunlu.core.secrets import make_process_private
from yunlu.executors.lease_executor import append_lease_event, read_record
from yunlu.runs.home import open_run

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore

RAYLET_GONE = "the raylet of its node is gone"
STOP = "stop"
"""The one command of the actor: the lease is to leave."""
_LEASE = (sys.executable, "-m", "yunlu.executors.lease_runner")
_LOOK_S = 0.5


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="yunlu.executors.ray_watchdog")
    parser.add_argument("run", type=Path)
    parser.add_argument("lease")
    parser.add_argument("--raylet", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    args = parser.parse_args()
    make_process_private()
    # Not a child of the actor: Ray would kill it with the actor, before it can act.
    if os.fork():
        os._exit(0)
    os.setsid()
    parts = [*_LEASE, str(args.run), args.lease, "--with-parent"]
    reason = RayWatchdog(parts, raylet=args.raylet).keep(log=args.log, directory=args.directory)
    if reason:
        _emit_lost(open_run(args.run), args.lease, reason)
    return 0


class RayWatchdog:
    """One program and all its descendants."""

    def __init__(self, command: list[str], *, raylet: int) -> None:
        self._command = command
        self._raylet = _WatchedProcess(raylet)
        self._program = 0
        self._code: int | None = None
        self._has_actor = True
        self._signals = SignalPipe()

    def keep(self, *, log: Path, directory: Path) -> str:
        """Run until no process is left; returns why they had to be killed, empty if the program exited itself."""
        adopt_orphans()
        self._signals.listen(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            self._start(log, directory)
        except OSError as error:
            self._report(error=f"the lease could not be started: {error}")
            return str(error)
        reason = ""
        while self._reap():
            self._wait()
            reason = reason or self._find_reason()
            if reason or self._code is not None:
                self._end_all()
        if not reason and self._code is not None and self._code < 0:
            reason = f"its process was {describe_exit(self._code)}"
        self._report(code=self._code, reason=reason)
        return reason

    def _start(self, log: Path, directory: Path) -> None:
        make_directory(log.parent)
        with open_private(log, "ab") as file:
            child = start_process(self._command, log=file, directory=directory, own_session=True)
        child.returncode = 0  # waited for together with adopted processes
        self._program = child.pid
        self._report(pid=child.pid)

    def _wait(self) -> None:
        actor = [sys.stdin.fileno()] if self._has_actor else []
        readable, _, _ = select.select(
            [self._signals, *actor, *self._raylet.files], [], [], _LOOK_S
        )
        if {signal.SIGTERM, signal.SIGINT} & self._signals.take():
            self._pass_on()
        if sys.stdin.fileno() in readable:
            text = os.read(sys.stdin.fileno(), 4096)
            self._has_actor = bool(text)
            if STOP.encode() in text:
                self._pass_on()

    def _pass_on(self) -> None:
        if self._code is None:
            os.kill(self._program, signal.SIGTERM)

    def _find_reason(self) -> str:
        """Why all processes must be killed now; empty if they need not."""
        if not self._raylet.is_alive():
            return RAYLET_GONE
        return "" if self._has_actor else "its actor was ended"

    def _reap(self) -> bool:
        """Reap children; returns whether any process is left."""
        codes, is_any_left = reap_children()
        self._code = codes.get(self._program, self._code)
        return is_any_left

    def _end_all(self) -> None:
        """Processes started meanwhile become our children, and are killed in the next round."""
        while self._reap():
            kill_descendants()
            time.sleep(0.01)

    def _report(self, **fields: Any) -> None:
        with suppress(OSError):  # no reader any more
            os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")


class _WatchedProcess:
    """A process that is not our child: its exit is noticed at once through a pidfd."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.files: list[int] = []
        with suppress(OSError):  # kernel before 5.3: polled every half second
            self.files.append(os.pidfd_open(pid))

    def is_alive(self) -> bool:
        if self.files:
            return not select.select(self.files, [], [], 0)[0]
        return psutil.pid_exists(self._pid)


def _emit_lost(run: RunStore, name: str, reason: str) -> None:
    """Record the loss in the run's directory: the cluster notices much later."""
    record = read_record(run)
    lease = record.find(name) if record else None
    if lease is not None:
        with suppress(OSError):  # a full disk; or the run was removed
            append_lease_event(run, lease, "ended", reason)


if __name__ == "__main__":
    sys.exit(main())
