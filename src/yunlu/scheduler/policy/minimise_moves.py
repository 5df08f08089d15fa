"""Relabel equal nodes of a decision so that few runs have to move. Pure.

A policy decides how many devices of which node each job gets, but equal nodes are interchangeable:
exchanging them costs nothing, and a run that keeps the node of its coordinator is resized without a stop.
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
"""Weight of keeping the coordinator's node: more than any number of other devices."""


def minimise_moves(
    placements: Mapping[str, Placement], jobs: Sequence[Demand], nodes: Sequence[Node]
) -> dict[str, Placement]:
    """Exchange equal nodes so that as many devices as possible stay with their jobs.

    Args:
        placements: The decision.
        jobs: What they hold; the first node of each is that of its coordinator.
        nodes: All nodes.
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
    """Names of nodes that differ in nothing but their names."""
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for node in nodes:
        if node.name not in fixed:
            kind = (node.type, node.devices, node.domain, node.dollars_per_hour)
            groups[*kind, node.is_spot, node.is_leaving].append(node.name)
    yield from (names for names in groups.values() if len(names) > 1)


def _weigh(
    placements: Mapping[str, Placement], jobs: Sequence[Demand], alike: set[str]
) -> dict[tuple[str, str], int]:
    """By decided node and actual node: devices that would stay if one replaced the other."""
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
    """An actual node for each decided node: best pairs first; the others keep their own, if possible."""
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
    # The best pairs are not always the best matching: never worse than the decision itself.
    gained = sum(worth.get(pair, 0) for pair in roles.items())
    return roles if gained > sum(worth.get((name, name), 0) for name in alike) else {}
