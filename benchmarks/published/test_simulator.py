"""The simulator is right only if it comes to the published results, job by job."""

from __future__ import annotations

import json

import pytest

from benchmarks.pool_parts.evidence import DEFAULT_FOLDER
from yunlu.lab.simulate_command import make_type_aware_policy
from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.profiles import Profiles, load_application, load_profiles, load_workload
from yunlu.lab.simulation.sia import (
    SLOWDOWN,
    TYPES,
    apply_sia_rules,
    build_sia_cluster,
    load_prior,
    load_typed_profiles,
)
from yunlu.lab.simulation.simulator import SimulationResult, SimulationRules, simulate
from yunlu.scheduler.policies import open_policy
from yunlu.scheduler.policy.goodput import Observations

PUBLIC, SIA = DEFAULT_FOLDER / "pollux", DEFAULT_FOLDER / "sia"


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    return load_profiles(PUBLIC / "profiles")


def replay(profiles: Profiles, policy: str, workload: int, load: str = "") -> SimulationResult:
    path = PUBLIC / f"workloads{load}" / f"workload-{workload}.csv"
    return simulate(load_workload(path), profiles, parse_cluster("16x4"), open_policy(policy))


def published(policy: str, workload: int, load: str = "1.0") -> dict[str, float]:
    path = PUBLIC / "published" / f"results-jobload-{policy}-{load}.json"
    return json.loads(path.read_text())["jcts"][f"workload-{workload}"]


def test_tiresias_comes_to_the_published_times_of_every_job(profiles: Profiles) -> None:
    outcome = replay(profiles, "tiresias", 6)
    assert outcome.jct_s == published("tiresias", 6)
    assert round(outcome.average_s, 1) == 3469.7
    assert all(job.crashes == 0 for job in outcome.jobs)


@pytest.mark.parametrize(
    ("workload", "average_s"), [(1, 2473.7), (2, 5145.0), (4, 3280.3), (8, 5079.7)]
)
def test_tiresias_comes_to_the_published_times_elsewhere(
    profiles: Profiles, workload: int, average_s: float
) -> None:
    outcome = replay(profiles, "tiresias", workload)
    assert outcome.jct_s == published("tiresias", workload)
    assert round(outcome.average_s, 1) == average_s


def test_optimus_comes_to_the_published_times_of_every_job(profiles: Profiles) -> None:
    outcome = replay(profiles, "optimus", 6)
    assert outcome.jct_s == published("optimus", 6)
    assert round(outcome.average_s, 1) == 5301.9


@pytest.mark.parametrize("load", ["0.5", "2.0"])
def test_tiresias_comes_to_the_published_times_at_other_loads(
    profiles: Profiles, load: str
) -> None:
    outcome = replay(profiles, "tiresias", 1, f"-{load}")
    assert outcome.jct_s == published("tiresias", 1, load)


def test_the_equivalent_of_sia_is_as_good_as_sia_and_ours_is_better() -> None:
    workload = load_workload(SIA / "workloads" / "philly" / "workload-6.csv")
    names = {job.application for job in workload.jobs}
    nodes = build_sia_cluster()
    found: dict[str, SimulationResult] = {}
    for policy in ("sia", "yunlu"):
        contestant = make_type_aware_policy(policy, SIA / "profiles", names, nodes, SLOWDOWN)
        found[policy] = simulate(
            workload,
            load_typed_profiles(SIA / "profiles", names),
            nodes,
            contestant.policy,
            rules=contestant.adapt_rules(apply_sia_rules(SimulationRules())),
            estimator=contestant.estimator,
        )
    # Sia's own simulator: 0.598 h on average, p99 8.36 h, 4.64 restarts of each job.
    assert found["sia"].average_s / 3600 == pytest.approx(0.598, rel=0.05)
    assert found["sia"].percentile_s(99) / 3600 == pytest.approx(8.36, rel=0.05)
    assert found["sia"].restarts_per_job == pytest.approx(4.64, rel=0.1)
    assert found["yunlu"].average_s < 0.92 * found["sia"].average_s
    assert found["yunlu"].percentile_s(99) <= found["sia"].percentile_s(99)


def test_the_public_pipeline_is_read_on_the_types_where_it_was_measured() -> None:
    application = load_application(SIA / "profiles" / "gpt_pmp", TYPES)
    assert application.stages == {"rtx": 8, "dgx-ext": 2}
    assert [*application.times] == ["dgx-ext", "rtx"]
    assert application.times["rtx"].find((8,), 6) == pytest.approx(
        (3 * 55 * 0.099 + 0.3275, 0.3275)
    )
    known = load_prior(SIA / "profiles", ["gpt_pmp"])
    seen = Observations(signature="gpt_pmp", limits=application.limits)
    assert [known.multiple(seen, kind) for kind in TYPES] == [1, 2, 8]
    assert known.limits(seen, "aws") is None
    speeds = [known.samples_per_s(seen, kind) or 0.0 for kind in ("dgx-ext", "rtx")]
    assert speeds[0] > speeds[1] > 0
