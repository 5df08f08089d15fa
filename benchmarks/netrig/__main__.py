"""Rigs by hand: ``python -m benchmarks.netrig up 4 --rate 100mbit``; it stays until ``down``."""

from __future__ import annotations

import argparse
import sys

from benchmarks.netrig import links
from benchmarks.netrig.links import RigError
from benchmarks.netrig.rig import Rig


def main() -> int:
    """Do one thing, and say what there is now."""
    asked = _parse()
    try:
        return {"up": _up, "rate": _rate, "show": _show, "down": _down}[asked.verb](asked)
    except RigError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netrig", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="make hosts")
    up.add_argument("hosts", type=int)
    up.add_argument("--rate", default="none", help="100mbit, 1gbit, ...; both directions")
    up.add_argument("--delay-ms", type=float, default=0.0, help="one way, between any two hosts")
    rate = verbs.add_parser("rate", help="limit one host, or all")
    rate.add_argument("rate")
    rate.add_argument("--host", type=int)
    rate.add_argument("--direction", choices=("up", "down", "both"), default="both")
    show = verbs.add_parser("show", help="rates and bytes of each host")
    down = verbs.add_parser("down", help="end what runs on the hosts, and remove them")
    for verb in (up, rate, show, down):
        verb.add_argument("--prefix", default="yr", help="of the rig's names (yr)")
    return parser.parse_args()


def _up(asked: argparse.Namespace) -> int:
    rig = Rig(asked.hosts, rate=asked.rate, delay_ms=asked.delay_ms, prefix=asked.prefix)
    if links.list_hosts(asked.prefix):
        raise RigError(f"a rig {asked.prefix!r} is up already: take another --prefix, or down")
    try:
        rig.up()
    except BaseException:
        rig.down()
        raise
    return _show(asked)


def _rate(asked: argparse.Namespace) -> int:
    for host in _find(asked.prefix) if asked.host is None else [asked.host]:
        links.limit(asked.prefix, host, asked.rate, asked.direction)
    return _show(asked)


def _show(asked: argparse.Namespace) -> int:
    for host in _find(asked.prefix):
        limits = links.list_limits(asked.prefix, host)
        sent, received = links.count(asked.prefix, host)
        print(  # noqa: T201
            f"{links.host_name(asked.prefix, host)}  {links.address_of(host):<11}  "
            f"up {limits['up']:>9}  down {limits['down']:>9}  "
            f"sent {sent:>14,}  received {received:>14,}"
        )
    return 0


def _down(asked: argparse.Namespace) -> int:
    hosts = links.list_hosts(asked.prefix)
    if hosts:
        Rig(max(hosts) + 1, prefix=asked.prefix).down()
    links.remove_bridge(asked.prefix)
    return 0


def _find(prefix: str) -> list[int]:
    found = links.list_hosts(prefix)
    if not found:
        others = links.list_rigs()
        known = f"; there are {', '.join(others)}" if others else ""
        raise RigError(f"there is no rig {prefix!r}{known}")
    return found


if __name__ == "__main__":
    sys.exit(main())
