"""The published rows: greedy and the optimum must come out, then ours must beat what is asked."""

from __future__ import annotations

import pytest

from benchmarks.fit_spot import DEFAULT_FOLDER, HELD_OUT, fit_model, training_markets
from benchmarks.pool_parts.spot import ROWS, draw_rows, make_job
from yunlu.lab.spot.replay import replay_jobs, summarise_policies
from yunlu.scheduler.spot import PRIOR


@pytest.mark.parametrize("place", range(len(ROWS)))
def test_greedy_comes_out_and_ours_beats_the_goal(place: int) -> None:
    asked = ROWS[place]
    starts = draw_rows(DEFAULT_FOLDER)[place]
    trials = replay_jobs(make_job(asked), starts, with_optimum=False)
    standings = {each.policy: each for each in summarise_policies(trials)}
    assert standings["greedy"].ratio == pytest.approx(asked.greedy, abs=0.0015)
    assert standings["planned"].ratio <= asked.goal
    assert all(each.late == 0 for each in standings.values())


def test_the_shipped_prior_is_what_the_fit_gives_and_has_not_seen_the_test() -> None:
    markets = training_markets(DEFAULT_FOLDER)
    assert len(markets) == 25
    assert HELD_OUT == "aws-02-15-2023"
    model, _ = fit_model(markets, PRIOR.memory_s / 3600)
    assert model.prior_share == pytest.approx(PRIOR.prior_share, abs=1e-3)
    for fitted, shipped in (
        (model.up_by_age, PRIOR.up_by_age),
        (model.up_of_share, PRIOR.up_of_share),
        (model.down_by_age, PRIOR.down_by_age),
        (model.down_of_share, PRIOR.down_of_share),
    ):
        assert fitted == pytest.approx(shipped, abs=1e-3)
