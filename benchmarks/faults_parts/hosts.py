"""Machines on this machine: network namespaces on one bridge, whose cables can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def can_make_hosts() -> bool:
    """Needs root and ``ip``."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    hosts = Hosts(count=1, prefix=f"yt{os.getpid() % 100_000}")
    try:
        hosts.up()
    except subprocess.CalledProcessError:
        return False
    finally:
        hosts.down()
    return True


@dataclass(slots=True)
class Hosts:
    """Namespaces with one address each."""

    count: int
    prefix: str = field(default_factory=lambda: f"yb{os.getpid() % 100_000}")

    def up(self) -> None:
        """Make them."""
        bridge = f"{self.prefix}br"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in range(self.count):
            name, cable = self._name(host), self._cable(host)
            _ip("netns", "add", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def down(self) -> None:
        """Remove what there is of them."""
        for host in range(self.count):
            # The cable first: with its namespace it would go later, when the system finds the time.
            for words in (("link", "del", self._cable(host)), ("netns", "del", self._name(host))):
                with suppress(subprocess.CalledProcessError):
                    _ip(*words)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"{self.prefix}br")

    def address(self, host: int) -> str:
        """Of a host, on the bridge."""
        return f"10.97.0.{host + 1}"

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, run on a host."""
        return ["ip", "netns", "exec", self._name(host), *command]

    def cut(self, host: int) -> None:
        """Pull its cable: nothing is refused, nothing arrives."""
        _ip("link", "set", self._cable(host), "down")

    def mend(self, host: int) -> None:
        """Put the cable back."""
        _ip("link", "set", self._cable(host), "up")

    def _name(self, host: int) -> str:
        return f"{self.prefix}h{host}"

    def _cable(self, host: int) -> str:
        return f"{self.prefix}c{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)  # noqa: S603, S607 (fixed words)
