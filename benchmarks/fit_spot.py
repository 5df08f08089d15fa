"""Fits the prior of the spot model on traces of other places and times than those it is judged on.

    python -m benchmarks.fit_spot [--traces FOLDER]

Judged on: the nine V100 zones of ``availability/1-node/aws-02-15-2023``. Fitted on all other traces of
the same collection. Prints the constants that stand in ``yunlu/scheduler/spot.py``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from scipy.signal import lfilter

from yunlu.lab.spot.replay import read_availability
from yunlu.scheduler.spot import AGE_EDGES_S, HOUR_S, SpotModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from yunlu.scheduler.spot import SpotMarket

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "evidence" / "sched" / "spot"
HELD_OUT = "aws-02-15-2023"
SHARE_BINS = 20
MEMORIES_H = (3.0, 6.0, 12.0, 24.0, 48.0, 96.0)
PLACE_WEIGHTS = (2.0, 4.0, 8.0, 16.0, 32.0)
PLACE_MEMORIES_H = (48.0, 96.0, 168.0, 336.0, 672.0)
RIDGE = 0.5
"""Keeps an age with few spells near its neighbours' level."""


@dataclass(frozen=True)
class Cells:
    """Hours watched and spells ended, by state (down, up), age of the spell and share of the past."""

    hours: NDArray[np.float64]
    ends: NDArray[np.float64]


def training_markets(folder: Path) -> list[SpotMarket]:
    """All traces but those of the held-out period."""
    paths = sorted(folder.rglob("*.json"))
    return [
        read_availability(path, spot_dollars_per_hour=1.0, on_demand_dollars_per_hour=3.33)
        for path in paths
        if HELD_OUT not in path.parts
    ]


def count_cells(markets: Iterable[SpotMarket], memory_h: float, prior_share: float) -> Cells:
    """Watch each trace as the policy would."""
    shape = (2, len(AGE_EDGES_S) + 1, SHARE_BINS)
    hours, ends = np.zeros(shape), np.zeros(shape)
    for market in markets:
        is_up = market.is_up[:-1]
        age, share = remember(market, memory_h * HOUR_S, prior_share)
        ages = np.searchsorted(AGE_EDGES_S, age[:-1], side="right")
        bins = np.minimum((share[:-1] * SHARE_BINS).astype(int), SHARE_BINS - 1)
        cells = (is_up.astype(int), ages, bins)
        np.add.at(hours, cells, market.step_s / HOUR_S)
        np.add.at(ends, cells, is_up != market.is_up[1:])
    return Cells(hours, ends)


def remember(
    market: SpotMarket, memory_s: float, prior_share: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What ``Memory`` holds at each tick, all at once: age of the spell, share of the past."""
    kept = np.exp(-market.step_s / memory_s)
    up = market.is_up.astype(float)
    share, _ = lfilter([1 - kept], [1.0, -kept], up[:-1], zi=[kept * prior_share])
    ticks = np.arange(len(up))
    changed = np.r_[False, market.is_up[1:] != market.is_up[:-1]]
    since = np.maximum.accumulate(np.where(changed, ticks, 0))
    first_s = np.where(since == 0, AGE_EDGES_S[2], 0.0)
    age = np.asarray(first_s + (ticks - since) * market.step_s, dtype=np.float64)
    return age, np.asarray(np.r_[prior_share, share], dtype=np.float64)


def fit_rates(
    hours: NDArray[np.float64], ends: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Poisson regression of ends on age and share: coefficients and log likelihood."""
    ages, bins = hours.shape
    share = (np.arange(bins) + 0.5) / bins
    design = np.zeros((ages, bins, ages + 2))
    for age in range(ages):
        design[age, :, age] = 1.0
    design[:, :, ages] = share
    design[:, :, ages + 1] = share**2
    x, time, count = design.reshape(-1, ages + 2), hours.ravel(), ends.ravel()
    kept = time > 0
    x, time, count = x[kept], time[kept], count[kept]
    level = np.log(count.sum() / time.sum())
    beta = np.r_[np.full(ages, level), 0.0, 0.0]
    centre = beta.copy()
    for _ in range(50):
        rate = time * np.exp(np.clip(x @ beta, -12, 6))
        slope = x.T @ (count - rate) - RIDGE * (beta - centre)
        adapt_rules = (x * rate[:, None]).T @ x + RIDGE * np.eye(ages + 2)
        move = np.linalg.solve(adapt_rules, slope)
        beta = beta + move
        if np.abs(move).max() < 1e-9:
            break
    log_rate = x @ beta
    return beta, float((count * log_rate - time * np.exp(log_rate)).sum())


def fit_model(markets: list[SpotMarket], memory_h: float) -> tuple[SpotModel, float]:
    """The prior for one length of memory, and its log likelihood."""
    prior_share = float(np.mean([market.is_up.mean() for market in markets]))
    cells = count_cells(markets, memory_h, prior_share)
    down, down_fit = fit_rates(cells.hours[0], cells.ends[0])
    up, up_fit = fit_rates(cells.hours[1], cells.ends[1])
    model = SpotModel(
        memory_s=memory_h * HOUR_S,
        prior_share=prior_share,
        up_by_age=tuple(float(value) for value in up[:-2]),
        up_of_share=(float(up[-2]), float(up[-1])),
        down_by_age=tuple(float(value) for value in down[:-2]),
        down_of_share=(float(down[-2]), float(down[-1])),
        place_weight=1.0,
        place_memory_s=HOUR_S,
    )
    return model, down_fit + up_fit


def log_likelihood(markets: list[SpotMarket], model: SpotModel) -> float:
    """Log likelihood of each tick given only what came before it, places learnt on the way."""
    total = 0.0
    for market in markets:
        is_up, step_s = market.is_up[:-1], market.step_s
        ends = (market.is_up[1:] != is_up).astype(float)
        age, share = (each[:-1] for each in remember(market, model.memory_s, model.prior_share))
        ages = np.searchsorted(AGE_EDGES_S, age, side="right")
        logs = np.where(
            is_up,
            np.array(model.up_by_age)[ages] + np.polyval([*model.up_of_share[::-1], 0], share),
            np.array(model.down_by_age)[ages] + np.polyval([*model.down_of_share[::-1], 0], share),
        )
        expected = np.exp(logs) * step_s / HOUR_S
        forgotten = np.exp(-step_s / model.place_memory_s)
        for state in (is_up, ~is_up):
            seen = np.asarray(lfilter([0.0, 1.0], [1.0, -forgotten], ends * state))
            due = np.asarray(lfilter([0.0, 1.0], [1.0, -forgotten], expected * state))
            factor = (model.place_weight + seen) / (model.place_weight + due)
            here = expected[state] * factor[state]
            total += float((ends[state] * np.log(here / step_s * HOUR_S) - here).sum())
    return total


def fit_all(markets: list[SpotMarket]) -> tuple[SpotModel, float]:
    """The lengths of memory and the weight of the prior that predict best."""
    best: tuple[SpotModel, float] | None = None
    for memory_h in MEMORIES_H:
        fitted, _ = fit_model(markets, memory_h)
        for weight in PLACE_WEIGHTS:
            for place_h in PLACE_MEMORIES_H:
                model = replace(fitted, place_weight=weight, place_memory_s=place_h * HOUR_S)
                fit = log_likelihood(markets, model)
                if best is None or fit > best[1]:
                    best = (model, fit)
    assert best is not None
    return best


def main() -> None:
    """Fit and print what stands in ``prior.py``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=DEFAULT_FOLDER)
    markets = training_markets(parser.parse_args().traces)
    screen = Console(width=200)
    screen.print(
        f"{len(markets)} traces, {sum(len(m) * m.step_s for m in markets) / 86400:.0f} days"
    )
    for memory_h in MEMORIES_H:
        model, fit = fit_model(markets, memory_h)
        screen.print(f"memory {memory_h:4.0f} h: log likelihood {fit:.1f} without the place")
    model, fit = fit_all(markets)
    screen.print(f"best with the place: {fit:.1f}")
    screen.print(model)


if __name__ == "__main__":
    main()
