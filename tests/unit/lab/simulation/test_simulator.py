"""Properties of a replay on applications whose rates are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.lab.simulation.toy import BASE, EPOCHS, make_profiles, make_workload
from yunlu.hardware.fleet import Node, Placement
from yunlu.lab.simulate_command import make_policy
from yunlu.lab.simulation.cluster import assign_device_rows, parse_cluster
from yunlu.lab.simulation.profiles import Application, Profiles, SimulationError
from yunlu.lab.simulation.simulator import Faults, SimulationResult, SimulationRules, simulate
from yunlu.scheduler.policies import open_policy
from yunlu.scheduler.policy.goodput import BatchSplit, Observations, SpeedModel, starting_batch
from yunlu.scheduler.policy.values import Decision, PoolState

NODES = parse_cluster("2x4")
JOBS = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.sampled_from(["light", "heavy"]),
        st.integers(1, 8),
        st.sampled_from([32, 64, 128, 256]),
    ),
    min_size=1,
    max_size=12,
)

BASELINES = ("fifo", "backfill", "shortest", "fair", "tiresias", "optimus", "fixed")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Profiles:
    return make_profiles(tmp_path_factory.mktemp("profiles") / "all")


class Guess:
    """A model that knows nothing and takes whatever batch is smallest."""

    def __init__(self, seen: Observations) -> None:
        self.seen = seen

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return np.asarray(devices, dtype=np.float64)

    def choose_batch(self, device_type: str, nodes: int, devices: int) -> BatchSplit:
        return starting_batch(self.seen.limits, devices)


class Watcher:
    """An estimator that remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[Observations] = []

    def __call__(self, seen: Observations, before: SpeedModel | None) -> Guess:
        self.shown.append(seen)
        return Guess(seen)


def best_rate(application: Application) -> float:
    """Progress a second with the best shape and batch of any epoch: nothing can be faster."""
    times = application.times["device"]
    best = 0.0
    for devices in range(1, 9):
        shape = (devices,) if devices <= 4 else (4, devices - 4)
        for local in range(4, 65):
            for total in (devices * local, 2 * devices * local):
                if not application.limits.base <= total <= application.limits.most:
                    continue
                found = times.find(shape, local)
                assert found is not None
                step_s = found[0] + (found[0] - found[1]) * (total // devices // local - 1)
                for epoch in range(application.epochs):
                    noise = application.noise(total, epoch)
                    scale = total / BASE
                    gain = (noise.var + noise.sqr) / (noise.var / scale + noise.sqr)
                    best = max(best, gain / step_s)
    return best


def check(outcome: SimulationResult, profiles: Profiles, restart_s: float) -> None:
    """What must hold whatever the policy."""
    for node in outcome.nodes:
        changes = sorted(
            (at, dict(placement.shares).get(node.name, 0) - dict(before.shares).get(node.name, 0))
            for job in outcome.jobs
            for (_, before), (at, placement) in zip(
                [(0.0, Placement()), *job.placements], job.placements, strict=False
            )
        )
        held = 0
        for _, change in changes:  # of one instant, what is given back sorts first
            held += change
            assert held <= node.devices
        assert held == 0
    for job, seats in zip(outcome.jobs, assign_device_rows(outcome), strict=True):
        application = profiles.find(job.application)
        assert math.isfinite(job.ended_at)
        # Every end of an epoch is rounded to a second.
        least_s = application.length / best_rate(application) + restart_s - EPOCHS
        assert job.jct_s >= least_s
        seated = sum((high - low) * (end - start) for low, high, start, end in seats)
        assert seated == pytest.approx(job.device_s)


@pytest.mark.parametrize("policy", BASELINES)
@given(jobs=JOBS)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_job_ends_and_no_device_is_held_twice(
    profiles: Profiles, policy: str, jobs: list[tuple[float, str, int, int]]
) -> None:
    workload = make_workload(sorted(jobs))
    outcome = simulate(workload, profiles, NODES, open_policy(policy))
    check(outcome, profiles, 30)
    assert simulate(workload, profiles, NODES, open_policy(policy)).jct_s == outcome.jct_s


@pytest.mark.parametrize("name", ["yunlu", "yunlu-blind"])
def test_our_own_policy_is_replayed_by_name(profiles: Profiles, name: str) -> None:
    kinds = ("light", "heavy")
    workload = make_workload([(40 * n, kinds[n % 2], 1 + n % 8, 64) for n in range(12)])

    def run() -> SimulationResult:
        contestant = make_policy(name)
        rules = contestant.adapt_rules(SimulationRules())
        return simulate(
            workload,
            profiles,
            NODES,
            contestant.policy,
            rules=rules,
            estimator=contestant.estimator,
        )

    outcome = run()
    check(outcome, profiles, 30)
    assert outcome.jct_s == run().jct_s


def test_a_lonely_job_takes_its_steps_and_one_restart(profiles: Profiles) -> None:
    workload = make_workload([(10, "light", 1, BASE)])
    outcome = simulate(workload, profiles, NODES, open_policy("fifo"))
    # One device, the base batch: one step of progress in 0.02 + 0.005 * 32 seconds.
    application = profiles.find("light")
    epoch_s = round(application.ends[1] * 0.18)
    assert outcome.jobs[0].ended_at == 60 + 30 + EPOCHS * epoch_s
    assert outcome.jobs[0].restarts == 0
    assert outcome.jobs[0].wait_s == 50
    assert outcome.jobs[0].device_s == 30 + EPOCHS * epoch_s


def test_idle_time_is_skipped_but_rounds_stay_on_their_grid(profiles: Profiles) -> None:
    workload = make_workload([(0, "light", 1, BASE), (1_000_001, "light", 1, BASE)])
    outcome = simulate(workload, profiles, NODES, open_policy("fifo"))
    second = outcome.jobs[1]
    assert second.placements[0][0] == 1_000_020
    assert len(outcome.rounds) < 100


def test_events_start_jobs_when_they_come_and_when_others_end(profiles: Profiles) -> None:
    workload = make_workload([(10, "light", 8, 256), (11, "light", 8, 256)])
    outcome = simulate(
        workload, profiles, NODES, open_policy("fifo"), rules=SimulationRules(is_event_driven=True)
    )
    first, second = outcome.jobs
    assert first.wait_s == 0
    assert second.placements[0][0] == first.ended_at


def test_moving_to_like_devices_is_free_where_the_rules_say_so(profiles: Profiles) -> None:
    class Wander:
        name = "wander"

        def decide(self, state: PoolState) -> Decision:
            node = state.nodes[int(state.now // 60) % 2].name
            return Decision(placements={state.jobs[0].id: Placement(((node, 1),))})

    workload = make_workload([(0, "light", 1, BASE)])
    free = simulate(
        workload, profiles, NODES, Wander(), rules=SimulationRules(restarts_on_move=False)
    )
    dear = simulate(workload, profiles, NODES, Wander())
    assert free.jobs[0].restarts == 0
    assert dear.jobs[0].restarts > 5
    assert dear.average_s > 1.5 * free.average_s


def test_a_policy_that_gives_what_is_not_there_is_found_out(profiles: Profiles) -> None:
    class Greedy:
        name = "greedy"

        def __init__(self, placement: Placement) -> None:
            self._placement = placement

        def decide(self, state: PoolState) -> Decision:
            return Decision(placements={job.id: self._placement for job in state.jobs})

    workload = make_workload([(0, "light", 1, BASE)])
    with pytest.raises(SimulationError, match="gave away 5 devices of node-0"):
        simulate(workload, profiles, NODES, Greedy(Placement((("node-0", 5),))))
    mixed = parse_cluster("1x4+1x4:other")
    both = Placement(((mixed[0].name, 1), (mixed[1].name, 1)))
    with pytest.raises(SimulationError, match="where it cannot run"):
        simulate(workload, profiles, mixed, Greedy(both))
    with pytest.raises(SimulationError, match="where it cannot run"):
        simulate(workload, profiles, mixed, Greedy(Placement(((mixed[1].name, 1),))))
    with pytest.raises(SimulationError, match="which has 0"):
        simulate(workload, profiles, NODES, Greedy(Placement((("elsewhere", 1),))))


def test_a_policy_that_never_serves_is_stopped(profiles: Profiles) -> None:
    class Idle:
        name = "idle"

        def decide(self, state: PoolState) -> Decision:
            return Decision(placements={})

    workload = make_workload([(0, "light", 1, BASE)])
    with pytest.raises(SimulationError, match="idle has not ended 1 jobs"):
        simulate(workload, profiles, NODES, Idle(), rules=SimulationRules(limit_s=86400))


def test_an_estimator_sees_what_a_live_pool_would(profiles: Profiles) -> None:
    watcher = Watcher()
    workload = make_workload([(0, "light", 2, 64), (0, "light", 4, 64)])
    simulate(workload, profiles, NODES, open_policy("fixed"), estimator=watcher)
    first, last = watcher.shown[0], watcher.shown[-1]
    assert first.timings == ()
    assert first.noise is None
    timing = last.timings[0]
    assert (timing.device_type, timing.nodes) == ("device", 1)
    local = timing.local_batch
    assert timing.step_s == pytest.approx(0.02 + 0.005 * local + 0.01 * timing.devices + 0.02)
    assert timing.accumulate_s == pytest.approx(0.02 + 0.005 * local)
    assert last.noise is not None
    assert last.noise.var == pytest.approx(4.0 * EPOCHS)
    assert [point.noise.var for point in last.noise_history] == [4.0 * n for n in range(1, 7)]
    assert last.shared_timings == ()


def test_nobody_knows_what_a_step_shows_before_it_is_made(profiles: Profiles) -> None:
    known: list[tuple[float, int]] = []

    class Note:
        name = "note"

        def decide(self, state: PoolState) -> Decision:
            speed = state.jobs[0].speed
            assert isinstance(speed, Guess)
            known.append((state.now, len(speed.seen.timings)))
            return Decision(placements={state.jobs[0].id: Placement((("node-0", 2),))})

    # The second comes while the first still restarts.
    workload = make_workload([(10, "light", 2, 64), (35, "light", 2, 64)])
    rules = SimulationRules(is_event_driven=True)
    simulate(workload, profiles, NODES, Note(), estimator=Watcher(), rules=rules)
    assert known[:3] == [(10, 0), (35, 0), (60, 1)]


def test_what_is_not_new_stays_the_same_object(profiles: Profiles) -> None:
    watcher = Watcher()
    workload = make_workload([(0, "light", 2, 64)])
    simulate(workload, profiles, NODES, open_policy("fixed"), estimator=watcher)
    with_timing = [seen for seen in watcher.shown if seen.timings]
    assert len({id(seen.timings) for seen in with_timing}) == 1
    assert len({id(seen) for seen in watcher.shown}) == len(watcher.shown)


def test_jobs_learn_from_each_other_where_the_rules_say_so(profiles: Profiles) -> None:
    watcher = Watcher()
    workload = make_workload([(0, "light", 2, 64), (3000, "light", 2, 64), (3000, "heavy", 1, 64)])
    simulate(
        workload,
        profiles,
        NODES,
        open_policy("fixed"),
        estimator=watcher,
        rules=SimulationRules(is_shared=True),
    )
    late = [seen for seen in watcher.shown if seen.signature == "light" and not seen.timings][-1]
    assert late.shared_timings
    assert len(late.shared_noise) == EPOCHS
    heavy = [seen for seen in watcher.shown if seen.signature == "heavy"]
    assert heavy[0].shared_timings == ()


def test_length_is_told_only_where_it_is_declared(profiles: Profiles) -> None:
    told: list[float | None] = []

    class Note:
        name = "note"

        def decide(self, state: PoolState) -> Decision:
            told.extend(job.remaining for job in state.jobs)
            placements = {state.jobs[0].id: Placement((("node-0", 1),))}
            return Decision(placements=placements)

    workload = make_workload([(0, "light", 1, BASE)])
    simulate(workload, profiles, NODES, Note())
    whole = profiles.find("light").length * BASE
    assert told[0] == whole
    assert all(later is not None and 0 < later <= whole for later in told)
    told.clear()
    simulate(workload, profiles, NODES, Note(), rules=SimulationRules(declares_length=False))
    assert set(told) == {None}
    told.clear()
    simulate(workload, profiles, NODES, Note(), faults=Faults(length_error=2.0, seed=3))
    assert told[0] is not None
    assert whole / 2 <= told[0] <= whole * 2
    assert told[0] != whole
    assert all(later is not None and later > 0 for later in told)


def test_slowdown_and_restart_can_differ_by_application(profiles: Profiles) -> None:
    workload = make_workload([(0, "light", 1, BASE), (0, "heavy", 1, BASE)])
    rules = SimulationRules(
        slowdown_by_application={"light": 2.0}, restart_s_by_application={"heavy": 90}
    )
    usual = simulate(workload, profiles, NODES, open_policy("fifo"))
    changed = simulate(workload, profiles, NODES, open_policy("fifo"), rules=rules)
    light, heavy = changed.jobs
    assert light.ended_at - 90 == pytest.approx(2 * (usual.jobs[0].ended_at - 90), abs=EPOCHS)
    assert heavy.ended_at - usual.jobs[1].ended_at == 60


def test_dollars_are_those_of_all_nodes_to_the_end(profiles: Profiles) -> None:
    nodes = tuple(Node(name=f"n{place}", devices=4, dollars_per_hour=3.6) for place in range(2))
    outcome = simulate(make_workload([(0, "light", 1, BASE)]), profiles, nodes, open_policy("fifo"))
    assert outcome.dollars == pytest.approx(7.2 * outcome.makespan_s / 3600)
    summary = outcome.summary()
    assert summary["jct_average_s"] == outcome.average_s
    assert 0 < summary["utilisation"] <= 1 / 8
