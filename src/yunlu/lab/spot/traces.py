"""Public traces: availability (SkyPilot) and prices (AWS history) with simulated interruptions."""

from __future__ import annotations

import csv
import gzip
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import YunluError
from yunlu.core.json_decode import decode_json
from yunlu.scheduler.spot import SpotMarket, up_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from yunlu.scheduler.spot import SpotModel

DAY_S = 86400.0


class TraceError(YunluError):
    """A trace cannot be read, or lacks what was requested."""

    code = "trace"


def read_availability(
    path: Path, *, spot_dollars_per_hour: float, on_demand_dollars_per_hour: float
) -> SpotMarket:
    """One zone: ``{"metadata": {"gap_seconds": 195}, "data": [1, 0, ...]}``, machines per tick.

    A trace of several machines counts as up while all of them are.
    """
    try:
        record: dict[str, Any] = decode_json(path.read_text())
        counts = np.asarray(record["data"], dtype=np.int64)
        step_s = float(record["metadata"]["gap_seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path}: not a trace of availability ({type(error).__name__}: {error}).",
            hint='expected JSON like {"metadata": {"gap_seconds": 300}, "data": [1, 0, 1]}',
        ) from error
    if counts.ndim != 1 or not counts.size or not step_s > 0:
        raise TraceError(f"{path}: no ticks in it.", hint="give a trace with data in it")
    return SpotMarket(
        name=path.stem,
        step_s=step_s,
        is_up=counts >= max(1, counts.max()),
        spot_dollars_per_hour=np.full(len(counts), spot_dollars_per_hour),
        on_demand_dollars_per_hour=on_demand_dollars_per_hour,
    )


def read_prices(
    path: Path, *, instance: str, zones: str = "", step_s: float = 1800.0, below: float = 1.0
) -> list[SpotMarket]:
    """An instance in every zone whose name begins so, from a history of one row a day and zone.

    Spot counts as up while it is on offer for less than ``below`` of on-demand: a history of prices
    does not say when machines were taken away. A price holds until the next row; a row without a
    price says that there was none. Where the price of on-demand changes, a new market begins.
    """
    rows: dict[str, dict[np.datetime64, tuple[float, float]]] = {}
    for row in _rows(path):
        if row["instance"] == instance and row["az"].startswith(zones):
            prices = (_number(row["spot_price"]), _number(row["ondemand_price"]))
            # The last row of a day counts.
            rows.setdefault(row["az"], {})[np.datetime64(row["date"], "D")] = prices
    if not rows:
        raise TraceError(
            f"{path}: no price of {instance} in a zone that begins with {zones!r}.",
            hint="known instances: " + ", ".join(sorted({key[0] for key in count_prices(path)})),
        )
    return [
        _make_market(f"{instance} {zone} {min(era)}", era, step_s, below)
        for zone, days in sorted(rows.items())
        for era in _split_eras(days)
    ]


def count_prices(path: Path) -> Mapping[tuple[str, str], int]:
    """Instances and zones of a history, with how many rows each has."""
    return Counter((row["instance"], row["az"]) for row in _rows(path))


def _split_eras(
    days: Mapping[np.datetime64, tuple[float, float]],
) -> list[dict[np.datetime64, tuple[float, float]]]:
    """Runs of days with one price of on-demand; a day that does not tell it belongs to its run."""
    eras: list[dict[np.datetime64, tuple[float, float]]] = []
    price = float("nan")
    for day in sorted(days):
        spot, on_demand = days[day]
        if not np.isnan(on_demand) and on_demand != price:
            price = on_demand
            eras.append({})
        if eras:
            eras[-1][day] = (spot, price)
    return eras


def _make_market(
    name: str, days: Mapping[np.datetime64, tuple[float, float]], step_s: float, below: float
) -> SpotMarket:
    order = sorted(days)
    at_s = np.array([(day - order[0]).astype(int) for day in order]) * DAY_S
    ticks = np.arange(0.0, float(at_s[-1]) + DAY_S, step_s)
    now = np.searchsorted(at_s, ticks, side="right") - 1
    spot = np.array([days[day][0] for day in order])[now]
    on_demand = days[order[0]][1]
    return SpotMarket(
        name=name,
        step_s=step_s,
        is_up=np.nan_to_num(spot, nan=np.inf) < below * on_demand,
        spot_dollars_per_hour=np.where(np.isnan(spot), on_demand, spot),
        on_demand_dollars_per_hour=on_demand,
    )


def _number(text: str) -> float:
    return float(text) if text else float("nan")


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from csv.DictReader(file)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: cannot be read ({error}).",
            hint="expected a CSV of date,instance,az,spot_price,ondemand_price, or that with gzip",
        ) from error


def interrupt(market: SpotMarket, model: SpotModel, *, random: np.random.Generator) -> SpotMarket:
    """The same prices, with spells drawn from the model; spot is up only where it was offered."""
    moves = np.cumsum(model.transitions(market.step_s).toarray(), axis=1).tolist()
    is_up = up_states()
    last = len(is_up) - 1
    state = int(random.integers(len(is_up)))
    states: list[int] = []
    for chance in random.random(len(market)).tolist():
        states.append(state)
        state = min(bisect_left(moves[state], chance), last)
    return replace(market, is_up=market.is_up & is_up[states])
