"""Which devices are worth their price: job by job, the best next dollar first.

For each job the machines' model of its speed tells the useful progress of every size. What one more
dollar an hour brings falls as a job grows; it is bought while that is at least ``worth`` of what the
job's best dollar brings. Devices left over on machines that are bought anyway cost nothing.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.spot.values import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.scheduler.autoscaling.values import Limits, NodeOffer, ScalingRules
    from yunlu.scheduler.policy.values import Demand

_FREE_DOLLARS = 1e-6
"""Price assumed for free nodes, so that they are not rented without a gain."""
_MOST_SIZES = 24


@dataclass(frozen=True, slots=True)
class _Step:
    """One job grows to ``size`` on one offer."""

    offer: NodeOffer
    size: int
    nodes: int
    """Additional nodes needed."""
    gain: float
    """Additional useful samples per second."""
    value: float
    """Gain per dollar relative to the job's best; infinite where no further node is needed."""


@dataclass(slots=True)
class PurchasePlan:
    """Purchases chosen so far."""

    limits: Limits
    nodes: dict[str, int] = field(default_factory=dict[str, int])
    devices: dict[str, int] = field(default_factory=dict[str, int])
    """Devices in use, by offer."""
    dollars_per_hour: float = 0.0
    team_devices: dict[str, int] = field(default_factory=dict[str, int])
    team_dollars: dict[str, float] = field(default_factory=dict[str, float])
    sizes: dict[str, int] = field(default_factory=dict[str, int])

    def nodes_for(self, offer: NodeOffer, more: int) -> int:
        """Nodes to add for so many more devices."""
        needed = math.ceil((self.devices.get(offer.key, 0) + more) / offer.devices)
        return max(0, needed - self.nodes.get(offer.key, 0))

    def refuses(self, demand: Demand, offer: NodeOffer, more: int) -> str | None:
        """The limit that forbids a purchase, if any."""
        nodes = self.nodes_for(offer, more)
        if self.nodes.get(offer.key, 0) + nodes > offer.most:
            return "capacity"
        most_nodes = self.limits.nodes
        if nodes and most_nodes is not None and sum(self.nodes.values()) + nodes > most_nodes:
            return "nodes"
        price = nodes * offer.dollars_per_hour
        most = self.limits.dollars_per_hour
        if nodes and most is not None and self.dollars_per_hour + price > most + 1e-9:
            return "dollars"
        return self._team_refuses(demand.team, offer, more)

    def _team_refuses(self, team: str, offer: NodeOffer, more: int) -> str | None:
        limit = self.limits.teams.get(team)
        if limit is None:
            return None
        if limit.devices is not None and self.team_devices.get(team, 0) + more > limit.devices:
            return "team_devices"
        dollars = self.team_dollars.get(team, 0.0) + more * _device_price(offer)
        if limit.dollars_per_hour is not None and dollars > limit.dollars_per_hour + 1e-9:
            return "team_dollars"
        return None

    def take(self, demand: Demand, offer: NodeOffer, more: int) -> None:
        """Add devices to a job."""
        nodes = self.nodes_for(offer, more)
        self.nodes[offer.key] = self.nodes.get(offer.key, 0) + nodes
        self.devices[offer.key] = self.devices.get(offer.key, 0) + more
        self.dollars_per_hour += nodes * offer.dollars_per_hour
        team = demand.team
        self.team_devices[team] = self.team_devices.get(team, 0) + more
        self.team_dollars[team] = self.team_dollars.get(team, 0.0) + more * _device_price(offer)
        self.sizes[demand.id] = self.sizes.get(demand.id, 0) + more


@dataclass(slots=True)
class Buyer:
    """A job that devices are bought for."""

    demand: Demand
    offers: Sequence[NodeOffer]
    """Offers it may use."""
    waited_s: float
    need: float | None = None
    """Goodput that its deadline requires after a restart; bought at any price."""
    need_held: float = math.inf
    """The same without a restart, if it keeps what it holds."""
    held_offer: str | None = None
    """Offer of all the devices it holds."""
    size: int = 0
    offer: NodeOffer | None = None
    rate: float = 0.0
    tables: dict[str, tuple[list[int], list[float]]] = field(
        default_factory=dict[str, tuple[list[int], list[float]]]
    )
    best: float = 0.0
    """Most useful samples per dollar on any offer, without other jobs."""

    def prepare(self, every: Iterable[NodeOffer]) -> None:
        """Predict the goodput of all sizes on all offers, including those not available now."""
        for offer in every:
            sizes = _sizes(self.demand, offer)
            if not sizes:
                continue
            counts = np.array(sizes, dtype=np.int64)
            nodes = -(-counts // offer.devices)
            rates = self.demand.speed.goodput(offer.type, nodes, counts)
            self.tables[offer.key] = (sizes, [float(rate) for rate in rates])
            dollars = nodes * max(offer.dollars_per_hour, _FREE_DOLLARS)
            self.best = max(self.best, float((rates / dollars).max()))

    def next_step(self, purchases: PurchasePlan) -> _Step | None:
        """The step with the most gain per dollar; a job stays on the offer it began with."""
        steps = [
            step
            for offer in ((self.offer,) if self.offer else self.offers)
            for step in self._steps(offer, purchases)
        ]
        if not self.is_in_hurry:
            # Growing needs a restart: not where that would miss the deadline.
            safe = [step for step in steps if self.rate + step.gain >= (self.need or 0.0)]
            return max(safe, key=lambda step: (step.value, step.gain), default=None)
        # Short of time: what it holds, or the cheapest sufficient size, or the fastest possible.
        enough = [
            step for step in steps if self.rate + step.gain >= self._needed(step.size, step.offer)
        ]
        stay = [step for step in enough if self._is_held(step.size, step.offer)]
        if enough:
            return min(stay or enough, key=lambda step: step.nodes * step.offer.dollars_per_hour)
        return max(steps, key=lambda step: step.gain, default=None)

    def _is_held(self, size: int, offer: NodeOffer | None) -> bool:
        """Whether it holds exactly this, so that no restart is needed."""
        is_there = offer is not None and offer.key == self.held_offer
        return is_there and size == self.demand.held.devices

    def _needed(self, size: int, offer: NodeOffer | None) -> float:
        """Goodput that the deadline requires with this choice; 0 without a deadline."""
        if self.need is None:
            return 0.0
        return min(self.need, self.need_held) if self._is_held(size, offer) else self.need

    def _steps(self, offer: NodeOffer, purchases: PurchasePlan) -> Iterable[_Step]:
        sizes, rates = self.tables.get(offer.key, ([], []))
        for size, rate in zip(sizes, rates, strict=True):
            if size <= self.size or rate <= self.rate:
                continue
            if purchases.refuses(self.demand, offer, size - self.size):
                continue
            nodes = purchases.nodes_for(offer, size - self.size)
            dollars = nodes * max(offer.dollars_per_hour, _FREE_DOLLARS)
            value = (rate - self.rate) / dollars / self.best if nodes else math.inf
            yield _Step(offer, size, nodes, rate - self.rate, value)

    @property
    def is_in_hurry(self) -> bool:
        """Whether its deadline requires more than it holds."""
        return self.rate < self._needed(self.size, self.offer)


def plan_purchases(
    buyers: Sequence[Buyer], purchases: PurchasePlan, held: Mapping[str, int], rules: ScalingRules
) -> None:
    """Choose purchases: deadlines first, then priority, then gain per dollar."""
    order = {id(buyer): index for index, buyer in enumerate(buyers)}
    queue: list[tuple[bool, int, float, int]] = []

    def ask(buyer: Buyer) -> None:
        step = buyer.next_step(purchases)
        if step is not None:
            rank = (
                not buyer.is_in_hurry,
                -buyer.demand.priority,
                -step.value,
                order[id(buyer)],
            )
            heapq.heappush(queue, rank)

    for buyer in buyers:
        ask(buyer)
    while queue:
        _, _, value, index = heapq.heappop(queue)
        buyer = buyers[index]
        step = buyer.next_step(purchases)
        if step is None:
            continue
        if -value > step.value and queue and not buyer.is_in_hurry:
            # Other jobs took the devices it needed: it is queued again.
            ask(buyer)
            continue
        if not buyer.is_in_hurry and step.value < _least_worth(buyer, step, purchases, held, rules):
            continue
        purchases.take(buyer.demand, step.offer, step.size - buyer.size)
        buyer.size, buyer.offer = step.size, step.offer
        buyer.rate += step.gain
        ask(buyer)


def _least_worth(
    buyer: Buyer, step: _Step, purchases: PurchasePlan, held: Mapping[str, int], rules: ScalingRules
) -> float:
    """Least acceptable gain per dollar: lower for held devices and for jobs that waited long."""
    worth = rules.worth
    if purchases.nodes.get(step.offer.key, 0) + step.nodes <= held.get(step.offer.key, 0):
        worth *= 1 - rules.calm
    if not buyer.size:
        worth *= max(0.0, 1 - buyer.waited_s / rules.patience_s) if rules.patience_s else 0.0
    return worth


def find_usable(demand: Demand, offers: Sequence[NodeOffer], mode: Mode | None) -> list[NodeOffer]:
    """Offers that this job may run on now; cheapest device first."""
    if mode is Mode.IDLE:
        return []
    fit = [
        offer
        for offer in offers
        if offer.most > 0
        and (demand.types is None or offer.type in demand.types)
        and (mode is not Mode.ON_DEMAND or not offer.is_spot)
        and (mode is not Mode.SPOT or offer.is_spot)
    ]
    return sorted(fit, key=_device_price)


def _device_price(offer: NodeOffer) -> float:
    return offer.dollars_per_hour / offer.devices


def _sizes(demand: Demand, offer: NodeOffer) -> list[int]:
    """Candidate sizes: doubling within a node, then whole nodes, then doubling."""
    if demand.types is not None and offer.type not in demand.types:
        return []
    unit = max(1, demand.multiple)
    least = math.ceil(max(demand.min_devices, 1) / unit) * unit
    most = min(demand.max_devices, offer.devices * max(offer.most, 1))
    sizes: set[int] = {least}
    size = unit
    while size <= most and len(sizes) < _MOST_SIZES:
        if size >= least:
            sizes.add(size)
        size = (
            size * 2 if size < offer.devices * 4 else size + max(unit, _round_up(size // 4, unit))
        )
    sizes |= {most // unit * unit, demand.held.devices}
    whole = _round_up(offer.devices, unit)
    sizes |= {whole * count for count in range(1, 9)}
    return sorted(size for size in sizes if least <= size <= most and size % unit == 0)


def _round_up(count: int, unit: int) -> int:
    return max(unit, -(-count // unit) * unit)
