"""Pools of several device types: what is known beforehand, what is learnt, and whole workloads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.lab.simulation.toy import make_workload, write_application
from yunlu.lab.simulate_command import TYPE_AWARE, make_type_aware_policy
from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.profiles import Profiles
from yunlu.lab.simulation.sia import (
    SiaEstimator,
    TablePrior,
    load_prior,
    load_typed_profiles,
)
from yunlu.lab.simulation.simulator import SimulationRules, simulate
from yunlu.scheduler.policy.goodput import GradientNoise, Observations, StepTiming
from yunlu.scheduler.policy.speed_by_type import (
    CrossTypeFitter,
    NoDeviceTypePrior,
    tabulate_goodputs,
)
from yunlu.scheduler.policy.values import Demand

TYPES = ("fast", "slow")
NODES = parse_cluster("2x4:fast+3x4:slow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One program that is four times as slow on one type as on the other."""
    folder = tmp_path_factory.mktemp("profiles")
    write_application(folder / "toy")
    write_application(folder / "spare", seconds=4.0)
    for table in ("placements", "scalability"):
        (folder / "toy" / f"{table}.csv").rename(folder / "toy" / f"{table}-fast.csv")
        (folder / "spare" / f"{table}.csv").rename(folder / "toy" / f"{table}-slow.csv")
    return folder


@pytest.fixture(scope="module")
def measured(folder: Path) -> tuple[Profiles, TablePrior]:
    return load_typed_profiles(folder, ["toy"], TYPES), load_prior(folder, ["toy"], TYPES)


def observe(profiles: Profiles, *timings: StepTiming) -> Observations:
    return Observations(
        signature="toy",
        limits=profiles.find("toy").limits,
        timings=timings,
        noise=GradientNoise(sqr=1.0, var=4.0) if timings else None,
    )


def test_tables_tell_what_fits_and_how_fast_one_device_is(
    measured: tuple[Profiles, TablePrior],
) -> None:
    profiles, known = measured
    seen = observe(profiles)
    fast, slow = (known.samples_per_s(seen, kind) for kind in TYPES)
    assert fast is not None
    assert slow is not None
    assert fast == pytest.approx(4 * slow)
    assert known.local_most(seen, "fast", 1, 4) == 64
    assert known.limits(seen, "moon") is None
    assert known.local_most(seen, "moon", 1, 1) is None


def test_a_type_never_run_on_is_told_from_the_one_that_was(
    measured: tuple[Profiles, TablePrior],
) -> None:
    profiles, known = measured
    timings = tuple(
        StepTiming("fast", 1, devices, local, 0.02 + 0.005 * local, 0.02 + 0.005 * local + sync)
        for devices, sync in ((1, 0.0), (2, 0.04), (4, 0.06))
        for local in (8, 32)
    )
    model = CrossTypeFitter(types=TYPES, prior=known)(observe(profiles, *timings), None)
    one, four = np.array([1]), np.array([4])
    for devices in (one, four):
        fast, slow = (model.goodput(kind, one, devices)[0] for kind in TYPES)
        assert fast == pytest.approx(4 * slow, rel=1e-6)
    assert (model.goodput("moon", one, four) == 0).all()
    # More than twice of what was seen is not believed.
    assert model.goodput("fast", np.array([3]), np.array([12]))[0] == 0
    blind = CrossTypeFitter(types=TYPES, prior=NoDeviceTypePrior())(
        observe(profiles, *timings), None
    )
    assert blind.goodput("slow", one, one) == pytest.approx(blind.goodput("fast", one, one))


def test_the_table_is_what_each_job_says_for_itself(
    measured: tuple[Profiles, TablePrior],
) -> None:
    profiles, known = measured
    timing = StepTiming("slow", 1, 1, 32, 0.7, 0.7)
    fitter, sia = (
        CrossTypeFitter(types=TYPES, prior=known),
        SiaEstimator(prior=known, node_devices=dict.fromkeys(TYPES, 4)),
    )
    speeds = [fitter(observe(profiles, timing), None), sia(observe(profiles, timing), None)]
    jobs = [Demand(id=str(at), submitted_at=0.0, speed=speed) for at, speed in enumerate(speeds)]
    table = tabulate_goodputs(jobs, ["slow", "fast", "slow"], [1, 1, 1], [1, 2, 2])
    for row, speed in enumerate(speeds):
        assert table[row, 0] == speed.goodput("slow", np.array([1]), np.array([1]))[0]
        assert table[row, 1] == speed.goodput("fast", np.array([1]), np.array([2]))[0]
    assert (table > 0).all()


def test_sia_first_tries_one_device_anywhere_and_then_doubles(
    measured: tuple[Profiles, TablePrior],
) -> None:
    profiles, known = measured
    estimator = SiaEstimator(prior=known, node_devices=dict.fromkeys(TYPES, 4))
    sizes = np.array([1, 2, 4])
    new = estimator(observe(profiles), None)
    for kind in TYPES:
        assert new.goodput(kind, np.array([1, 1, 1]), sizes).tolist() == [1.0, 0.0, 0.0]
    timing = StepTiming("slow", 1, 1, 32, 0.7, 0.7)
    seen = estimator(observe(profiles, timing), new)
    goodput = seen.goodput("slow", np.array([1, 1, 1]), sizes)
    assert (goodput[:2] > 0).all()
    assert goodput[2] == 0
    assert seen.goodput("fast", np.array([1, 1, 1]), sizes) == pytest.approx(4 * goodput)


@pytest.mark.parametrize("policy", TYPE_AWARE)
def test_a_workload_is_replayed_to_its_end_the_same_each_time(
    measured: tuple[Profiles, TablePrior], folder: Path, policy: str
) -> None:
    workload = make_workload([(60.0 * at, "toy", 1, 64) for at in range(8)])
    rules = SimulationRules(
        restart_s_by_application={"toy": 50.0},
        slowdown_by_application={"toy": 1.5},
        restarts_on_move=False,
    )

    def replay() -> tuple[dict[str, float], float]:
        contestant = make_type_aware_policy(policy, folder, ["toy"], NODES, {"toy": 1.5})
        outcome = simulate(
            workload,
            measured[0],
            NODES,
            contestant.policy,
            rules=contestant.adapt_rules(rules),
            estimator=contestant.estimator,
        )
        return outcome.jct_s, outcome.restarts_per_job

    times, restarts = replay()
    assert len(times) == 8
    assert all(0 < jct_s < 1e5 for jct_s in times.values())
    assert restarts < 8
    assert replay() == (times, restarts)
