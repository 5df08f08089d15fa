"""Policies on made traces: the optimum is cheapest, ours beats greedy, nobody is late."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.fit_spot import HELD_OUT, fit_model, training_markets
from benchmarks.pool_parts.spot import ROWS, draw_rows, make_job

from yunlu.lab.spot.replay import replay_jobs, summarise_policies
from yunlu.lab.spot_command import SpotError, spot
from yunlu.scheduler.spot import PRIOR


def write_traces(folder: Path) -> None:
    random = np.random.default_rng(3)
    for zone in ("one", "two"):
        data = np.repeat(random.random(150) < 0.7, 8).astype(int).tolist()
        record = {"metadata": {"gap_seconds": 300}, "data": data}
        (folder / f"{zone}.json").write_text(json.dumps(record))


def write_markets(folder: Path, *, up_h: float, down_h: float, zones: int) -> None:
    """Zones whose machines come and go at rates that never change."""
    folder.mkdir(parents=True)
    random, step_h = np.random.default_rng(5), 0.25
    for zone in range(zones):
        data, is_up = [], True
        for _ in range(4 * 24 * 40):
            is_up = is_up != (random.random() < step_h / (up_h if is_up else down_h))
            data.append(int(is_up))
        record = {"metadata": {"gap_seconds": 3600 * step_h}, "data": data}
        (folder / f"zone{zone}.json").write_text(json.dumps(record))


def test_a_fit_finds_the_rates_of_made_traces_and_leaves_out_the_test(tmp_path: Path) -> None:
    write_markets(tmp_path / "1-node" / "other", up_h=6.0, down_h=2.0, zones=12)
    write_markets(tmp_path / "1-node" / HELD_OUT, up_h=1.0, down_h=9.0, zones=2)
    markets = training_markets(tmp_path)
    assert len(markets) == 12
    model, _ = fit_model(markets, PRIOR.memory_s / 3600)
    assert model.prior_share == pytest.approx(0.75, abs=0.03)
    for by_age, of_share, mean_h in (
        (model.up_by_age, model.up_of_share, 6.0),
        (model.down_by_age, model.down_of_share, 2.0),
    ):
        levels = np.array(by_age) + of_share[0] * 0.75 + of_share[1] * 0.75**2
        assert np.exp(-levels) == pytest.approx(mean_h, rel=0.3)


@pytest.mark.slow
def test_ours_is_cheaper_than_greedy_and_never_late(tmp_path: Path) -> None:
    write_markets(tmp_path / "availability" / "1-node" / HELD_OUT, up_h=6.0, down_h=2.0, zones=2)
    asked = ROWS[0]
    starts = draw_rows(tmp_path, each=4)[0]
    standings = {
        each.policy: each for each in summarise_policies(replay_jobs(make_job(asked), starts))
    }
    assert standings["optimum"].ratio <= standings["planned"].ratio
    assert standings["planned"].ratio < standings["greedy"].ratio < 1
    assert all(each.late == 0 for each in standings.values())


def test_the_verb_prints_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_traces(tmp_path)
    picture = tmp_path / "out.svg"
    assert spot(tmp_path, work=6, deadline=9, starts=2, plot=picture) == 0
    printed = capsys.readouterr().out
    for name in ("on-demand", "greedy", "uniform progress", "planned", "optimum"):
        assert name in printed
    assert "</svg>" in picture.read_text()
    assert spot(tmp_path, work=6, deadline=9, starts=2, json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert [each["late"] for each in record["policies"]] == [0] * 5
    ratios = {each["policy"]: each["ratio"] for each in record["policies"]}
    assert ratios["optimum"] <= min(ratios.values()) + 1e-9
    assert record["trials"] == 4


def test_a_deadline_that_cannot_be_met_is_refused(tmp_path: Path) -> None:
    write_traces(tmp_path)
    with pytest.raises(SpotError, match="not enough"):
        spot(tmp_path, work=10, deadline=10, restart=0.5)


def test_prices_need_an_instance(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("date,instance,az,spot_price,ondemand_price\n2024-01-01,g5.xlarge,a,1,2\n")
    with pytest.raises(SpotError) as caught:
        spot(path)
    assert "--instance" in str(caught.value)
