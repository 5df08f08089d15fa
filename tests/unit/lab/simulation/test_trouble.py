"""What goes wrong costs what it must, and nothing else."""

from __future__ import annotations

import math

import pytest

from tests.unit.lab.simulation.toy import BASE, EPOCHS, make_profiles, make_workload
from yunlu.hardware.fleet import Placement
from yunlu.lab.simulation.cluster import assign_device_rows, parse_cluster
from yunlu.lab.simulation.profiles import Profiles
from yunlu.lab.simulation.simulator import Faults, SimulationResult, SimulationRules, simulate
from yunlu.scheduler.policies import open_policy
from yunlu.scheduler.policy.values import Decision, PoolState

NODES = parse_cluster("2x4")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Profiles:
    return make_profiles(tmp_path_factory.mktemp("profiles") / "all")


@pytest.mark.parametrize(
    "faults",
    [
        Faults(crash_share=1.0),
        Faults(step_noise=0.1),
        Faults(length_error=2.0),
        Faults(crash_share=0.3, step_noise=0.1, length_error=2.0, interference=0.25),
    ],
)
def test_faults_delay_but_all_jobs_end_and_the_seed_decides(
    profiles: Profiles, faults: Faults
) -> None:
    jobs = [
        (60.0 * place, "light" if place % 2 else "heavy", 1 + place % 8, 128) for place in range(10)
    ]
    workload = make_workload(jobs)

    def run(faults: Faults, rules: SimulationRules) -> SimulationResult:
        return simulate(
            workload, profiles, NODES, open_policy("shortest"), faults=faults, rules=rules
        )

    for rules in (SimulationRules(), SimulationRules(is_event_driven=True)):
        outcome = run(faults, rules)
        assert outcome.jct_s == run(faults, rules).jct_s
        assert all(math.isfinite(job.ended_at) for job in outcome.jobs)
        assert assign_device_rows(outcome)
        if faults.crash_share == 1.0:
            assert all(job.crashes == 1 for job in outcome.jobs)
            assert outcome.average_s > run(Faults(), rules).average_s


def test_a_crash_loses_only_what_was_not_saved(profiles: Profiles) -> None:
    workload = make_workload([(0, "heavy", 1, BASE)])

    def run(faults: Faults) -> float:
        return simulate(workload, profiles, NODES, open_policy("fifo"), faults=faults).average_s

    sound_s = run(Faults())
    lost_s = run(Faults(crash_share=1.0, checkpoint_s=300)) - sound_s
    # Since the last checkpoint, the way to the next round, the wait, the restart.
    assert 0 < lost_s <= 300 + 60 + 30 + 60 + 30 + 60
    assert run(Faults(crash_share=1.0, checkpoint_s=1e9)) - sound_s > lost_s


def test_neighbours_on_several_nodes_slow_each_other_down(profiles: Profiles) -> None:
    class Spread:
        name = "spread"

        def decide(self, state: PoolState) -> Decision:
            return Decision(
                placements={job.id: Placement((("node-0", 1), ("node-1", 1))) for job in state.jobs}
            )

    both = make_workload([(0, "light", 2, 64), (0, "light", 2, 64)])
    alone = make_workload([(0, "light", 2, 64)])
    faults = Faults(interference=0.5)

    def train_s(outcome: SimulationResult) -> float:
        return outcome.jobs[0].ended_at - 90

    calm = simulate(alone, profiles, NODES, Spread(), faults=faults)
    crowded = simulate(both, profiles, NODES, Spread(), faults=faults)
    assert train_s(crowded) == pytest.approx(2 * train_s(calm), abs=2 * EPOCHS)
