"""Contract test of allocation policies, to inherit.

In your own test suite::

    class TestMyPolicy(PolicyContract):
        def make_policy(self):
            return MyPolicy()

The scheduler carries out what a policy decides: a device that is given twice fails two runs.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.hardware.fleet import NOTHING, Node, Placement
from yunlu.scheduler.policy.values import Demand, PoolState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.values import Decision, Policy

_STATES = 40


class ConcaveSpeed:
    """A job whose further devices help less and less."""

    def __init__(self, power: float) -> None:
        self._power = power

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """See ``Speed``."""
        del device_type, nodes
        return np.asarray(devices, dtype=np.float64) ** self._power


class PolicyContract:
    """Behaviour that the scheduler relies on. Override ``make_policy``."""

    def make_policy(self) -> Policy:
        """A fresh policy, as the scheduler would make one."""
        raise NotImplementedError

    def test_it_has_a_name_and_decides(self) -> None:
        """The pool's page shows the name."""
        policy = self.make_policy()
        assert policy.name
        assert not self.make_policy().decide(PoolState(now=0.0, nodes=(), jobs=())).placements
        nodes = (Node(name="n0", devices=4),)
        assert not policy.decide(PoolState(now=0.0, nodes=nodes, jobs=())).placements

    def test_a_job_alone_is_started(self) -> None:
        """Free devices and one job that fits: nothing to wait for."""
        nodes = (Node(name="n0", devices=4),)
        state = PoolState(now=0.0, nodes=nodes, jobs=(_job("alone", requested=2, most=4),))
        assert self.make_policy().decide(state).placements["alone"]

    def test_nothing_new_is_put_on_a_node_that_leaves(self) -> None:
        """It would have to move again at once."""
        nodes = (Node(name="stays", devices=2), Node(name="leaves", devices=8, is_leaving=True))
        jobs = tuple(_job(f"j{number}", requested=2, most=4) for number in range(3))
        decision = self.make_policy().decide(PoolState(now=0.0, nodes=nodes, jobs=jobs))
        shares = [share for placed in decision.placements.values() for share in placed.shares]
        assert {node for node, _ in shares} == {"stays"}

    def test_no_device_is_given_twice_nor_one_that_is_not_there(self) -> None:
        """Nor to a job that is not of the pool."""
        for state in _states():
            _check_room(state, self.make_policy().decide(state))

    def test_sizes_are_within_the_limits_of_each_job(self) -> None:
        """Least, most and multiple; or exactly what it holds."""
        for state in _states():
            decision = self.make_policy().decide(state)
            jobs = {job.id: job for job in state.jobs}
            for name, placement in decision.placements.items():
                job, count = jobs[name], placement.devices
                if placement == job.held:
                    continue
                assert job.min_devices <= count <= job.max_devices, (state, name)
                assert count % job.multiple == 0, (state, name)

    def test_pinned_jobs_keep_exactly_what_they_hold(self) -> None:
        """They are being moved, or their owner said so."""
        for state in _states():
            placements = self.make_policy().decide(state).placements
            for job in state.jobs:
                if job.is_pinned and job.held:
                    assert placements.get(job.id) == job.held, state

    def test_the_same_state_gives_the_same_decision(self) -> None:
        """No clock, no chance: a decision can be explained and simulated."""
        for state in _states():
            one, other = (self.make_policy().decide(state) for _ in range(2))
            assert _plain(one) == _plain(other)

    def test_memory_may_be_lost(self) -> None:
        """The pool restarts: a fresh policy continues from what is held."""
        for state in _states():
            now = state
            for _ in range(3):
                decision = self.make_policy().decide(now)
                _check_room(now, decision)
                now = _carry_out(now, decision)


def _job(name: str, *, requested: int = 1, most: int = 8, multiple: int = 1) -> Demand:
    return Demand(
        id=name,
        submitted_at=0.0,
        speed=ConcaveSpeed(0.8),
        remaining=1000.0,
        min_devices=multiple,
        max_devices=most,
        asked_devices=requested,
        multiple=multiple,
    )


def _states() -> list[PoolState]:
    """Pools of a few nodes and jobs, some of which run already, some pinned."""
    return [_draw_state(random.Random(seed)) for seed in range(_STATES)]  # noqa: S311 - not a secret


def _draw_state(rng: random.Random) -> PoolState:
    nodes = tuple(
        Node(name=f"n{i}", devices=rng.choice([1, 2, 4, 8])) for i in range(rng.randint(1, 4))
    )
    left = {node.name: node.devices for node in nodes}
    jobs: list[Demand] = []
    for number in range(rng.randint(0, 7)):
        multiple = rng.choice([1, 1, 1, 2])
        requested = multiple * rng.randint(1, 4)
        job = _job(
            f"j{number}", requested=requested, most=requested * rng.randint(1, 3), multiple=multiple
        )
        job = replace(
            job,
            submitted_at=float(number),
            speed=ConcaveSpeed(rng.uniform(0.3, 1.0)),
            remaining=rng.uniform(10.0, 1e5),
            is_preemptible=rng.random() < 0.8,
        )
        node = rng.choice(nodes).name
        if rng.random() < 0.5 and left[node] >= requested:
            left[node] -= requested
            job = replace(
                job,
                held=Placement(((node, requested),)),
                held_since=50.0,
                served_device_s=10.0 * requested,
                is_pinned=rng.random() < 0.2,
            )
        jobs.append(job)
    return PoolState(now=100.0, nodes=nodes, jobs=tuple(jobs))


def _carry_out(state: PoolState, decision: Decision) -> PoolState:
    """The state a minute later, with everything placed as decided."""
    jobs = tuple(
        replace(job, held=decision.placements.get(job.id, NOTHING), held_since=state.now)
        for job in state.jobs
    )
    return replace(state, now=state.now + 60.0, jobs=jobs)


def _check_room(state: PoolState, decision: Decision) -> None:
    known = {job.id for job in state.jobs}
    used: dict[str, int] = {}
    for name, placement in decision.placements.items():
        assert name in known, f"{name} is no job of the pool"
        for node, count in placement.shares:
            assert count > 0, (name, placement)
            used[node] = used.get(node, 0) + count
    room = {node.name: node.devices for node in state.nodes}
    for node, count in used.items():
        assert count <= room.get(node, 0), f"{count} devices of {node} are given in {state}"


def _plain(decision: Decision) -> Mapping[str, Placement]:
    return {name: placement for name, placement in decision.placements.items() if placement}
