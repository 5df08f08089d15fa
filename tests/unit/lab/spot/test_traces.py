from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from yunlu.lab.spot.replay import TraceError, interrupt, read_availability, read_prices
from yunlu.scheduler.spot import PRIOR


def write_trace(path: Path, counts: list[int], gap: int = 300) -> Path:
    path.write_text(json.dumps({"metadata": {"gap_seconds": gap}, "data": counts}))
    return path


def test_a_trace_of_several_machines_is_up_while_all_are(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "zone.json", [4, 3, 4, 0])
    market = read_availability(path, spot_dollars_per_hour=0.3, on_demand_dollars_per_hour=1.0)
    assert market.is_up.tolist() == [True, False, True, False]
    assert (market.name, market.step_s, len(market)) == ("zone", 300.0, 4)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"data": [1]}', '{"metadata": {"gap_seconds": 3}}', "{"]
)
def test_a_file_that_is_no_trace_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"bad\.json"):
        read_availability(path, spot_dollars_per_hour=0.3, on_demand_dollars_per_hour=1.0)


def test_prices_hold_until_the_next_row_and_an_empty_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "history.csv.gz"
    rows = [
        "date,instance,az,spot_price,ondemand_price",
        "2024-01-01,p3.2xlarge,use1-az1,1.0,3.0",
        "2024-01-03,p3.2xlarge,use1-az1,,3.0",
        "2024-01-04,p3.2xlarge,use1-az1,2.0,",
        "2024-01-05,p3.2xlarge,use1-az1,1.5,2.0",
        "2024-01-01,p3.2xlarge,usw2-az1,1.0,3.0",
        "2024-01-01,g5.xlarge,use1-az1,0.4,1.0",
    ]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(rows) + "\n")
    old, new = read_prices(path, instance="p3.2xlarge", zones="use1", step_s=86_400.0)
    assert old.spot_dollars_per_hour[old.is_up].tolist() == [1.0, 1.0, 2.0]
    assert old.is_up.tolist() == [True, True, False, True]
    assert (old.on_demand_dollars_per_hour, new.on_demand_dollars_per_hour) == (3.0, 2.0)
    below = read_prices(path, instance="p3.2xlarge", zones="use1", step_s=86_400.0, below=0.5)
    assert below[0].is_up.tolist() == [True, True, False, False]


def test_an_instance_that_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("date,instance,az,spot_price,ondemand_price\n2024-01-01,g5.xlarge,a,1,2\n")
    with pytest.raises(TraceError) as caught:
        read_prices(path, instance="p9", zones="")
    assert "g5.xlarge" in str(caught.value)


def test_interruptions_are_drawn_only_where_spot_was_on_offer(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "zone.json", [1] * 3000 + [0] * 500)
    market = read_availability(path, spot_dollars_per_hour=0.3, on_demand_dollars_per_hour=1.0)
    drawn = interrupt(market, PRIOR, random=np.random.default_rng(1))
    again = interrupt(market, PRIOR, random=np.random.default_rng(1))
    assert drawn.is_up.tolist() == again.is_up.tolist()
    assert not drawn.is_up[3000:].any()
    assert 0 < drawn.is_up[:3000].mean() < 1
