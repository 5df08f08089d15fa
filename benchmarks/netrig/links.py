"""The words of ``ip`` and ``tc`` that make, limit, count and remove hosts. Names in, nothing kept."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

Direction = Literal["up", "down", "both"]
"""Seen from the host: what it sends, what it receives."""

_MAX_NAME = 15
"""Of a network interface, in Linux."""
_RATE = re.compile(r"none|[1-9][0-9]*(\.[0-9]+)?[kmg]?bit")
_WORDS_S = 30.0


class RigError(Exception):
    """The hosts cannot be made, or not what was asked of them."""


def bridge_name(prefix: str) -> str:
    """Of the switch between the hosts."""
    return f"{prefix}br"


def host_name(prefix: str, host: int) -> str:
    """Of a network namespace."""
    return f"{prefix}h{host}"


def cable_name(prefix: str, host: int) -> str:
    """Of the switch's end of a host's cable; the host's own end is ``eth0``."""
    return f"{prefix}c{host}"


def address_of(host: int) -> str:
    """The same in every rig: their bridges do not know each other."""
    return f"10.97.0.{host + 1}"


def make_bridge(prefix: str) -> None:
    """The switch."""
    if (
        not re.fullmatch(r"[a-z][a-z0-9]*[a-z0-9]", prefix)
        or len(cable_name(prefix, 99)) > _MAX_NAME
    ):
        raise RigError(
            f"{prefix!r} cannot name a rig: small letters and digits, at most {_MAX_NAME - 3} of them"
        )
    ip("link", "add", bridge_name(prefix), "type", "bridge")
    ip("link", "set", bridge_name(prefix), "up")


def make_host(
    prefix: str, host: int, *, delay_ms: float = 0.0, tap: Path | None = None
) -> subprocess.Popen[str] | None:
    """A namespace whose cable is in the switch; with a delay or a tap, also the process that is the cable."""
    name, cable = host_name(prefix, host), cable_name(prefix, host)
    ip("netns", "add", name)
    carrier = None
    if tap is not None:
        carrier = _lay_cable(prefix, host, "tap.py", str(tap))
    elif delay_ms:
        carrier = _lay_cable(prefix, host, "delay.py", str(delay_ms))
    if carrier is None:
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", cable, "master", bridge_name(prefix), "up")
    ip("-n", name, "addr", "add", f"{address_of(host)}/24", "dev", "eth0")
    # Packets are put together to at most this: 64 KB at 20 Mbit/s would block a link for 26 ms.
    with suppress(RigError):  # older systems have no such word, and their links are less smooth
        ip("-n", name, "link", "set", "dev", "eth0", "gso_max_size", "16384")
    ip("-n", name, "link", "set", "dev", "eth0", "addrgenmode", "none")  # no chatter of IPv6
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    return carrier


def _lay_cable(prefix: str, host: int, program: str, option: str) -> subprocess.Popen[str]:
    inner, cable = f"{prefix}d{host}", cable_name(prefix, host)
    script = str(Path(__file__).with_name(program))
    carrier = subprocess.Popen(  # noqa: S603 (our own script)
        [sys.executable, script, inner, cable, option],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert carrier.stdout is not None
    assert carrier.stderr is not None
    said = carrier.stdout.readline()
    carrier.stdout.close()
    if said != "ready\n":
        words = carrier.stderr.read().strip().splitlines()
        carrier.stderr.close()
        carrier.wait()
        raise RigError(
            f"no cable that a program carries can be made: {words[-1] if words else said}"
        )
    carrier.stderr.close()
    for end in (inner, cable):  # frames are carried one by one, in Python: the fewer the better
        ip("link", "set", end, "mtu", "9000")
    ip("link", "set", inner, "netns", host_name(prefix, host), "name", "eth0")
    return carrier


def limit(prefix: str, host: int, rate: str, direction: Direction) -> None:
    """Limit what a host sends at its end of the cable, what it receives at the other."""
    if not _RATE.fullmatch(rate):
        raise RigError(f"{rate!r} is no rate: say 100mbit, 1gbit, 512kbit or none")
    if direction in {"up", "both"}:
        _limit(["tc", "-n", host_name(prefix, host)], "eth0", rate)
    if direction in {"down", "both"}:
        _limit(["tc"], cable_name(prefix, host), rate)


def set_cable(prefix: str, host: int, state: Literal["up", "down"]) -> None:
    """Pulled, nothing is refused and nothing arrives."""
    ip("link", "set", cable_name(prefix, host), state)


def count(prefix: str, host: int) -> tuple[int, int]:
    """Bytes that a host sent and received, Ethernet and retransmissions included."""
    place = Path("/sys/class/net") / cable_name(prefix, host) / "statistics"
    try:
        return int((place / "rx_bytes").read_text()), int((place / "tx_bytes").read_text())
    except OSError as error:
        raise RigError(f"host {host} of rig {prefix!r} is gone") from error


def list_limits(prefix: str, host: int) -> dict[str, str]:
    """The rate up and down, as ``tc`` tells them."""
    inside = _ask(["tc", "-n", host_name(prefix, host), "class", "show", "dev", "eth0"])
    outside = _ask(["tc", "class", "show", "dev", cable_name(prefix, host)])
    found = {"up": inside, "down": outside}
    return {
        way: match[1] if (match := re.search(r" rate (\S+)", text)) else "none"
        for way, text in found.items()
    }


def list_hosts(prefix: str) -> list[int]:
    """The hosts of a rig that exist, whoever made them."""
    names = _ask(["ip", "netns", "list"]).splitlines()
    found = (re.match(rf"{re.escape(prefix)}h(\d+)\b", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def list_rigs() -> list[str]:
    """Prefixes of switches with hosts."""
    links = _ask(["ip", "-o", "link", "show", "type", "bridge"])
    prefixes = re.findall(r"^\d+: (\w+)br:", links, re.MULTILINE)
    return sorted(prefix for prefix in prefixes if list_hosts(prefix))


def list_processes(prefix: str, host: int) -> list[int]:
    """Whatever runs on a host, even where its parent is gone."""
    try:
        return [int(pid) for pid in _ask(["ip", "netns", "pids", host_name(prefix, host)]).split()]
    except RigError:
        return []


def remove_host(prefix: str, host: int) -> None:
    """What there is of it."""
    # The cable first: with its namespace it would go later, when the system finds the time.
    for words in (
        ("link", "del", cable_name(prefix, host)),
        ("netns", "del", host_name(prefix, host)),
    ):
        with suppress(RigError):
            ip(*words)


def remove_bridge(prefix: str) -> None:
    """What there is of it."""
    with suppress(RigError):
        ip("link", "del", bridge_name(prefix))


def ip(*words: str) -> None:
    """Run ``ip``."""
    _ask(["ip", *words])


def _limit(tc: list[str], device: str, rate: str) -> None:
    if rate == "none":
        with suppress(RigError):  # there is none
            _ask([*tc, "qdisc", "del", "dev", device, "root"])
        return
    burst = "128k" if rate.endswith("gbit") else "16k"
    with suppress(RigError):  # it is there already, and keeps what waits in it
        _ask([*tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1"])
    words = f"class replace dev {device} parent 1: classid 1:1 htb rate {rate} ceil {rate} burst {burst}"
    _ask([*tc, *f"{words} cburst {burst} quantum 15140".split()])
    words = f"qdisc replace dev {device} parent 1:1 handle 10:"
    try:
        fair = "fq_codel limit 10240 target 50ms interval 500ms noecn"
        _ask([*tc, *f"{words} {fair}".split()])
    except RigError:  # not in this kernel
        _ask([*tc, *f"{words} pfifo limit 1000".split()])


def _ask(command: list[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 (fixed words)
            command, check=True, capture_output=True, text=True, timeout=_WORDS_S
        )
    except FileNotFoundError as error:
        raise RigError(f"{command[0]} is not installed (Debian: iproute2)") from error
    except subprocess.CalledProcessError as error:
        raise RigError(f"{' '.join(command)}: {error.stderr.strip() or error}") from error
    except subprocess.TimeoutExpired as error:
        raise RigError(f"{' '.join(command)}: no answer") from error
    return done.stdout
