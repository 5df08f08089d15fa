"""How many nodes of which offer to have: up when the gain is worth the price, down when idle."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from yunlu.scheduler.autoscaling.purchases import Buyer, PurchasePlan, find_usable, plan_purchases
from yunlu.scheduler.autoscaling.values import Limits, Scaling, ScalingMemory, ScalingRules
from yunlu.scheduler.policy.values import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.scheduler.autoscaling.values import NodeLease, NodeOffer
    from yunlu.scheduler.policy.values import Demand, PoolState
    from yunlu.scheduler.spot.values import Mode

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

    ``modes`` says of jobs with deadlines what they are to run on now (see ``deadlines.py``); a job
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
