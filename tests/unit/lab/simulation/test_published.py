"""The simulator is right only if it comes to the published results, job by job."""

from __future__ import annotations

import json

import pytest

from tests.unit.lab.simulation.toy import PUBLIC, needs_public_data
from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.outcome import Outcome
from yunlu.lab.simulation.profiles import Profiles, load_profiles
from yunlu.lab.simulation.simulator import simulate
from yunlu.lab.simulation.workload import load_workload
from yunlu.scheduler.policy.baselines import BASELINES

pytestmark = needs_public_data


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    return load_profiles(PUBLIC / "profiles")


def replay(profiles: Profiles, policy: str, workload: int, load: str = "") -> Outcome:
    path = PUBLIC / f"workloads{load}" / f"workload-{workload}.csv"
    return simulate(load_workload(path), profiles, parse_cluster("16x4"), BASELINES[policy]())


def published(policy: str, workload: int, load: str = "1.0") -> dict[str, float]:
    path = PUBLIC / "published" / f"results-jobload-{policy}-{load}.json"
    return json.loads(path.read_text())["jcts"][f"workload-{workload}"]


def test_tiresias_comes_to_the_published_times_of_every_job(profiles: Profiles) -> None:
    outcome = replay(profiles, "tiresias", 6)
    assert outcome.jct_s == published("tiresias", 6)
    assert round(outcome.average_s, 1) == 3469.7
    assert all(job.crashes == 0 for job in outcome.jobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "average_s"), [(1, 2473.7), (2, 5145.0), (4, 3280.3), (8, 5079.7)]
)
def test_tiresias_comes_to_the_published_times_elsewhere(
    profiles: Profiles, workload: int, average_s: float
) -> None:
    outcome = replay(profiles, "tiresias", workload)
    assert outcome.jct_s == published("tiresias", workload)
    assert round(outcome.average_s, 1) == average_s


@pytest.mark.slow
def test_optimus_comes_to_the_published_times_of_every_job(profiles: Profiles) -> None:
    outcome = replay(profiles, "optimus", 6)
    assert outcome.jct_s == published("optimus", 6)
    assert round(outcome.average_s, 1) == 5301.9


@pytest.mark.slow
@pytest.mark.parametrize("load", ["0.5", "2.0"])
def test_tiresias_comes_to_the_published_times_at_other_loads(
    profiles: Profiles, load: str
) -> None:
    outcome = replay(profiles, "tiresias", 1, f"-{load}")
    assert outcome.jct_s == published("tiresias", 1, load)
