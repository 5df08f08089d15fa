"""Models that are cut into stages: several devices hold a copy, other numbers on each type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.lab.simulation.toy import make_workload, write_application
from yunlu.lab.simulate_command import TYPE_AWARE, make_type_aware_policy
from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.profiles import SimulationError, load_application
from yunlu.lab.simulation.sia import load_prior, load_typed_profiles
from yunlu.lab.simulation.simulator import SimulationRules, simulate
from yunlu.scheduler.policy.goodput import GradientNoise, Observations, StepTiming
from yunlu.scheduler.policy.speed_by_type import CrossTypeFitter

TYPES = ("fast", "slow")
NODES = parse_cluster("2x4:fast+3x4:slow")
STAGES = {"fast": 2, "slow": 4}
STAGE_S = {"fast": 0.01, "slow": 0.02}
MICRO = 16


def write_pipeline(directory: Path) -> None:
    """On the fast type two devices hold a copy, on the slow one four."""
    write_application(directory)
    for table in ("placements", "scalability"):
        (directory / f"{table}.csv").unlink()
    for kind, stages in STAGES.items():
        rows = ["local_bsz,step_time,sync_time,placement"]
        shapes = [str(count) for count in range(stages, 5, stages)] + ["44", "444"]
        for copies, shape in enumerate(shapes, start=1):
            # The sum may take longer than one stage's forward.
            rows += [f"{local},{local * STAGE_S[kind]},{0.1 * copies},{shape}" for local in (1, 2)]
        (directory / f"placements-{kind}.csv").write_text("\n".join(rows) + "\n")
    (directory / "facts.yaml").write_text(f"stages: {STAGES}\nmicro_batches: {MICRO}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    write_pipeline(folder / "cut")
    write_application(folder / "toy")
    for table in ("placements", "scalability"):
        text = (folder / "toy" / f"{table}.csv").read_text()
        for kind in TYPES:
            (folder / "toy" / f"{table}-{kind}.csv").write_text(text)
    return folder


@pytest.mark.parametrize(("kind", "local"), [("fast", 8), ("slow", 4)])
def test_pass_of_a_pipeline_takes_its_micro_batches_and_its_filling(
    folder: Path, kind: str, local: int
) -> None:
    application = load_application(folder / "cut", TYPES)
    assert (application.stages, application.multiple) == (STAGES, 2)
    stages = STAGES[kind]
    times = application.times[kind].find((stages,), local)
    assert times is not None
    pass_s = 3 * (stages - 1 + MICRO) * STAGE_S[kind]
    assert times == pytest.approx((pass_s + 0.1, 0.1))
    assert local * stages == MICRO  # each device's share of what one copy takes in


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ("stages: {fast: 2}", "number of stages is missing on slow"),
        ("stages: {fast: 2, slow: 3}", "are no multiple of 3 stages"),
        ("stages: {fast: 2, slow: 4}\nmicro_batches: 6", "cannot be shared by 4 stages"),
    ],
)
def test_stages_that_do_not_fit_the_tables_are_refused(
    tmp_path: Path, facts: str, words: str
) -> None:
    write_pipeline(tmp_path / "cut")
    (tmp_path / "cut" / "facts.yaml").write_text(facts)
    with pytest.raises(SimulationError, match=words):
        load_application(tmp_path / "cut", TYPES)


def test_only_whole_copies_are_worth_anything_and_each_is_kept_full(folder: Path) -> None:
    profiles = load_typed_profiles(folder, ["cut"], TYPES)
    known = load_prior(folder, ["cut"], TYPES)
    limits = profiles.find("cut").limits
    fitter = CrossTypeFitter(types=TYPES, prior=known)
    devices = np.array([1, 2, 3, 4, 8])
    nodes = np.array([1, 1, 1, 1, 2])
    new = fitter(Observations(signature="cut", limits=limits), None)
    assert (new.goodput("fast", nodes, devices) > 0).tolist() == [False, True, False, False, False]
    assert (new.goodput("slow", nodes, devices) > 0).tolist() == [False, False, False, True, False]
    seen = Observations(
        signature="cut",
        limits=limits,
        timings=(StepTiming("fast", 1, 4, 8, 0.51, 0.71),),
        noise=GradientNoise(sqr=1.0, var=40.0),
    )
    model = fitter(seen, new)
    assert (model.goodput("fast", nodes, devices) > 0).tolist() == [False, True, False, True, True]
    assert (model.goodput("slow", nodes, devices) > 0).tolist() == [False, False, False, True, True]
    for kind, count in (("fast", 2), ("fast", 8), ("slow", 4), ("slow", 8)):
        batch = model.choose_batch(kind, 1 + (count > 4), count)
        assert batch.local == MICRO // STAGES[kind]
        assert batch.total(count) % MICRO == 0
        assert limits.base <= batch.total(count) <= limits.most


@pytest.mark.parametrize("policy", TYPE_AWARE)
def test_pipelines_run_beside_others_on_whole_copies_only(folder: Path, policy: str) -> None:
    names = ["cut", "toy"]
    workload = make_workload(
        [(60.0 * at, names[at % 2], 4 if at % 2 == 0 else 1, 64) for at in range(4)]
    )
    contestant = make_type_aware_policy(policy, folder, names, NODES)
    outcome = simulate(
        workload,
        load_typed_profiles(folder, names, TYPES),
        NODES,
        contestant.policy,
        rules=contestant.adapt_rules(SimulationRules(restarts_on_move=False)),
        estimator=contestant.estimator,
    )
    assert len(outcome.jct_s) == 4
    types = {node.name: node.type for node in NODES}
    held = [
        (types[placement.shares[0][0]], placement.devices)
        for job in outcome.jobs
        if job.name.startswith("cut")
        for _, placement in job.placements
        if placement
    ]
    assert held
    assert all(devices % STAGES[kind] == 0 for kind, devices in held)


def test_pipeline_is_known_on_the_types_where_it_was_measured(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "cut")
    types = (*TYPES, "never measured")
    application = load_application(tmp_path / "cut", types)
    assert application.stages == STAGES
    assert {*application.times} == {*TYPES}
    known = load_prior(tmp_path, ["cut"], types)
    seen = Observations(signature="cut", limits=application.limits)
    assert [known.multiple(seen, kind) for kind in types] == [2, 4, 1]
    assert known.limits(seen, "never measured") is None
    speeds = [known.samples_per_s(seen, kind) or 0.0 for kind in TYPES]
    assert speeds[0] > speeds[1] > 0
