"""The model behind our own method: curves, ranks and paces."""

from __future__ import annotations

import numpy as np
import pytest

from yunlu.tuning.encoding import Encoder
from yunlu.tuning.methods.stopping import find_milestones
from yunlu.tuning.methods.surrogate import (
    CurveObservations,
    LikelihoodGradient,
    Posterior,
    default_kernel,
    fit_kernel,
    make_query,
    make_scale,
)
from yunlu.tuning.methods.trial_table import RungTimeModel, TrialTable
from yunlu.tuning.values import Dimension, Point, Trial, TrialState

OWNERS = np.arange(3)


def _observe(seed: int = 0) -> CurveObservations:
    rng = np.random.default_rng(seed)
    features = np.repeat(rng.random((8, 3)), 3, axis=0)
    times = np.log(np.tile([1.0, 3.0, 9.0], 8))
    values = np.sin(4.0 * features[:, 0]) - 0.3 * times + 0.05 * rng.normal(size=24)
    values = (values - values.mean()) / values.std()
    return CurveObservations(features, times, np.repeat(np.arange(8), 3), values, np.zeros(24))


def test_the_slope_of_the_likelihood_is_right() -> None:
    slope = LikelihoodGradient(_observe(), OWNERS, 3)
    usual = default_kernel(OWNERS).vector
    vector = usual + 0.2 * np.random.default_rng(1).normal(size=len(usual))
    steps = 1e-5 * np.eye(len(vector))
    measured = [(slope.at(vector + s)[0] - slope.at(vector - s)[0]) / 2e-5 for s in steps]
    assert slope.at(vector)[1] == pytest.approx(measured, rel=1e-4, abs=1e-5)


def test_fitting_finds_which_dimension_matters() -> None:
    lengths = fit_kernel(_observe(), OWNERS).lengths
    assert lengths[0] < lengths[1]
    assert lengths[0] < lengths[2]


def test_what_was_seen_is_known_and_what_lies_ahead_less() -> None:
    seen = _observe()
    posterior = Posterior(seen, fit_kernel(seen, OWNERS))
    mean, deviation = posterior.predict(seen)
    assert np.abs(mean - seen.values).max() < 0.3
    last = np.arange(2, 24, 3)
    ahead = make_query(seen.features[last], np.log(np.full(8, 50.0)), seen.trials[last])
    assert (posterior.predict(ahead)[1] > deviation[last]).all()


def test_believing_in_what_runs_changes_no_mean_but_makes_it_known() -> None:
    seen = _observe()
    posterior = Posterior(seen, default_kernel(OWNERS))
    runs = make_query(np.full((1, 3), 0.5), np.log([20.0]), np.array([8]))
    near = make_query(
        np.array([[0.5, 0.5, 0.5], [0.1, 0.9, 0.4]]), np.log([20.0, 5.0]), np.array([-1, 2])
    )
    mean, deviation = posterior.predict(near)
    posterior.add_pending(runs)
    again, surer = posterior.predict(near)
    assert again == pytest.approx(mean)
    assert (surer <= deviation + 1e-9).all()
    assert surer[0] < 0.8 * deviation[0]


def test_ranks_do_not_see_how_far_outliers_are() -> None:
    values = np.array([0.1, 0.2, 0.3, 10.0, np.inf])
    rated = make_scale(values).rate(values)
    farther = np.array([0.1, 0.2, 0.3, 1e9, np.inf])
    assert (np.diff(rated[:4]) > 0).all()
    assert rated[4] == rated[3]
    assert make_scale(farther).rate(farther) == pytest.approx(rated)


def test_stations_end_with_the_training() -> None:
    assert find_milestones(51, 0.06, 1.4) == [3, 4, 6, 8, 11, 15, 21, 29, 41, 51]
    assert find_milestones(1, 0.06, 1.4) == [1]
    assert find_milestones(5, 0.06, 1.4) == [1, 2, 3, 4, 5]


def test_paces_are_predicted_from_settings() -> None:
    encoder = Encoder((Dimension(name="width", low=1, high=256, log=True),))
    trials = [
        Trial(
            number=number,
            params={"width": 2.0**number},
            state=TrialState.HELD,
            points=(Point(2, (1.0,), 2.0 * 2.0**number),),
        )
        for number in range(8)
    ]
    rung_times = RungTimeModel(TrialTable(encoder, seed=0).update(trials, [1, 2]))
    told = rung_times.predict(encoder.encode([{"width": 3.0}, {"width": 200.0}]))
    assert told == pytest.approx([3.0, 200.0], rel=0.25)


def test_a_survey_that_is_shown_another_study_forgets_the_first() -> None:
    encoder = Encoder((Dimension(name="a"),))
    table = TrialTable(encoder, seed=0)
    for value in (1.0, 2.0):
        point = Point(1, (value,), 1.0)
        trial = Trial(number=0, params={"a": 0.5}, state=TrialState.HELD, points=(point,))
        assert table.update([trial], [1]).bests.tolist() == [value]
