"""Workers that a launcher started together: what they tell each other besides training.

All of it goes through torch's store, which torchrun may keep itself; else rank 0 does.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from yunlu.core.errors import TrainingError
from yunlu.core.settings import launch_variables, use_network_interface
from yunlu.training.attempt import as_user_error
from yunlu.training.elastic.sockets import interface_of
from yunlu.training.parallel.sockets import tells_of_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.core.launch import LaunchInfo

_MEET_S = 600.0
"""Importing torch from a network drive on many machines takes minutes."""
_LOOK_S = 0.05
_ALARM_S = 1.0
_CAUSE_S = 3.0
"""Who broke off tells the cause within moments; who was killed never will."""
_LEAVE_S = 3.0
"""Whoever has not come out of a collective by then, while another one failed, will not."""


class PeerFailedError(Exception):
    """Another worker failed, and said so."""


class Rendezvous:
    """All workers of a launch, from the view of one."""

    def __init__(self, place: LaunchInfo, store: Store) -> None:
        self.place, self.store = place, store
        self.hosts: list[str] = []
        """Of each rank."""
        self.pids: list[int] = []
        self._cpus: list[list[int]] = []
        self._is_leaving = threading.Event()
        self._last_word = threading.Lock()

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for all."""
        return self.place.rank == 0

    @property
    def address(self) -> str | None:
        """Where others reach this worker, as far as that can be told."""
        return _address_towards(self.place.host, self.place.port)

    @property
    def nodes(self) -> int:
        """Machines that the workers are on."""
        return len(set(self.hosts))

    @property
    def first_here(self) -> int:
        """The first rank on this machine."""
        return self.hosts.index(self.hosts[self.place.rank])

    @property
    def workers_here(self) -> int:
        """On this machine."""
        return self.hosts.count(self.hosts[self.place.rank])

    def count_cores(self, ours: int) -> int:
        """Of all machines; a launcher may bind each worker to ``ours`` of its own, or none of them."""
        cpus = {(h, c) for h, each in zip(self.hosts, self._cpus, strict=True) for c in each}
        return max(1, round(ours * len(cpus) / len(self._cpus[self.place.rank])))

    def introduce(self) -> None:
        """Learn who the others are."""
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        who = {"host": socket.gethostname(), "pid": os.getpid(), "cpus": cpus}
        self._set(f"who-{self.place.rank}", who)
        everyone = [self.hear(f"who-{rank}") for rank in range(self.place.size)]
        self.hosts = [each["host"] for each in everyone]
        self.pids = [each["pid"] for each in everyone]
        self._cpus = [each["cpus"] for each in everyone]

    def share(self, key: str, value: Any = None) -> Any:
        """The leader's value, which is JSON."""
        if self.leads:
            self._set(key, value)
            return value
        return self.hear(key)

    def hear(self, key: str) -> Any:
        """What somebody tells, however long that takes; raises where one of us fails meanwhile."""
        self.wait([key])
        return json.loads(self.store.get(key))

    def hear_unless(self, key: str, is_over: Callable[[], bool]) -> Any:
        """The same, or nothing where something else comes first."""
        while not self.store.check([key]):
            if is_over():
                return None
            self._wait_a_moment()
        return self.hear(key)

    def meet(self, name: str) -> None:
        """Nobody goes on before all have come here."""
        self.come(name)
        self.wait([f"{name}-{rank}" for rank in range(self.place.size)])

    def come(self, name: str) -> None:
        """Say that we are here."""
        self._set(f"{name}-{self.place.rank}", 1)

    def wait(self, keys: list[str]) -> None:
        """Until all of these are told."""
        while not self.store.check(keys):
            self._wait_a_moment()

    def wait_for(self, name: str, ranks: Sequence[int], *, within_s: float) -> None:
        """Until these have come, or will not."""
        deadline = time.monotonic() + within_s
        keys = [f"{name}-{rank}" for rank in ranks]
        while keys and not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _wait_a_moment(self) -> None:
        if self.store.check(["failure"]):
            raise PeerFailedError("another worker failed")
        time.sleep(_LOOK_S)

    def explain(self, error: Exception) -> dict[str, Any]:
        """Whose failure it is that ended us, as the data of one event; all agree on the first."""
        own = describe_failure(error, self.place.rank)
        try:
            if not isinstance(error, PeerFailedError) and not tells_of_loss(error):
                return json.loads(self.store.compare_set("failure", "", json.dumps(own)))
            self.come("broken")
            return self._find_cause() or own
        except Exception:  # noqa: BLE001 (without a store nobody can tell us more)
            return own

    def watch_for_failure(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """End this process, after ``tell``, where another failed and we wait for it in vain.

        Not every kind of collective ends with the connection.
        """
        connected: Any = self.store
        store: Store = connected.clone()  # one connection serves one thread

        def look() -> None:
            with suppress(Exception):
                while not store.check(["failure"]):
                    if self._is_leaving.wait(_ALARM_S):
                        return
                if not self._is_leaving.wait(_LEAVE_S) and self._last_word.acquire(blocking=False):
                    tell(json.loads(store.get("failure")))
                    os._exit(1)

        threading.Thread(target=look, name="failure", daemon=True).start()

    def leave(self) -> None:
        """Come out by ourselves: what ends us is ours to tell."""
        self._is_leaving.set()
        self._last_word.acquire()  # never returns where it is being told already

    def _find_cause(self) -> dict[str, Any] | None:
        deadline = time.monotonic() + _CAUSE_S
        others = set(range(self.place.size)) - {self.place.rank}
        silent = others
        while time.monotonic() < deadline:
            if self.store.check(["failure"]):
                return json.loads(self.store.get("failure"))
            silent = {rank for rank in others if not self.store.check([f"broken-{rank}"])}
            if not silent:
                return None
            time.sleep(_LOOK_S)
        rank = min(silent)
        return {
            "code": TrainingError.code,
            "message": f"Worker {rank} on {self.hosts[rank]} vanished without a word.",
            "hint": f"logs/worker-{rank}.log may tell more; was it killed for want of memory?",
            "rank": rank,
            "worker": str(rank),
            "host": self.hosts[rank],
            "pid": self.pids[rank],
        }

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))


def describe_failure(error: Exception, rank: int) -> dict[str, Any]:
    """An error of our own, as the data of an event."""
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


def join_rendezvous(place: LaunchInfo, *, turn: int) -> Rendezvous:
    """Meet at the store; ``turn`` counts the runs that these processes train one after another."""
    # Named: whoever comes to another launch's port finds nobody there, rather than strangers.
    name = f"yunlu-{place.id}-{place.restarts}-{turn}"
    muster = Rendezvous(place, PrefixStore(name, _open(place, turn)))
    muster.introduce()
    if "GLOO_SOCKET_IFNAME" not in launch_variables():
        address = muster.address
        use_network_interface(None if address is None else interface_of(address))
    return muster


def _open(place: LaunchInfo, turn: int) -> Store:
    span = timedelta(seconds=_MEET_S)
    try:
        if place.by == "torchrun":
            found: Any = next(iter(rendezvous("env://", timeout=span)))
            return found[0]
        return TCPStore(
            place.host, place.port + turn, place.size, is_master=place.rank == 0, timeout=span
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        words = str(error).partition("\n")[0]
        raise TrainingError(
            f"The {place.size} workers did not meet at {place.host}:{place.port}: {words}",
            hint="Are all of them started, and is the port free and open? MASTER_ADDR and "
            "MASTER_PORT name another place.",
        ) from error


def _address_towards(host: str, port: int) -> str | None:
    """Where others reach us, if the way to rank 0 tells."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    return None
