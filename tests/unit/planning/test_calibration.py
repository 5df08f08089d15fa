"""What runs teach: exact where it is Gaussian, damped where it is not, never worse on average."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.calibration import (
    MOST_RUNS,
    NOISE,
    SPREADS,
    Z_80,
    Calibration,
    RunMeasurement,
    apply,
    forget,
    learn,
    parse_calibration,
)

DEVICE, STACK, PRECISION, WORK = SPREADS["step_s"]
PRIOR_SD = math.hypot(DEVICE, STACK, PRECISION, WORK)


def figure(
    log_ratio: float,
    *,
    run: str = "run",
    device: str = "d",
    stack: str = "s",
    precision: str = "fp32",
    work: str = "w",
    at: float = 0.0,
    busy: float = 1.0,
) -> RunMeasurement:
    return RunMeasurement(
        run=run,
        at=at,
        device=device,
        stack=stack,
        precision=precision,
        work=work,
        predicted=2.0,
        measured=2.0 * math.exp(log_ratio),
        busy=busy,
    )


def taught(*figures: RunMeasurement) -> Calibration:
    return learn(Calibration(), figures)


def test_without_runs_nothing_is_corrected_and_all_is_unsure() -> None:
    belief = Calibration().belief("d", "s", "fp32", "w")
    assert (belief.factor, belief.runs) == (1.0, 0)
    assert belief.sd == pytest.approx(PRIOR_SD)


def test_beliefs_are_the_exact_posterior_of_a_joint_normal() -> None:
    """Ratios so small that none is damped; the noise is that of a device with three runs."""
    paths = [("d", "s", "fp32", "a"), ("d", "s", "fp32", "b"), ("d", "s", "bf16", "a")]
    seen = [0.05, -0.02, 0.03]
    figures = [
        figure(y, run=f"r{i}", stack=path[1], precision=path[2], work=path[3])
        for i, (path, y) in enumerate(zip(paths, seen, strict=True))
    ]
    calibration = taught(*figures)
    own = NOISE["step_s"] ** 2 * (1 + 3 / len(paths))
    spreads = SPREADS["step_s"]

    def covariance(a: tuple[str, ...], b: tuple[str, ...]) -> float:
        total = 0.0
        for depth, spread in enumerate(spreads):
            if a[: depth + 1] == b[: depth + 1]:
                total += spread**2
        return total

    joint = np.array([[covariance(a, b) for b in paths] for a in paths])
    gain = np.linalg.inv(joint + own * np.eye(len(paths)))
    for asked in (*paths, ("d", "s", "fp32", "new"), ("d", "other", "fp32", "a")):
        cross = np.array([covariance(asked, path) for path in paths])
        belief = calibration.belief(*asked)
        assert belief.mean == pytest.approx(cross @ gain @ np.array(seen), rel=1e-6)
        variance = covariance(asked, asked) - cross @ gain @ cross
        assert belief.variance == pytest.approx(variance, rel=1e-6)


def test_one_run_is_believed_in_part_and_more_for_its_own_work_than_for_another() -> None:
    calibration = taught(figure(0.3))
    own = calibration.belief("d", "s", "fp32", "w")
    other = calibration.belief("d", "s", "fp32", "x")
    elsewhere = calibration.belief("e", "s", "fp32", "w")
    assert 0.3 > own.mean > other.mean > elsewhere.mean == 0
    assert own.sd < other.sd < elsewhere.sd


def test_many_runs_are_believed_wholly() -> None:
    calibration = taught(*(figure(0.4, run=f"r{i}", work=f"w{i}") for i in range(40)))
    belief = calibration.belief("d", "s", "fp32", "new")
    assert belief.mean == pytest.approx(0.4, abs=0.03)
    assert belief.runs == 40


@pytest.mark.parametrize("ratio", [1.7, 2.0, 3.0, 20.0])
def test_a_lone_disturbed_run_is_hardly_believed_and_leaves_doubt(ratio: float) -> None:
    plausible = taught(figure(math.log(1.2))).belief("d", "s", "fp32", "w")
    disturbed = taught(figure(math.log(ratio))).belief("d", "s", "fp32", "w")
    assert 1.0 < disturbed.factor < 1.4
    assert disturbed.sd > plausible.sd > 0.13
    # The truth of a machine at rest lies within the interval that such a run leaves behind.
    assert disturbed.mean - 2 * Z_80 * disturbed.sd < 0


def test_two_runs_that_agree_are_believed_more_than_one_and_known_better() -> None:
    alone = taught(figure(math.log(2))).belief("d", "s", "fp32", "w")
    both = taught(figure(math.log(2), run="a"), figure(math.log(2), run="b"))
    agreed = both.belief("d", "s", "fp32", "w")
    assert agreed.mean > 1.5 * alone.mean
    assert agreed.sd < alone.sd


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.sampled_from("abc")), min_size=1, max_size=6),
    st.floats(0, 3),
    st.data(),
)
def test_where_a_run_took_longer_nothing_is_expected_to_take_less(
    runs: list[tuple[float, str]], more: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(runs) - 1))
    before = taught(*(figure(y, run=f"r{i}", work=w) for i, (y, w) in enumerate(runs)))
    raised = [(y + more * (i == place), w) for i, (y, w) in enumerate(runs)]
    after = taught(*(figure(y, run=f"r{i}", work=w) for i, (y, w) in enumerate(raised)))
    for path in (["d"], ["d", "s", "fp32", "a"], ["d", "s", "fp32", "new"]):
        assert after.belief(*path).mean >= before.belief(*path).mean - 1e-7


def test_a_run_on_a_busy_machine_teaches_less_the_busier_it_was() -> None:
    quiet, busy, crowded = (
        taught(figure(0.3, busy=busy)).belief("d", "s", "fp32", "w") for busy in (1.0, 1.3, 4.0)
    )
    assert quiet.mean > busy.mean > crowded.mean > 0
    assert quiet.sd < busy.sd < crowded.sd
    assert crowded.mean < 0.03


def test_many_alike_move_everything_and_a_wild_one_among_them_nothing() -> None:
    many = taught(*(figure(3.0, run=f"r{i}", work=f"w{i}") for i in range(12)))
    assert many.belief("d", "s", "fp32", "w0").mean == pytest.approx(3.0, abs=0.1)
    good = [figure(0.1, run=f"r{i}", work=f"w{i}") for i in range(6)]
    with_wild = taught(*good, figure(3.0, run="sick", work="w9"))
    shift = with_wild.belief("d").mean - taught(*good).belief("d").mean
    assert abs(shift) < 0.03


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_learning_never_makes_it_worse_on_average_over_what_there_may_be(runs: int) -> None:
    """Truths and runs drawn as the prior says; the error for the next run of the same work."""
    draw = np.random.default_rng(runs)
    before, after = [], []
    for _ in range(300):
        truth = draw.normal(0, PRIOR_SD)
        seen = truth + NOISE["step_s"] * draw.standard_t(4, size=runs)
        calibration = taught(*(figure(y, run=f"r{i}") for i, y in enumerate(seen)))
        before.append(truth**2)
        after.append((truth - calibration.belief("d", "s", "fp32", "w").mean) ** 2)
    assert np.mean(after) < 0.5 * np.mean(before)
    # Nor for another work of the same device, of which the runs say less.


@given(size=st.floats(NOISE["step_s"], 0.6), sign=st.sampled_from([-1, 1]))
def test_of_any_truth_off_by_more_than_noise_a_run_lessens_the_expected_error(
    size: float, sign: int
) -> None:
    """The expectation over the noise, by a rule that is exact for smooth functions of it."""
    truth = sign * size
    nodes, weights = np.polynomial.hermite_e.hermegauss(9)
    errors = [
        (truth - taught(figure(truth + NOISE["step_s"] * z)).belief("d", "s", "fp32", "w").mean)
        ** 2
        for z in nodes
    ]
    assert float(np.dot(weights, errors) / weights.sum()) <= truth**2


@given(size=st.floats(-NOISE["step_s"], NOISE["step_s"]))
def test_where_the_prediction_was_right_a_run_costs_less_than_its_own_noise(size: float) -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(9)
    errors = [
        (size - taught(figure(size + NOISE["step_s"] * z)).belief("d", "s", "fp32", "w").mean) ** 2
        for z in nodes
    ]
    assert float(np.dot(weights, errors) / weights.sum()) <= NOISE["step_s"] ** 2


def test_a_run_counts_once_and_the_newest_telling_stays() -> None:
    first = taught(figure(0.1, run="r"), figure(0.2, run="q"))
    again = learn(first, [figure(0.5, run="r", at=9.0)])
    assert sorted(each.run for each in again.figures) == ["q", "r"]
    assert next(e for e in again.figures if e.run == "r").log_ratio == pytest.approx(0.5)
    assert [each.run for each in forget(again, {"r"}).figures] == ["q"]


def test_the_oldest_are_forgotten_beyond_the_limit_and_unsound_figures_never_enter() -> None:
    many = [figure(0.1, run=f"r{i}", at=float(i)) for i in range(MOST_RUNS + 5)]
    kept = taught(*reversed(many)).figures
    assert len(kept) == MOST_RUNS
    assert min(each.at for each in kept) == 5.0
    broken = figure(0.0).model_copy(update={"measured": math.inf})
    assert taught(broken, figure(0.0).model_copy(update={"predicted": 0.0})).figures == ()


def test_it_survives_a_file_and_a_torn_file_teaches_nothing() -> None:
    calibration = taught(figure(0.3))
    text = calibration.model_dump_json()
    for broken in ('"predicted":0.0', '"predicted":-1.0'):
        spoilt = parse_calibration(text.replace('"predicted":2.0', broken))
        assert spoilt.belief("d").factor == 1.0
    assert parse_calibration(text) == calibration
    assert parse_calibration(text[:-5]) == Calibration()
    assert parse_calibration('{"version": 99, "figures": []}') == Calibration()


def test_columns_without_runs_stay_as_they_are() -> None:
    values, low, high = np.array([1.0, 2.0]), np.array([0.8, 0.7]), np.array([1.3, 1.2])
    found = apply(
        Calibration(), values, low, high, keys=[("d", "s", "fp32")], index=np.array([0, 0])
    )
    for mine, theirs in zip(found, (values, low, high), strict=True):
        np.testing.assert_allclose(mine, theirs)


def test_columns_are_moved_and_narrowed_by_the_runs_of_their_own_device() -> None:
    calibration = taught(*(figure(0.3, run=f"r{i}", work=f"w{i}") for i in range(20)))
    wide = math.exp(Z_80 * 0.3)
    columns = np.array([1.0, 1.0]), np.full(2, 1 / wide), np.full(2, wide)
    keys = [("d", "s", "fp32"), ("unmet", "s", "fp32")]
    values, low, high = apply(calibration, *columns, keys=keys, index=np.array([0, 1]))
    belief = calibration.belief("d", "s", "fp32")
    assert values[0] == pytest.approx(belief.factor)
    assert 1 / wide < low[0] < 1 < high[0] < wide
    assert high[0] >= math.exp(Z_80 * belief.sd) - 1e-9
    assert (values[1], low[1], high[1]) == pytest.approx((1.0, 1 / wide, wide))
