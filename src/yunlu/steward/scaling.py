"""Asks a cluster for machines when they are worth it, and gives them back when they are idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.pool.autoscaling.decision import decide_nodes
from yunlu.pool.autoscaling.values import Lease, Limits, Notes, Offer, Rules, TeamLimit
from yunlu.pool.executors.executor import Scaling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.pool.allocation.values import Node, PoolState
    from yunlu.pool.executors.executor import Executor, Reserve
    from yunlu.steward.journal import PoolSettings

_ALWAYS = "always "
"""Offers of machines that are there anyway begin so: they cost nothing more, and are never asked for."""

_UNPRICED = 1.0
"""Machines whose price nobody tells are taken to be equally dear."""


class Scaler:
    """Keeps count of machines that come and go; what it forgets, it finds out again."""

    def __init__(
        self, executor: Executor, rules: Rules | None = None, limits: Limits | None = None
    ) -> None:
        self._executor = executor if isinstance(executor, Scaling) else None
        self._rules, self._limits = rules or Rules(), limits or Limits()
        self._notes = Notes()
        self._since: dict[str, float] = {}
        self._idle_since: dict[str, float] = {}

    def follow(self, state: PoolState, claims: Mapping[str, int]) -> dict[str, str]:
        """Have as many machines of each kind as are worth it; in words, what was changed and why.

        Args:
            state: As the allocator sees it.
            claims: Devices held on each machine.
        """
        if self._executor is None:
            return {}
        reserves = self._executor.reserves()
        if not reserves:
            return {}
        leases = self._find_leases(state, reserves, claims)
        offers = [*_standing(reserves, state.nodes), *_offers(reserves, state.nodes)]
        told = decide_nodes(
            state,
            offers=offers,
            leases=leases,
            limits=self._limits,
            rules=self._rules,
            notes=self._notes,
        )
        self._notes = told.notes
        changed: dict[str, str] = {}
        for reserve in reserves:
            wanted = told.wanted.get(reserve.type, 0)
            if wanted != reserve.awake:
                self._executor.scale(reserve.type, wanted)
                reason = told.reasons.get(reserve.type)
                changed[reserve.type] = reason.text if reason else f"{wanted} wanted"
        return changed

    def _find_leases(
        self, state: PoolState, reserves: Sequence[Reserve], claims: Mapping[str, int]
    ) -> list[Lease]:
        offers = _offers_by_node(reserves, state.nodes)
        names = {node.name for node in state.nodes}
        self._since = {name: at for name, at in self._since.items() if name in names}
        leases: list[Lease] = []
        for node in state.nodes:
            self._since.setdefault(node.name, state.now)
            if claims.get(node.name):
                self._idle_since.pop(node.name, None)
            else:
                self._idle_since.setdefault(node.name, state.now)
            leases.append(
                Lease(
                    name=node.name,
                    offer=offers.get(node.name, _ALWAYS + node.type),
                    since=self._since[node.name],
                    idle_since=self._idle_since.get(node.name),
                    is_leaving=node.is_leaving,
                )
            )
        # Those that are on their way count as held, or they would be asked for again.
        for reserve in reserves:
            there = sum(offer == reserve.type for offer in offers.values())
            leases += [
                Lease(name=f"{reserve.type} to come {number}", offer=reserve.type, since=state.now)
                for number in range(reserve.awake - there)
            ]
        return leases


def make_scaler(executor: Executor, settings: PoolSettings) -> Scaler:
    """The scaler of a pool, within the limits of its settings."""
    usual = Rules()
    rules = Rules(
        grow_after_s=settings.grow_after_s,
        idle_s=settings.idle_s,
        least_life_s=min(usual.least_life_s, 2 * settings.idle_s),
    )
    # Machines are bought for a team up to what it may hold, where that is bounded.
    teams = {
        team: TeamLimit(devices=quota + settings.borrow[team])
        for team, quota in settings.quotas.items()
        if team in settings.borrow
    }
    limits = Limits(
        nodes=settings.max_nodes, dollars_per_hour=settings.max_dollars_per_hour, teams=teams
    )
    return Scaler(executor, rules, limits)


def _offers_by_node(reserves: Sequence[Reserve], nodes: Sequence[Node]) -> dict[str, str]:
    """Of which reserve each machine is; those that are always there are of none."""
    named = {name: reserve.type for reserve in reserves for name in reserve.nodes}
    unnamed = {reserve.type for reserve in reserves if reserve.awake and not reserve.nodes}
    found = {node.name: named.get(node.name, "") for node in nodes}
    found |= {n.name: n.type for n in nodes if not found[n.name] and n.type in unnamed}
    return {name: offer for name, offer in found.items() if offer}


def _offers(reserves: Sequence[Reserve], nodes: Sequence[Node]) -> list[Offer]:
    prices = {node.type: node.dollars_per_hour for node in nodes}
    return [
        Offer(
            key=reserve.type,
            devices=reserve.devices,
            type=reserve.type,
            dollars_per_hour=prices.get(reserve.type) or _UNPRICED,
            most=reserve.most,
        )
        for reserve in reserves
    ]


def _standing(reserves: Sequence[Reserve], nodes: Sequence[Node]) -> list[Offer]:
    reserved = _offers_by_node(reserves, nodes)
    found: dict[str, Offer] = {}
    for node in nodes:
        if node.name in reserved or node.is_leaving:
            continue
        before = found.get(node.type)
        found[node.type] = Offer(
            key=_ALWAYS + node.type,
            devices=max(node.devices, before.devices if before else 0),
            type=node.type,
            dollars_per_hour=node.dollars_per_hour or _UNPRICED,
            most=(before.most if before else 0) + 1,
            boot_s=0.0,
        )
    return list(found.values())
