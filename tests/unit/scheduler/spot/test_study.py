"""The published rows: greedy and the optimum must come out, then ours must beat what is asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.fit_spot import DEFAULT_FOLDER, HELD_OUT, fit_model, training_markets
from benchmarks.pool_parts.spot import ROWS, draw_rows, make_job

from yunlu.cli.pool_spot import SpotError, spot
from yunlu.scheduler.spot.prior import PRIOR
from yunlu.scheduler.spot.study import rank, run_trials

def write_traces(folder: Path) -> None:
    random = np.random.default_rng(3)
    for zone in ("one", "two"):
        data = np.repeat(random.random(150) < 0.7, 8).astype(int).tolist()
        record = {"metadata": {"gap_seconds": 300}, "data": data}
        (folder / f"{zone}.json").write_text(json.dumps(record))


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
