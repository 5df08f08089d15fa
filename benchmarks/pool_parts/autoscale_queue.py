"""A queue of elastic jobs with deadlines on a pool that rents machines at the prices of the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from yunlu.hardware.fleet import Placement
from yunlu.lab.spot.replay import Greedy, OnDemandOnly, UniformProgress, replay
from yunlu.scheduler.autoscaling import (
    DeadlineWatch,
    NodeLease,
    NodeOffer,
    ScalingMemory,
    ScalingRules,
    decide_nodes,
)
from yunlu.scheduler.policy.values import Demand, PoolState
from yunlu.scheduler.spot import HOUR_S, DeadlineJob, Mode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.spot import SpotMarket

BOOT_S, RESTART_S = 180.0, 120.0
FIXED_DEVICES, MOST_DEVICES = 4, 8
FALLBACK_DEVICES = 4
"""The size at which a job would be finished on on-demand."""
_LEVELS = 120
NAMES = {OnDemandOnly: "on-demand", Greedy: "greedy", UniformProgress: "uniform progress"}


@dataclass(frozen=True)
class Speed:
    """Amdahl's law."""

    serial: float

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Samples a second; one device does one."""
        del device_type, nodes
        return 1.0 / (self.serial + (1 - self.serial) / devices)

    def at(self, devices: int) -> float:
        """The same for one size."""
        return 1.0 / (self.serial + (1 - self.serial) / devices)


@dataclass(slots=True)
class QueuedJob:
    """One job on its way through the queue."""

    id: str
    submitted_at: float
    deadline_at: float
    samples: float
    speed: Speed
    left: float = field(init=False)
    mode: Mode = Mode.IDLE
    devices: int = 0
    node: str = ""
    """One of the machines it is on; all are of one offer."""
    starting_s: float = 0.0
    held_since: float | None = None
    spent_dollars: float = 0.0
    finished_at: float | None = None
    watch: DeadlineWatch | None = None

    def __post_init__(self) -> None:
        self.left = self.samples

    def demand(self) -> Demand:
        """As the pool sees it."""
        return Demand(
            id=self.id, submitted_at=self.submitted_at, speed=self.speed, remaining=self.left,
            max_devices=MOST_DEVICES, restart_s=RESTART_S + BOOT_S, deadline_at=self.deadline_at,
            held=Placement(((self.node, self.devices),)) if self.devices else Placement(),
            held_since=self.held_since,
        )  # fmt: skip


@dataclass(frozen=True)
class Bill:
    """What a way to run the queue cost."""

    name: str
    dollars: float
    late: int
    mean_hours: float
    """From submission to the end."""


def make_queue(*, days: float, count: int, seed: int) -> list[QueuedJob]:
    """Jobs of 2 to 12 h on four devices, with 1.3 to 3 times as long to do them."""
    random = np.random.default_rng(seed)
    jobs: list[QueuedJob] = []
    for place, at in enumerate(sorted(random.uniform(0, days * 86_400, count).tolist())):
        speed = Speed(serial=float(random.uniform(0.02, 0.15)))
        hours = float(np.exp(random.uniform(np.log(2), np.log(12))))
        room = float(random.uniform(1.3, 3.0))
        samples = hours * HOUR_S * speed.at(FIXED_DEVICES)
        begin = 300.0 * round(at / 300.0)
        jobs.append(
            QueuedJob(
                id=f"job-{place}", submitted_at=begin, samples=samples, speed=speed,
                deadline_at=begin + room * hours * HOUR_S + BOOT_S + RESTART_S,
            )
        )  # fmt: skip
    return jobs


def run_fixed(jobs: Sequence[QueuedJob], market: SpotMarket, start: int) -> list[Bill]:
    """Four devices for each job: on-demand, greedy, Uniform Progress."""
    bills: list[Bill] = []
    for make in (OnDemandOnly, Greedy, UniformProgress):
        dollars, late, spans = 0.0, 0, 0.0
        for job in jobs:
            asked = DeadlineJob(
                work_s=job.samples / job.speed.at(FIXED_DEVICES),
                deadline_s=job.deadline_at - job.submitted_at,
                restart_s=RESTART_S + BOOT_S,
            )
            begin = start + round(job.submitted_at / market.step_s)
            outcome = replay(make(asked), asked, market, start=begin)
            dollars += FIXED_DEVICES * outcome.cost_dollars
            late += outcome.is_late
            spans += (outcome.finished_s or asked.deadline_s) / HOUR_S
        bills.append(Bill(NAMES[make], dollars, late, spans / len(jobs)))
    return bills


def run_pool(
    jobs: Sequence[QueuedJob], market: SpotMarket, start: int, rules: ScalingRules
) -> Bill:
    """Our pool: sizes and machines decided anew at every tick."""
    step_s = market.step_s
    leases: list[NodeLease] = []
    notes, dollars, tick = ScalingMemory(), 0.0, 0
    last = max(job.deadline_at for job in jobs) + 86_400
    while any(job.finished_at is None for job in jobs) and tick * step_s < last:
        now, place = tick * step_s, start + tick
        is_up, price = bool(market.is_up[place]), float(market.spot_dollars_per_hour[place])
        offers = (
            NodeOffer(key="spot", devices=1, dollars_per_hour=price, is_spot=True,
                  most=256 if is_up else 0, boot_s=BOOT_S),
            NodeOffer(key="on-demand", devices=1, dollars_per_hour=market.on_demand_dollars_per_hour,
                  boot_s=BOOT_S),
        )  # fmt: skip
        queue = [job for job in jobs if job.submitted_at <= now and job.finished_at is None]
        if not is_up:
            leases = [lease for lease in leases if lease.offer != "spot"]
            for job in queue:
                if job.mode is Mode.SPOT:
                    job.mode, job.devices, job.starting_s = Mode.IDLE, 0, 0.0
        modes = {job.id: _watch(job, now, market, place) for job in queue}
        scaling = decide_nodes(
            PoolState(now=now, nodes=(), jobs=tuple(job.demand() for job in queue)),
            offers=offers, leases=leases, modes=modes, rules=rules, notes=notes,
        )  # fmt: skip
        notes = scaling.notes
        leases = [lease for lease in leases if lease.name not in scaling.release]
        for key, wanted in scaling.wanted.items():
            have = sum(lease.offer == key for lease in leases)
            leases += [
                NodeLease(name=f"{key}-{tick}-{n}", offer=key, since=now, idle_since=now)
                for n in range(wanted - have)
            ]
        used = _apply(
            queue, sizes=scaling.sizes, modes=modes, leases=leases, now=now, step_s=step_s,
            offers=offers,
        )  # fmt: skip
        leases = _mark(leases, used, now)
        prices = {offer.key: offer.dollars_per_hour for offer in offers}
        dollars += sum(prices[lease.offer] for lease in leases) * step_s / HOUR_S
        tick += 1
    late = sum(job.finished_at is None or job.finished_at > job.deadline_at for job in jobs)
    spans = [((job.finished_at or last) - job.submitted_at) / HOUR_S for job in jobs]
    return Bill("our pool", dollars, late, float(np.mean(spans)))


def _watch(job: QueuedJob, now: float, market: SpotMarket, place: int) -> Mode:
    demand = job.demand()
    if job.watch is None:
        job.watch = DeadlineWatch(
            demand,
            now=now,
            goodput=job.speed.at(FALLBACK_DEVICES),
            step_s=market.step_s,
            levels=_LEVELS,
        )
    # What its devices cost, as if it ran alone at the size it would fall back to.
    return job.watch.choose(
        demand, now=now, mode=job.mode, starting_s=job.starting_s,
        is_spot_up=bool(market.is_up[place]),
        spot_dollars_per_hour=float(market.spot_dollars_per_hour[place]),
        on_demand_dollars_per_hour=market.on_demand_dollars_per_hour,
        spent_dollars=job.spent_dollars / FALLBACK_DEVICES,
    )  # fmt: skip


def _apply(
    queue: Sequence[QueuedJob],
    *,
    sizes: Mapping[str, int],
    modes: Mapping[str, Mode],
    leases: Sequence[NodeLease],
    now: float,
    step_s: float,
    offers: Sequence[NodeOffer],
) -> dict[str, int]:
    """Give jobs their devices and let them run for a tick; how many devices are used, by offer."""
    free = {offer.key: sum(lease.offer == offer.key for lease in leases) for offer in offers}
    used = dict.fromkeys(free, 0)
    prices = {offer.key: offer.dollars_per_hour for offer in offers}
    for job in sorted(queue, key=lambda job: job.deadline_at):
        key = "spot" if modes[job.id] is Mode.SPOT else "on-demand"
        devices = min(sizes.get(job.id, 0), free[key]) if modes[job.id] is not Mode.IDLE else 0
        if modes[job.id] is job.mode and 2 * devices > job.devices > devices:
            # The allocator would not restart it for so little.
            devices = min(job.devices, free[key])
        mode = modes[job.id] if devices else Mode.IDLE
        if (mode, devices) != (job.mode, job.devices) and devices:
            # A size may change without a new machine; getting one takes longer.
            is_new = mode is not job.mode or devices > job.devices
            job.starting_s = RESTART_S + (BOOT_S if is_new else 0.0)
            job.held_since = now
        job.mode, job.devices = mode, devices
        if not devices:
            continue
        job.node = next(lease.name for lease in leases if lease.offer == key)
        free[key] -= devices
        used[key] += devices
        job.spent_dollars += devices * prices[key] * step_s / HOUR_S
        lost_s = min(step_s, job.starting_s)
        job.starting_s -= lost_s
        rate = job.speed.at(devices)
        done = rate * (step_s - lost_s)
        if done >= job.left:
            job.finished_at = now + lost_s + job.left / rate
            job.mode, job.devices = Mode.IDLE, 0
        job.left = max(0.0, job.left - done)
    return used


def _mark(leases: Sequence[NodeLease], used: dict[str, int], now: float) -> list[NodeLease]:
    """Which machines are idle now, and since when."""
    marked: list[NodeLease] = []
    left = dict(used)
    for lease in leases:
        is_busy = left[lease.offer] > 0
        left[lease.offer] -= is_busy
        idle_since = (
            None if is_busy else (lease.idle_since if lease.idle_since is not None else now)
        )
        marked.append(
            NodeLease(name=lease.name, offer=lease.offer, since=lease.since, idle_since=idle_since)
        )
    return marked
