"""Rendezvous of externally launched workers: values, barriers and failures outside of training.

Rank 0 hosts the store; workers prove the group's secret to it. torchrun's own store, which anybody can
write, only says where: whoever answers at a false address cannot prove the secret.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from contextlib import closing, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from yunlu.core.addresses import routed_address
from yunlu.core.errors import TrainingError
from yunlu.core.json_decode import decode_json
from yunlu.core.secure_link import derive_secret
from yunlu.core.settings import launch_variables, read_settings
from yunlu.runs.worker_group import read_group_secret
from yunlu.training.attempt import as_user_error
from yunlu.training.parallel.group_store import GroupStore, StoreServer
from yunlu.training.parallel.sockets import is_connection_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.core.launch import LaunchInfo

_RENDEZVOUS_S = 600.0
"""Importing torch from a network drive on many machines takes minutes."""
_POLL_S = 0.05
_FAILURE_POLL_S = 1.0
_CAUSE_S = 3.0
"""A worker that failed reports the cause within moments; a killed one never does."""
_LEAVE_S = 3.0
"""A worker still in a collective this long after a failure will not return from it."""


class PeerFailedError(Exception):
    """Another worker reported a failure."""


class Rendezvous:
    """All workers of a launch, seen from one of them."""

    def __init__(
        self, launch: LaunchInfo, name: str, secret: bytes, connect: Callable[[], GroupStore]
    ) -> None:
        self.launch, self._name, self._connected = launch, name, connect()
        self.secret = secret
        """Known to these workers only."""
        self.store = PrefixStore(name, self._connected)
        self.hosts: list[str] = []
        """By rank."""
        self.pids: list[int] = []
        self._cpus: list[list[int]] = []
        self._is_leaving = threading.Event()
        self._report_lock = threading.Lock()

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.launch.rank == 0

    @property
    def address(self) -> str | None:
        """Address on which peers reach this worker, if known."""
        return _address_towards(self.launch.host, self.launch.port)

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return len(set(self.hosts))

    @property
    def first_here(self) -> int:
        """First rank on this machine."""
        return self.hosts.index(self.hosts[self.launch.rank])

    @property
    def workers_here(self) -> int:
        """Number of workers on this machine."""
        return self.hosts.count(self.hosts[self.launch.rank])

    def count_cores(self, own_cores: int) -> int:
        """Cores of all machines; a launcher may pin each worker to ``own_cores`` of its own, or to none."""
        cpus = {(h, c) for h, info in zip(self.hosts, self._cpus, strict=True) for c in info}
        return max(1, round(own_cores * len(cpus) / len(self._cpus[self.launch.rank])))

    def exchange_info(self) -> None:
        """Exchange host, pid and CPU affinity with all workers."""
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        who = {"host": socket.gethostname(), "pid": os.getpid(), "cpus": cpus}
        self._set(f"who-{self.launch.rank}", who)
        infos = [self.receive(f"who-{rank}") for rank in range(self.launch.size)]
        self.hosts = [info["host"] for info in infos]
        self.pids = [info["pid"] for info in infos]
        self._cpus = [info["cpus"] for info in infos]

    def share(self, key: str, value: Any = None) -> Any:
        """Broadcast the leader's value (JSON)."""
        if self.is_leader:
            self._set(key, value)
            return value
        return self.receive(key)

    def receive(self, key: str) -> Any:
        """Wait for a value; raises if a worker fails meanwhile."""
        self.wait([key])
        return _decode(self.store.get(key))

    def receive_unless(self, key: str, is_over: Callable[[], bool]) -> Any:
        """Wait for a value, or return None once ``is_over``."""
        while not self.store.check([key]):
            if is_over():
                return None
            self._poll()
        return self.receive(key)

    def barrier(self, name: str) -> None:
        """Wait until all workers have arrived."""
        self.arrive(name)
        self.wait([f"{name}-{rank}" for rank in range(self.launch.size)])

    def arrive(self, name: str) -> None:
        """Record that this worker has arrived."""
        self._set(f"{name}-{self.launch.rank}", 1)

    def wait(self, keys: list[str]) -> None:
        """Wait until all keys are set."""
        while not self.store.check(keys):
            self._poll()

    def wait_for(self, name: str, ranks: Sequence[int], *, within_s: float) -> None:
        """Wait until these ranks have arrived, or the time is over."""
        deadline = time.monotonic() + within_s
        keys = [f"{name}-{rank}" for rank in ranks]
        while keys and not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _poll(self) -> None:
        if self.store.check(["failure"]):
            raise PeerFailedError("another worker failed")
        time.sleep(_POLL_S)

    def explain(self, error: Exception) -> dict[str, Any]:
        """The failure that ended this worker, as event data; all workers agree on the first."""
        own = describe_failure(error, self.launch.rank)
        try:
            if not isinstance(error, PeerFailedError) and not is_connection_error(error):
                return _decode(self.store.compare_set("failure", "", json.dumps(own)))
            self.arrive("broken")
            return self._find_cause() or own
        except Exception:  # noqa: BLE001 (without a store there is no more to learn)
            return own

    def watch_for_failure(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Exit, after ``report``, if another worker failed and this one hangs in a collective.

        Not every kind of collective ends with the connection.
        """
        connected = self._connected.clone()  # one connection per thread
        store = PrefixStore(self._name, connected)

        def poll_failure() -> None:
            with suppress(Exception), closing(connected):
                while not store.check(["failure"]):
                    if self._is_leaving.wait(_FAILURE_POLL_S):
                        return
                if not self._is_leaving.wait(_LEAVE_S) and self._report_lock.acquire(
                    blocking=False
                ):
                    report(_decode(store.get("failure")))
                    os._exit(1)

        threading.Thread(target=poll_failure, name="failure", daemon=True).start()

    def leave(self) -> None:
        """Exit by itself: this worker reports its own failure."""
        self._is_leaving.set()
        self._report_lock.acquire()  # blocks forever if the failure is already being reported

    def _find_cause(self) -> dict[str, Any] | None:
        deadline = time.monotonic() + _CAUSE_S
        others = set(range(self.launch.size)) - {self.launch.rank}
        silent = others
        while time.monotonic() < deadline:
            if self.store.check(["failure"]):
                return _decode(self.store.get("failure"))
            silent = {rank for rank in others if not self.store.check([f"broken-{rank}"])}
            if not silent:
                return None
            time.sleep(_POLL_S)
        rank = min(silent)
        return {
            "code": TrainingError.code,
            "message": f"Worker {rank} on {self.hosts[rank]} ended without an error message.",
            "hint": f"logs/worker-{rank}.log may show the cause; it may have been killed for lack of memory.",
            "rank": rank,
            "worker": str(rank),
            "host": self.hosts[rank],
            "pid": self.pids[rank],
        }

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))


def describe_failure(error: Exception, rank: int) -> dict[str, Any]:
    """An error of this worker, as event data."""
    shown = as_user_error(error)
    return {
        "code": shown.code,
        "message": shown.message,
        "hint": shown.hint,
        "traceback": "".join(traceback.format_exception(error))[-100_000:],
        "rank": rank,
        "worker": str(rank),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def join_rendezvous(launch: LaunchInfo, *, run_index: int) -> Rendezvous:
    """Join the rendezvous; ``run_index`` counts the runs that this launch trains one after another."""
    # The name keeps apart launches that use the same port by mistake.
    name = f"yunlu-{launch.id}-{launch.restarts}-{run_index}"
    secret = derive_secret(read_group_secret(read_settings().home), "launch", name)
    joined = Rendezvous(launch, name, secret, lambda: _open(launch, name, secret, run_index))
    joined.exchange_info()
    return joined


def _open(launch: LaunchInfo, name: str, secret: bytes, run_index: int) -> GroupStore:
    timeout = timedelta(seconds=_RENDEZVOUS_S)
    try:
        if launch_variables().get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address = _exchange_address(launch, name, secret, timeout)
        else:
            address = (launch.host, launch.port + run_index)
            if launch.rank == 0:
                _host_store(launch, secret, port=address[1])
        return GroupStore(address, secret, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(
            f"The {launch.size} workers did not meet at {launch.host}:{launch.port}: {reason}",
            hint="Check that all of them were started, and that the port is free and reachable. "
            "MASTER_ADDR and MASTER_PORT set another address. If their machines do not share "
            "YUNLU_HOME, set YUNLU_SECRET to the same value on each.",
        ) from error


def _exchange_address(
    launch: LaunchInfo, name: str, secret: bytes, timeout: timedelta
) -> tuple[str, int]:
    """Address of rank 0's store, told through torchrun's."""
    stores: Any = next(iter(rendezvous("env://", timeout=timeout)))
    store: Store = stores[0]
    if launch.rank == 0:
        server = _host_store(launch, secret, port=0)
        store.set(name, f"{server.port} {server.host}")
    port, _, host = bytes(store.get(name)).decode().partition(" ")
    return host, int(port)


def _host_store(launch: LaunchInfo, secret: bytes, *, port: int) -> StoreServer:
    host = _address_towards(launch.host, launch.port) or "127.0.0.1"
    outside = routed_address()
    # A host's own name is often a loopback address to itself, and to no other host.
    is_named = host.startswith("127.") and launch.host not in {host, "localhost"}
    others = [outside] if is_named and outside != host else []
    return StoreServer(
        others[0] if others else host, secret, port=port, other_hosts=others and [host]
    )


def _address_towards(host: str, port: int) -> str | None:
    """Local address on the route to rank 0, on which peers reach this worker."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    return None


def _decode(data: bytes) -> Any:
    """A value of the store; a failure may quote a file name that is no text."""
    return decode_json(data, replace_lone=True)
