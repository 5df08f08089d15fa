"""Autoscaling: how many nodes of which offer to have; up when worth the price, down when idle. Pure.

Which devices are worth their price: job by job, the best next dollar first.
For each job the machines' model of its speed tells the useful progress of every size. What one more
dollar an hour brings falls as a job grows; it is bought while that is at least ``worth`` of what the
job's best dollar brings. Devices left over on machines that are bought anyway cost nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.scheduler.policy.values import Reason
from yunlu.scheduler.spot import (
    LEVELS,
    PRIOR,
    DeadlineJob,
    Mode,
    PlannedSpotPolicy,
    SpotObservation,
    SpotPlanCache,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.scheduler.policy.values import Demand, PoolState
    from yunlu.scheduler.spot import SpotModel

BOOT_S = 60.0
"""Seconds from the request of a node until a job can start on it, before one was observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Nodes of one kind that can be rented at a price."""

    key: str
    devices: int
    type: str = "device"
    dollars_per_hour: float = 0.0
    is_spot: bool = False
    most: int = 1 << 20
    """How many can be rented in all, held ones included; 0 while there are none."""
    boot_s: float = BOOT_S
    """Seconds from the request until a job can start on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLease:
    """A node that is held or requested."""

    name: str
    offer: str
    since: float
    idle_since: float | None = None
    """None while a job holds a device of it."""
    is_leaving: bool = False
    """Being preempted or drained: no longer counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamLimit:
    """What may be rented for one team."""

    devices: int | None = None
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What must never be exceeded."""

    nodes: int | None = None
    dollars_per_hour: float | None = None
    teams: Mapping[str, TeamLimit] = field(default_factory=dict[str, TeamLimit])
    least: Mapping[str, int] = field(default_factory=dict[str, int])
    """By offer: nodes that are kept even when idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """When growth pays, and how fast to follow."""

    worth: float = 0.5
    """A machine is bought while its dollar brings at least this share of the progress that the
    job's best dollar brings: 1 buys only perfect speed-up at the best price, 0 buys all that helps."""
    calm: float = 0.2
    """A machine that is held is kept down to this much below ``worth``."""
    patience_s: float = 3600.0
    """A job that has nothing takes dearer machines the longer it waits, any price after this."""
    grow_after_s: float = 30.0
    """How long more nodes must be wanted before they are requested; deadlines do not wait."""
    idle_s: float = 300.0
    """How long a node is idle before it is released."""
    least_life_s: float = 600.0
    """A node younger than this is not released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMemory:
    """Memory between decisions; empty at first, and safe to lose."""

    wanting_since: Mapping[str, float] = field(default_factory=dict[str, float])
    """By offer: since when more were wanted than held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Number of nodes to have."""

    wanted: Mapping[str, int]
    """By offer; offers that are not named: none."""
    release: tuple[str, ...] = ()
    """Names of nodes to release now."""
    reasons: Mapping[str, Reason] = field(default_factory=dict[str, "Reason"])
    """By key of offer and by id of job."""
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By job: the devices it was bought or kept machines for. The allocator decides anew."""
    dollars_per_hour: float = 0.0
    notes: ScalingMemory = field(default_factory=ScalingMemory)


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


class DeadlineWatch:
    """Watches one job with a deadline: takes its progress, returns spot, on-demand or idle.

    Work is counted in seconds at ``goodput``, the useful samples a second of the size it would fall
    back to on on-demand (an efficient one that makes it); until then it may run at any size.
    Keeps what it learns of spot between calls; rebuilt after a restart, it only knows less of the past.
    Asked every ``step_s`` or sooner: that a machine is gone may go unnoticed for as long, once, before
    the job is on on-demand for good, so as much is held back of the deadline.

    It needs machines of both kinds on offer, as in simulations, and in live pools that have both.
    """

    def __init__(
        self,
        demand: Demand,
        *,
        now: float,
        goodput: float,
        step_s: float,
        model: SpotModel = PRIOR,
        levels: int = LEVELS,
    ) -> None:
        if demand.deadline_at is None or demand.remaining is None or goodput <= 0:
            raise ValueError(f"{demand.id}: a watch needs a deadline, a length and a speed")
        self.began_at = now
        self.goodput = goodput
        work_s = demand.remaining / goodput
        job = DeadlineJob(
            work_s=work_s,
            # With less slack there is nothing to plan: on-demand from now on.
            deadline_s=max(demand.deadline_at - now - step_s, work_s, 1.0),
            restart_s=demand.restart_s,
        )
        self.step_s = step_s
        self._policy = PlannedSpotPolicy(SpotPlanCache(job, model, levels))

    def choose(
        self,
        demand: Demand,
        *,
        now: float,
        mode: Mode,
        starting_s: float,
        is_spot_up: bool,
        spot_dollars_per_hour: float,
        on_demand_dollars_per_hour: float,
        spent_dollars: float,
    ) -> Mode:
        """What to run on until the next call."""
        return self._policy.choose(
            SpotObservation(
                elapsed_s=now - self.began_at,
                left_s=(demand.remaining or 0.0) / self.goodput,
                mode=mode,
                starting_s=starting_s,
                is_spot_up=is_spot_up,
                spot_dollars_per_hour=spot_dollars_per_hour,
                on_demand_dollars_per_hour=on_demand_dollars_per_hour,
                spent_dollars=spent_dollars,
                step_s=self.step_s,
            )
        )


_NOTES = ScalingMemory()
_LIMITS = Limits()
_RULES = ScalingRules()
_LIMIT_TEXTS = {
    "capacity": "no more nodes of this kind can be rented",
    "nodes": "the pool's node limit is reached",
    "dollars": "the pool's limit of dollars per hour is reached",
    "team_devices": "its team's device limit is reached",
    "team_dollars": "its team's limit of dollars per hour is reached",
}


def decide_nodes(
    state: PoolState,
    *,
    offers: Sequence[NodeOffer],
    leases: Sequence[NodeLease] = (),
    limits: Limits = _LIMITS,
    rules: ScalingRules = _RULES,
    modes: Mapping[str, Mode] | None = None,
    notes: ScalingMemory = _NOTES,
) -> Scaling:
    """Decide anew from all that is known; the same inputs give the same answer.

    ``modes`` says of jobs with deadlines what they are to run on now; a job
    that is not named may run on anything. Machines in use are never given back here: the allocator
    empties them, then they are idle.
    """
    held = Counter(lease.offer for lease in leases if not lease.is_leaving)
    places = {lease.name: lease.offer for lease in leases if not lease.is_leaving}
    purchases = PurchasePlan(limits)
    buyers = [
        _make_buyer(demand, state.now, offers, (modes or {}).get(demand.id), places)
        for demand in state.jobs
    ]
    plan_purchases(buyers, purchases, held, rules)
    known = {offer.key: offer for offer in offers}
    hurried = {buyer.offer.key for buyer in buyers if buyer.offer and buyer.need}
    release = _choose_release(
        state.now, leases, wanted=purchases.nodes, known=known, limits=limits, rules=rules
    )
    wanted: dict[str, int] = {}
    wanting: dict[str, float] = {}
    reasons: dict[str, Reason] = {}
    retained = held - Counter(lease.offer for lease in release if not lease.is_leaving)
    for offer in offers:
        count, reason = _follow(
            offer, purchases, held=held[offer.key], retained_count=retained[offer.key], limits=limits, rules=rules,
            notes=notes, now=state.now, is_hurried=offer.key in hurried, wanting=wanting,
        )  # fmt: skip
        if count:
            wanted[offer.key] = count
        reasons[offer.key] = reason
    reasons |= {buyer.demand.id: _explain(buyer, purchases) for buyer in buyers}
    return Scaling(
        wanted=wanted,
        release=tuple(lease.name for lease in release),
        reasons=reasons,
        sizes=dict(purchases.sizes),
        dollars_per_hour=sum(known[key].dollars_per_hour * count for key, count in wanted.items()),
        notes=ScalingMemory(wanting_since=wanting),
    )


def _make_buyer(
    demand: Demand,
    now: float,
    offers: Sequence[NodeOffer],
    mode: Mode | None,
    places: Mapping[str, str],
) -> Buyer:
    waited_s = 0.0 if demand.held else max(0.0, now - demand.submitted_at)
    buyer = Buyer(demand, find_usable(demand, offers, mode), waited_s)
    buyer.prepare(offers)
    if demand.deadline_at is not None and demand.remaining is not None and buyer.offers:
        boot_s = 0.0 if demand.held else min(offer.boot_s for offer in buyer.offers)
        left_s = demand.deadline_at - now - boot_s - demand.restart_s
        buyer.need = demand.remaining / max(left_s, 1.0)
        sources = {places.get(name) for name, _ in demand.held.shares}
        if len(sources) == 1:
            buyer.held_offer = sources.pop()
            ran_s = math.inf if demand.held_since is None else now - demand.held_since
            starting_s = max(0.0, demand.restart_s - ran_s)
            buyer.need_held = demand.remaining / max(demand.deadline_at - now - starting_s, 1.0)
    return buyer


def _choose_release(
    now: float,
    leases: Sequence[NodeLease],
    *,
    wanted: Mapping[str, int],
    known: Mapping[str, NodeOffer],
    limits: Limits,
    rules: ScalingRules,
) -> list[NodeLease]:
    """Idle nodes beyond what is wanted, the longest idle first."""
    release: list[NodeLease] = []
    counts = Counter(lease.offer for lease in leases if not lease.is_leaving)
    idle = [lease for lease in leases if lease.idle_since is not None]
    for lease in sorted(idle, key=lambda lease: (lease.idle_since or 0.0, lease.name)):
        needed = max(wanted.get(lease.offer, 0), limits.least.get(lease.offer, 0))
        is_spare = lease.is_leaving or counts[lease.offer] > needed
        is_ripe = now - (lease.idle_since or now) >= rules.idle_s
        is_grown = now - lease.since >= rules.least_life_s
        if lease.is_leaving or lease.offer not in known or (is_spare and is_ripe and is_grown):
            release.append(lease)
            if not lease.is_leaving:
                counts[lease.offer] -= 1
    return release


def _follow(
    offer: NodeOffer,
    purchases: PurchasePlan,
    *,
    held: int,
    retained_count: int,
    limits: Limits,
    rules: ScalingRules,
    notes: ScalingMemory,
    now: float,
    is_hurried: bool,
    wanting: dict[str, float],
) -> tuple[int, Reason]:
    """From the best number to what to do now: up after a delay, down only by idle nodes."""
    best = max(purchases.nodes.get(offer.key, 0), min(limits.least.get(offer.key, 0), offer.most))
    figures: dict[str, Any] = {
        "held": held,
        "best": best,
        "devices_used": purchases.devices.get(offer.key, 0),
        "dollars_per_hour": offer.dollars_per_hour,
    }
    if best > held:
        since = notes.wanting_since.get(offer.key, now)
        wanting[offer.key] = since
        if is_hurried or now - since >= rules.grow_after_s:
            return best, Reason(
                code="grown",
                text=f"{best - held} more of {offer.key}: the jobs' gain is worth the price.",
                figures=figures,
            )
        return held, Reason(
            code="waits",
            text=f"{best - held} more of {offer.key} would pay; waiting to see whether that lasts.",
            figures=figures,
        )
    if retained_count < held:
        return retained_count, Reason(
            code="shrunk",
            text=f"{held - retained_count} of {offer.key} idle: released.",
            figures=figures,
        )
    if best < held:
        return held, Reason(
            code="lingers",
            text=f"{held - best} of {offer.key} would not be rented now; kept until idle long enough.",
            figures=figures,
        )
    return held, Reason(code="kept", text=f"{held} of {offer.key} is right.", figures=figures)


def _explain(buyer: Buyer, purchases: PurchasePlan) -> Reason:
    """Why nodes are rented for so many devices of a job."""
    demand = buyer.demand
    if buyer.size and buyer.offer:
        figures = {"devices": buyer.size, "offer": buyer.offer.key, "goodput": buyer.rate}
        if buyer.is_in_hurry:
            return Reason(
                code="too_late",
                text=f"Even {buyer.size} devices miss the deadline.",
                figures={**figures, "needed": buyer.need},
            )
        code = "deadline" if buyer.need else "worth"
        return Reason(
            code=code, text=f"{buyer.size} devices of {buyer.offer.key}.", figures=figures
        )
    if not buyer.offers:
        return Reason(
            code="waits_for_offer", text="It waits: no node it may use can be rented now."
        )
    if not buyer.best:
        return Reason(
            code="cannot_run", text="Its speed model predicts that it cannot run on any offer."
        )
    cause = next(
        (
            cause
            for offer in buyer.offers
            if (cause := purchases.refuses(demand, offer, max(1, demand.min_devices)))
        ),
        None,
    )
    if cause is None:
        return Reason(
            code="not_worth",
            text="It waits for a better price; the longer it waits, the higher a price it accepts.",
        )
    return Reason(code=f"limit_{cause}", text=f"It waits: {_LIMIT_TEXTS[cause]}.")
