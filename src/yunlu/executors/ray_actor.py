"""Ray actor that holds the devices of a lease on its node.

It is detached: it outlives whoever asked for it, and is found again by its name. When its program is
over it gives the devices back itself, whether or not anybody still looks after the run.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu import __version__
from yunlu.core.limits import decode_json
from yunlu.core.processes import start_process
from yunlu.core.settings import worker_environment
from yunlu.core.value import Value
from yunlu.executors.ray_watchdog import STOP

if TYPE_CHECKING:
    import subprocess

_WATCHDOG = (sys.executable, "-m", "yunlu.executors.ray_watchdog")
_RAYS_OWN = ("RAY_", "OMP_NUM_THREADS")
"""Prefixes of variables that Ray sets for its own workers, not for ours."""


class LeaseOrder(Value):
    """Order to a lease actor."""

    run: str
    lease: str
    log: str
    directory: str
    environment: dict[str, str]
    version: str


class LeaseActor:
    """Starts the program of a lease and releases its devices when it ends."""

    def __init__(self, order: str) -> None:
        requested = LeaseOrder.model_validate_json(order)
        ray: Any = import_module("ray")
        self._group: Any = ray.util.get_current_placement_group()
        self._watchdog = _start_watchdog(requested, address=ray.util.get_node_ip_address())
        self._last_words: dict[str, Any] = {}
        threading.Thread(target=self._see_through, name="lease", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Last message of the watchdog."""
        return self._last_words

    def leave(self) -> None:
        """Ask the program to leave (SIGTERM)."""
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(f"{STOP}\n".encode())
        self._watchdog.stdin.flush()

    def _see_through(self) -> None:
        assert self._watchdog.stdout is not None
        for line in self._watchdog.stdout:
            self._last_words = decode_json(line)
        # This ends the actor too: nothing else runs there.
        import_module("ray").util.remove_placement_group(self._group)


def _start_watchdog(order: LeaseOrder, *, address: str) -> subprocess.Popen[bytes]:
    if order.version != __version__:
        raise RuntimeError(
            f"{address} has yunlu {__version__}, and the run was sent from {order.version}; "
            "all nodes need the same version"
        )
    if not Path(order.run).is_dir():
        raise RuntimeError(
            f"{address} does not see {order.run}; "
            "YUNLU_HOME has to lie on a file system that all nodes share"
        )
    environment = {
        name: value
        for name, value in worker_environment().items()
        if not name.startswith(_RAYS_OWN)
    }
    environment |= order.environment | {"YUNLU_BIND": address}
    parts = ["--raylet", str(os.getppid()), "--log", order.log, "--directory", order.directory]
    command = [*_WATCHDOG, order.run, order.lease, *parts]
    watchdog = start_process(command, environment=environment, is_piped=True)
    watchdog.wait()  # it continues, reparented
    return watchdog
