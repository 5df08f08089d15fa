"""Pools and jobs for tests: speeds that anyone can compute in the head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from yunlu.hardware.fleet import NOTHING, Node, Placement
from yunlu.scheduler.policy.values import Demand, PoolState, Team

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.values import Decision, Policy


@dataclass(frozen=True, slots=True)
class PowerSpeed:
    """``rate * devices ** power`` useful samples a second, a fifth less over a network."""

    rate: float = 1.0
    power: float = 0.8
    most: int = 1 << 30

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """As the protocol says."""
        del device_type
        speed = self.rate * devices.astype(np.float64) ** self.power
        return np.where(devices <= self.most, np.where(nodes > 1, 0.8 * speed, speed), 0.0)


def make_nodes(count: int, devices: int = 4, *, dollars_per_hour: float = 0.0) -> tuple[Node, ...]:
    """Alike."""
    return tuple(
        Node(name=f"n{number}", devices=devices, dollars_per_hour=dollars_per_hour)
        for number in range(count)
    )


def make_job(name: str = "a", *, work_s: float = 1000.0, **given: object) -> Demand:
    """A job with so many device-seconds left; it goes as fast as its devices."""
    plain: dict[str, object] = {
        "id": name,
        "submitted_at": 0.0,
        "speed": PowerSpeed(),
        "remaining": work_s,
    }
    return Demand(**(plain | given))  # pyright: ignore[reportArgumentType]


def on(*shares: tuple[str, int]) -> Placement:
    """A placement."""
    return Placement(tuple(shares))


def make_state(
    jobs: Sequence[Demand],
    nodes: Sequence[Node] | None = None,
    *,
    now: float = 1000.0,
    teams: Sequence[Team] = (),
) -> PoolState:
    """A pool of 4 x 4 without a word."""
    return PoolState(
        now=now, nodes=tuple(nodes or make_nodes(4)), jobs=tuple(jobs), teams=tuple(teams)
    )


def follow(state: PoolState, decision: Decision, *, later_s: float = 0.0) -> PoolState:
    """The pool after a decision, with nothing else changed."""
    now = state.now + later_s
    jobs = tuple(
        replace(
            job,
            held=decision.placements.get(job.id, NOTHING),
            held_since=_since(job, decision.placements.get(job.id, NOTHING), state.now),
        )
        for job in state.jobs
    )
    return replace(state, now=now, jobs=jobs)


def _since(job: Demand, gets: Placement, now: float) -> float | None:
    if not gets:
        return None
    return job.held_since if gets == job.held else now


def check(state: PoolState, decision: Decision) -> None:
    """What no decision may break, whatever the policy."""
    used = {node.name: 0 for node in state.nodes}
    known = {job.id: job for job in state.jobs}
    for name, placement in decision.placements.items():
        job = known[name]
        for node, count in placement.shares:
            assert count > 0
            used[node] += count
        assert len({node for node, _ in placement.shares}) == placement.nodes
        if not job.is_pinned:
            assert job.min_devices <= placement.devices <= job.max_devices, name
            assert placement.devices % job.multiple == 0, name
    for node in state.nodes:
        assert used[node.name] <= node.devices, node.name
    leaving = {node.name for node in state.nodes if node.is_leaving}
    for name, placement in decision.placements.items():
        if not known[name].is_pinned:
            assert leaving.isdisjoint(node for node, _ in placement.shares), name
    for job in state.jobs:
        if job.is_pinned and job.held:
            assert decision.placements.get(job.id) == job.held, job.id
        assert job.id in decision.reasons, job.id
        assert decision.reasons[job.id].text


@st.composite
def states(draw: st.DrawFn, *, teams: bool = False, most_jobs: int = 10) -> PoolState:
    """Random pools, with jobs somewhere in them."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 4, 4, 8)), min_size=1, max_size=5))
    nodes = tuple(
        Node(name=f"n{number}", devices=size, is_leaving=draw(st.integers(0, 9)) == 0)
        for number, size in enumerate(sizes)
    )
    names = ("red", "blue") if teams else ("",)
    free = {node.name: node.devices for node in nodes}
    count = draw(st.integers(0, most_jobs))
    jobs = [draw(_jobs(f"j{number}", free, names)) for number in range(count)]
    found = tuple(
        Team(
            name=name,
            quota=draw(st.one_of(st.none(), st.integers(0, 12))),
            borrow=draw(st.one_of(st.none(), st.integers(0, 8))),
        )
        for name in names
        if name
    )
    return PoolState(now=10_000.0, nodes=nodes, jobs=tuple(jobs), teams=found)


@st.composite
def _jobs(draw: st.DrawFn, name: str, free: dict[str, int], teams: Sequence[str]) -> Demand:
    multiple = draw(st.sampled_from((1, 1, 1, 2, 3)))
    least = multiple * draw(st.integers(1, 3))
    most = draw(st.sampled_from((least, 2 * least, 4 * least, 1 << 20)))
    held = NOTHING
    if draw(st.booleans()):
        held = _take(draw, free, least)
    return Demand(
        id=name,
        submitted_at=draw(st.floats(0, 10_000)),
        speed=PowerSpeed(draw(st.floats(0.1, 10)), draw(st.floats(0.1, 1.0))),
        remaining=draw(st.one_of(st.none(), st.floats(1, 1e6))),
        done=draw(st.floats(0, 1e5)),
        min_devices=least,
        max_devices=most,
        multiple=multiple,
        held=held,
        held_since=draw(st.floats(0, 10_000)) if held else None,
        is_pinned=bool(held) and draw(st.integers(0, 5)) == 0,
        is_preemptible=draw(st.integers(0, 5)) > 0,
        priority=draw(st.sampled_from((0, 0, 0, 1, 2))),
        team=draw(st.sampled_from(teams)),
        deadline_at=draw(st.one_of(st.none(), st.floats(9_000, 50_000))),
    )


def _take(draw: st.DrawFn, free: dict[str, int], devices: int) -> Placement:
    """Somewhere, perhaps in pieces."""
    shares: dict[str, int] = {}
    for node in draw(st.permutations(sorted(free))):
        taken = min(free[node], devices - sum(shares.values()))
        if taken > 0:
            shares[node] = taken
    if sum(shares.values()) < devices:
        return NOTHING
    for node, count in shares.items():
        free[node] -= count
    return Placement(tuple(shares.items()))


def live(
    policy: Policy, jobs: Sequence[Demand], nodes: Sequence[Node], *, rounds: int, round_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Let jobs come, train and end; when each started, and when it ended."""
    started: dict[str, float] = {}
    ended: dict[str, float] = {}
    alive = {job.id: job for job in jobs}
    for number in range(rounds):
        now = number * round_s
        here = [job for job in alive.values() if job.submitted_at <= now]
        state = PoolState(now=now, nodes=tuple(nodes), jobs=tuple(here))
        decision = policy.decide(state)
        check(state, decision)
        for job in follow(state, decision).jobs:
            if job.held:
                started.setdefault(job.id, now)
            alive[job.id] = _train(job, round_s, is_new=job.held != known_held(here, job.id))
            if (alive[job.id].remaining or 0) <= 0:
                ended[job.id] = now + round_s
                del alive[job.id]
        if not alive:
            break
    return started, ended


def known_held(jobs: Sequence[Demand], name: str) -> Placement:
    """What a job held before."""
    return next(job.held for job in jobs if job.id == name)


def _train(job: Demand, round_s: float, *, is_new: bool) -> Demand:
    if not job.held:
        return job
    shape = np.array([job.held.nodes]), np.array([job.held.devices])
    speed = float(job.speed.goodput("device", *shape)[0])
    made = speed * max(round_s - (job.restart_s if is_new else 0.0), 0.0)
    return replace(
        job,
        remaining=(job.remaining or 0.0) - made,
        done=job.done + made,
        served_device_s=job.served_device_s + round_s * job.held.devices,
        restarts=job.restarts + (is_new and job.served_device_s > 0),
    )
