"""Hosts that live as long as a ``with`` block, and the processes on them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.netrig import links
from benchmarks.netrig.links import Direction, RigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType, TracebackType

_GONE_S = 10.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Counters:
    """What went through a host's cable."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes
        )


class Rig:
    """``hosts`` network namespaces on one switch; gone with all that runs in them when the block ends.

    It also ends with an error, and with SIGTERM, SIGINT or SIGHUP where it is made in the main thread.
    Nothing of this process moves: only what ``run`` starts is on a host.

    Args:
        hosts: How many.
        rate: Of every host in both directions; ``none`` for no limit.
        delay_ms: From any host to any other, one way; it costs a process per host.
        tap: Directory of somebody who reads and alters what the last host sends and receives; see ``tap``.
        pin: Whether processes of a host share one core, host by host in turn.
        prefix: Of all names; one of its own where none is given.
    """

    def __init__(
        self,
        hosts: int,
        *,
        rate: str = "none",
        delay_ms: float = 0.0,
        tap: Path | None = None,
        pin: bool = False,
        prefix: str | None = None,
    ) -> None:
        if not 1 <= hosts <= 99:
            raise RigError(f"{hosts} hosts cannot be made: from 1 to 99 can")
        self.hosts = range(hosts)
        self.prefix = prefix or f"yr{secrets.token_hex(3)}"
        self._rate, self._delay_ms, self._tap, self._pin = rate, delay_ms, tap, pin
        self._started: list[subprocess.Popen[Any]] = []
        self._carriers: list[subprocess.Popen[str]] = []
        """They end with their cables."""
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if links.list_hosts(self.prefix):
            raise RigError(f"a rig {self.prefix!r} is up already")
        self._heed_signals()
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def up(self) -> None:
        """Make them; for a rig that outlives this process, without a ``with``."""
        links.make_bridge(self.prefix)
        for host in self.hosts:
            tap = self._tap if host == self.hosts[-1] else None
            carrier = links.make_host(self.prefix, host, delay_ms=self._delay_ms, tap=tap)
            if carrier is not None:
                self._carriers.append(carrier)
        if self._rate != "none":
            self.rate(None, self._rate)

    def down(self) -> None:
        """End whatever runs on the hosts, and remove them; what is gone already is no error."""
        if self._is_main_thread():  # once begun, nothing ends it half-way
            signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            self._end_processes()
            for host in self.hosts:
                links.remove_host(self.prefix, host)
            links.remove_bridge(self.prefix)
            self._end_carriers()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()
            if self._is_main_thread():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    def rate(self, host: int | None, rate: str, direction: Direction = "both") -> None:
        """Limit a host, or each (``None``); also while bytes are on their way."""
        for each in self.hosts if host is None else [self._check(host)]:
            links.limit(self.prefix, each, rate, direction)

    def address(self, host: int) -> str:
        """Of a host, for the others."""
        return links.address_of(self._check(host))

    def cut(self, host: int) -> None:
        """Pull its cable: nothing is refused, nothing arrives."""
        links.set_cable(self.prefix, self._check(host), "down")

    def mend(self, host: int) -> None:
        """Put the cable back."""
        links.set_cable(self.prefix, self._check(host), "up")

    def on(self, host: int, command: Sequence[str | Path], *, busy: int = 0) -> list[str]:
        """The command, as it is run on a host, beside ``busy`` competitors for its core."""
        words = [str(word) for word in command]
        if busy:
            words = [sys.executable, str(Path(__file__).with_name("busy.py")), str(busy), *words]
        return ["ip", "netns", "exec", links.host_name(self.prefix, self._check(host)), *words]

    def run(
        self,
        host: int,
        command: Sequence[str | Path],
        *,
        busy: int = 0,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host, in a session of its own.

        Args:
            host: Where.
            command: What.
            busy: Processes that compete with it for its core and its share of it.
            environment: Besides this process's own.
            **options: Of ``Popen``.
        """
        given = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **(environment or {})}  # noqa: TID251 (a script, not the package)
        # In a session of their own, competitors share what the scheduler gives to the host.
        child = subprocess.Popen(  # noqa: S603 (what the caller asks for)
            self.on(host, command, busy=busy), env=given, start_new_session=True, **options
        )
        self._started.append(child)
        if self._pin or busy:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(child.pid, {self.core(host)})
        return child

    def core(self, host: int) -> int:
        """On which the processes of a host run, where hosts are pinned."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[self._check(host) % len(cores)]

    def count(self, host: int) -> Counters:
        """Bytes through its cable since it was made."""
        return Counters(*links.count(self.prefix, self._check(host)))

    def count_all(self) -> list[Counters]:
        """Of each host."""
        return [self.count(host) for host in self.hosts]

    def _check(self, host: int) -> int:
        if host not in self.hosts:
            raise RigError(f"there is no host {host}: there are {len(self.hosts)}, from 0")
        return host

    def _end_processes(self) -> None:
        until = time.monotonic() + _GONE_S
        for child in self._started:
            child.kill()  # one that was started just now may not be on its host yet
        while time.monotonic() < until:
            # Nobody but what was started on a host is in its namespace.
            left = [pid for host in self.hosts for pid in links.list_processes(self.prefix, host)]
            if not left:
                break
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for child in self._started:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(0.1, until - time.monotonic()))
        self._started.clear()

    def _end_carriers(self) -> None:
        for carrier in self._carriers:
            try:
                carrier.wait(timeout=_GONE_S)
            except subprocess.TimeoutExpired:
                carrier.kill()
                carrier.wait()
        self._carriers.clear()

    def _heed_signals(self) -> None:
        if not self._is_main_thread():
            return
        for number in _ENDING:
            if (
                signal.getsignal(number) is signal.SIG_DFL
            ):  # Python turns SIGINT into an error itself
                self._handlers[number] = signal.signal(number, _leave)

    @staticmethod
    def _is_main_thread() -> bool:
        return threading.current_thread() is threading.main_thread()


def why_no_rig() -> str | None:
    """None where hosts can be made; where not, why."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    prefix = f"yt{secrets.token_hex(3)}"
    try:
        with Rig(1, rate="1gbit", prefix=prefix):
            return None
    except RigError as error:
        right = "" if os.geteuid() == 0 else "; this needs root"
        return f"no hosts can be made here: {error}{right}"


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
