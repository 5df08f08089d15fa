"""Pending nodes: requested from a cluster and not there yet."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from yunlu.scheduler.autoscaling.values import BOOT_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.executors.executor import Reserve

_RECENT = 8
_LATE = 0.25
"""A node that is late is expected to take this share of the time that it has taken so far."""
_GIVEN_UP = 10.0
"""After this multiple of the usual boot time a node is no longer expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingNode:
    """A node that was requested and is not there yet."""

    kind: str
    """``Reserve.kind``."""
    type: str
    devices: int
    at: float
    """Expected arrival, on the pool's clock."""
    node: str = ""
    """Its name, if it is listed already: runs placed there wait for it."""


class PendingNodes:
    """Tracks when nodes were requested, and how long earlier ones took."""

    def __init__(self) -> None:
        self._since: dict[str, list[float]] = {}
        """By kind, oldest first."""
        self._there: dict[str, int] = {}
        self._boots_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))

    def boot_s(self, kind: str) -> float:
        """Boot time of a node of this kind: measured, else a default."""
        known = self._boots_s.get(kind)
        return median(known) if known else BOOT_S

    def update(
        self,
        reserves: Sequence[Reserve],
        requested: Mapping[str, int],
        there: Mapping[str, int],
        *,
        now: float,
    ) -> tuple[PendingNode, ...]:
        """Update with the nodes that are there now; returns those still pending.

        Args:
            reserves: What can be had, and what of it is.
            requested: Nodes requested in all, by kind.
            there: By kind, how many of them can be used now.
            now: On the pool's clock.
        """
        matches: list[PendingNode] = []
        for reserve in reserves:
            kind, ready = reserve.kind, there.get(reserve.kind, 0)
            wanted = min(max(requested.get(kind, 0), reserve.awake), reserve.most)
            since = self._count(kind, ready, max(wanted - ready, 0), now)
            names = [*reserve.waking, *[""] * len(since)]
            matches += [
                PendingNode(kind=kind, type=reserve.type, devices=reserve.devices, at=at, node=name)
                for began, name in zip(since, names, strict=False)
                if (at := self._expect(kind, began, now)) is not None
            ]
        return tuple(matches)

    def _count(self, kind: str, ready: int, coming: int, now: float) -> list[float]:
        """Request times of the pending nodes; arrived ones give a measured boot time."""
        since = self._since.setdefault(kind, [])
        came = max(ready - self._there.get(kind, ready), 0)
        for began in since[:came]:
            self._boots_s[kind].append(now - began)
        del since[:came]
        del since[coming:]  # no longer wanted: the most recent requests
        since += [now] * (coming - len(since))
        self._there[kind] = ready
        return since

    def _expect(self, kind: str, began: float, now: float) -> float | None:
        boot_s, waited_s = self.boot_s(kind), now - began
        if waited_s > _GIVEN_UP * boot_s:
            return None
        return now + max(boot_s - waited_s, _LATE * waited_s)
