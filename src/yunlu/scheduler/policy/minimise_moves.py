"""The same decision on other machines of the same kind, so that few runs have to move. Pure.

A policy says who gets how much on which machine, but machines that are alike may change their roles:
that costs nothing, and a run that keeps the machine that it is led from is resized without a stop.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from yunlu.hardware.fleet import Placement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.policy.values import Demand

_LEAD = 1000
"""To stay where it is led from is worth more to a run than any number of other devices."""


def minimise_moves(
    placements: Mapping[str, Placement], jobs: Sequence[Demand], nodes: Sequence[Node]
) -> dict[str, Placement]:
    """Exchange machines that are alike, so that as much as can be stays where it is.

    Args:
        placements: What was decided.
        jobs: What they hold; the first machine of each is the one that it is led from.
        nodes: All machines.
    """
    fixed = {name for job in jobs if job.is_pinned for name, _ in job.held.shares}
    roles: dict[str, str] = {}
    for alike in _group(nodes, fixed):
        roles |= _match(alike, _weigh(placements, jobs, {*alike}))
    return {
        job: Placement(tuple((roles.get(name, name), count) for name, count in placed.shares))
        for job, placed in placements.items()
    }


def _group(nodes: Sequence[Node], fixed: set[str]) -> Iterator[list[str]]:
    """Names of machines that nothing but their names tells apart."""
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for node in nodes:
        if node.name not in fixed:
            kind = (node.type, node.devices, node.domain, node.dollars_per_hour)
            groups[*kind, node.is_spot, node.is_leaving].append(node.name)
    yield from (names for names in groups.values() if len(names) > 1)


def _weigh(
    placements: Mapping[str, Placement], jobs: Sequence[Demand], alike: set[str]
) -> dict[tuple[str, str], int]:
    """By role and machine: what would stay, were the machine to play it."""
    worth: defaultdict[tuple[str, str], int] = defaultdict(int)
    for job in jobs:
        placed = placements.get(job.id)
        if placed is None:
            continue
        for index, (name, has) in enumerate(job.held.shares):
            if name not in alike:
                continue
            for role, gets in placed.shares:
                if role in alike:
                    worth[role, name] += min(has, gets) + _LEAD * (index == 0 and gets >= has)
    return worth


def _match(alike: Sequence[str], worth: Mapping[tuple[str, str], int]) -> dict[str, str]:
    """A machine for each role: the best pairs first; who is in none keeps its own, if it can."""
    roles: dict[str, str] = {}
    taken: set[str] = set()
    pairs = sorted(worth.items(), key=lambda one: (-one[1], one[0][0] != one[0][1], one[0]))
    own = [((name, name), 0) for name in alike]
    for (role, name), _ in (*pairs, *own):
        if role not in roles and name not in taken:
            roles[role] = name
            taken.add(name)
    left = [name for name in alike if name not in taken]
    roles |= dict(zip((role for role in alike if role not in roles), left, strict=True))
    # The best pairs are not always the best whole: never worse than as it was decided.
    gained = sum(worth.get(pair, 0) for pair in roles.items())
    return roles if gained > sum(worth.get((name, name), 0) for name in alike) else {}
