"""Autoscaler: request nodes from a cluster when they pay off, release idle ones, track pending ones."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from yunlu.executors.executor import NodeScaling, name_kind
from yunlu.scheduler.autoscaling import (
    BOOT_S,
    Limits,
    NodeLease,
    NodeOffer,
    ScalingMemory,
    ScalingRules,
    TeamLimit,
    decide_nodes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.executors.executor import Executor, Reserve
    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.policy.values import PoolState
    from yunlu.scheduler.pool_store import PoolSettings
    from yunlu.scheduler.spot import Mode

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


_ALWAYS = "always "
"""Prefix of offers of permanent nodes: no extra cost, never requested."""

_UNPRICED = 1.0
"""Price assumed for nodes of unknown price."""


class Scaler:
    """Tracks nodes that come and go; its state can be rebuilt."""

    def __init__(
        self,
        executor: Executor,
        rules: ScalingRules | None = None,
        limits: Limits | None = None,
        prices: Mapping[str, float] | None = None,
    ) -> None:
        self._executor = executor if isinstance(executor, NodeScaling) else None
        self._prices = prices or {}
        """Dollars an hour by kind, also of machines that are not there."""
        self._rules, self._limits = rules or ScalingRules(), limits or Limits()
        self._notes = ScalingMemory()
        self._since: dict[str, float] = {}
        self._idle_since: dict[str, float] = {}
        self._asked: dict[str, int] = {}
        self._under_way = PendingNodes()
        self.pending_nodes: tuple[PendingNode, ...] = ()
        """Pending nodes as of the last observation."""

    def reserves(self) -> tuple[Reserve, ...]:
        """Nodes that can be requested."""
        return () if self._executor is None else self._executor.reserves()

    def follow(
        self,
        state: PoolState,
        claims: Mapping[str, int],
        *,
        modes: Mapping[str, Mode] | None = None,
    ) -> dict[str, str]:
        """Request and release nodes; returns by kind what was changed and why.

        Args:
            state: As the allocator sees it.
            claims: Devices held on each machine.
            modes: By run: whether it may be on spot now, where it has a deadline.
        """
        self.pending_nodes = ()
        reserves = self.reserves()
        if self._executor is None or not reserves:
            return {}
        leases = self._find_leases(state, reserves, claims)
        offers = [*_standing(reserves, state.nodes), *self._offers(reserves, state.nodes)]
        result = decide_nodes(
            state,
            offers=offers,
            leases=leases,
            limits=self._limits,
            rules=self._rules,
            notes=self._notes,
            modes=modes,
        )
        self._notes = result.notes
        changed: dict[str, str] = {}
        for reserve in reserves:
            kind = reserve.kind
            wanted = result.wanted.get(kind, 0)
            if wanted != reserve.awake:
                self._executor.scale(kind, wanted)
                if wanted != self._asked.get(kind):  # requested again until they are there
                    reason = result.reasons.get(kind)
                    changed[kind] = reason.text if reason else f"{wanted} wanted"
            self._asked[kind] = wanted
        self._expect(reserves, state)
        return changed

    def _expect(self, reserves: Sequence[Reserve], state: PoolState) -> None:
        waking = {name for reserve in reserves for name in reserve.waking}
        kinds = _offers_by_node(reserves, state.nodes)
        there = Counter(kind for name, kind in kinds.items() if name not in waking)
        self.pending_nodes = self._under_way.update(reserves, self._asked, there, now=state.now)

    def _find_leases(
        self, state: PoolState, reserves: Sequence[Reserve], claims: Mapping[str, int]
    ) -> list[NodeLease]:
        offers = _offers_by_node(reserves, state.nodes)
        names = {node.name for node in state.nodes}
        self._since = {name: at for name, at in self._since.items() if name in names}
        leases: list[NodeLease] = []
        for node in state.nodes:
            self._since.setdefault(node.name, state.now)
            if claims.get(node.name):
                self._idle_since.pop(node.name, None)
            else:
                self._idle_since.setdefault(node.name, state.now)
            leases.append(
                NodeLease(
                    name=node.name,
                    offer=offers.get(node.name, _ALWAYS + _kind(node)),
                    since=self._since[node.name],
                    idle_since=self._idle_since.get(node.name),
                    is_leaving=node.is_leaving,
                )
            )
        # Pending nodes count as held, or they would be requested again.
        for reserve in reserves:
            kind = reserve.kind
            there = sum(offer == kind for offer in offers.values())
            leases += [
                NodeLease(name=f"{kind} to come {number}", offer=kind, since=state.now)
                for number in range(reserve.awake - there)
            ]
        return leases

    def _offers(self, reserves: Sequence[Reserve], nodes: Sequence[Node]) -> list[NodeOffer]:
        prices = {_kind(node): node.dollars_per_hour for node in nodes} | dict(self._prices)
        return [
            NodeOffer(
                key=reserve.kind,
                devices=reserve.devices,
                type=reserve.type,
                dollars_per_hour=prices.get(reserve.kind) or _UNPRICED,
                is_spot=reserve.is_spot,
                most=reserve.most,
                boot_s=self._under_way.boot_s(reserve.kind),
            )
            for reserve in reserves
            if reserve.devices
        ]


def make_scaler(executor: Executor, settings: PoolSettings) -> Scaler:
    """The autoscaler of a pool, within the limits of its settings."""
    usual = ScalingRules()
    rules = ScalingRules(
        grow_after_s=settings.grow_after_s,
        idle_s=settings.idle_s,
        least_life_s=min(usual.least_life_s, 2 * settings.idle_s),
    )
    # Nodes are rented for a team up to its limits on devices and dollars, if it has any.
    most = {t: q + settings.borrow[t] for t, q in settings.quotas.items() if t in settings.borrow}
    dollars = settings.team_dollars_per_hour
    teams = {
        team: TeamLimit(devices=most.get(team), dollars_per_hour=dollars.get(team))
        for team in {*most, *dollars}
    }
    limits = Limits(
        nodes=settings.max_nodes, dollars_per_hour=settings.max_dollars_per_hour, teams=teams
    )
    return Scaler(executor, rules, limits, settings.prices)


def _kind(node: Node) -> str:
    return name_kind(node.type, is_spot=node.is_spot)


def _offers_by_node(reserves: Sequence[Reserve], nodes: Sequence[Node]) -> dict[str, str]:
    """Reserve of each node; permanent nodes have none."""
    named = {name: reserve.kind for reserve in reserves for name in reserve.nodes}
    unnamed = {reserve.kind for reserve in reserves if reserve.awake and not reserve.nodes}
    result = {node.name: named.get(node.name, "") for node in nodes}
    result |= {n.name: _kind(n) for n in nodes if not result[n.name] and _kind(n) in unnamed}
    return {name: offer for name, offer in result.items() if offer}


def _standing(reserves: Sequence[Reserve], nodes: Sequence[Node]) -> list[NodeOffer]:
    reserved = _offers_by_node(reserves, nodes)
    result: dict[str, NodeOffer] = {}
    for node in nodes:
        if node.name in reserved or node.is_leaving or not node.devices:
            continue
        before = result.get(_kind(node))
        result[_kind(node)] = NodeOffer(
            key=_ALWAYS + _kind(node),
            devices=max(node.devices, before.devices if before else 0),
            type=node.type,
            dollars_per_hour=node.dollars_per_hour or _UNPRICED,
            is_spot=node.is_spot,
            most=(before.most if before else 0) + 1,
            boot_s=0.0,
        )
    return list(result.values())
