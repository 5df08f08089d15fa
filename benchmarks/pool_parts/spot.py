"""Spot under deadlines: four rows on nine zones, cost against on-demand.

    python -m benchmarks.pool_parts.spot [--traces FOLDER] [--each 10] [--seed 0] [--no-past] [--json FILE]

The rows are those of the evidence: 24 h of work, deadlines of 36 and 48 h, restarts of 0.05 and 0.20 h,
nine V100 zones of AWS over 45.5 days, ten random starts in each, on-demand 3.33 times as dear as spot.
With the seed 0 the starts are those behind the published figures (one generator through all rows).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.fit_spot import DEFAULT_FOLDER, HELD_OUT
from yunlu.lab.spot.replay import (
    draw_starts,
    read_availability,
    replay_jobs,
    replay_jobs_in_any_zone,
    summarise,
    summarise_policies,
)
from yunlu.scheduler.spot import HOUR_S, DeadlineJob

if TYPE_CHECKING:
    from yunlu.lab.spot.replay import PolicySummary
    from yunlu.scheduler.spot import SpotMarket

WORK_H = 24.0
PRICE_RATIO = 3.33


@dataclass(frozen=True)
class Row:
    """One case, with what was published and what is asked."""

    deadline_h: float
    restart_h: float
    greedy: float
    optimum: float
    goal: float


ROWS = (
    Row(36, 0.05, 0.537, 0.473, 0.500),
    Row(36, 0.20, 0.573, 0.498, 0.535),
    Row(48, 0.05, 0.455, 0.431, 0.443),
    Row(48, 0.20, 0.517, 0.467, 0.492),
)


def make_job(row: Row) -> DeadlineJob:
    """The job of a row."""
    return DeadlineJob(
        work_s=WORK_H * HOUR_S,
        deadline_s=row.deadline_h * HOUR_S,
        restart_s=row.restart_h * HOUR_S,
    )


def read_zones(folder: Path) -> list[SpotMarket]:
    """The nine zones, in the order of their names."""
    paths = sorted((folder / "availability" / "1-node" / HELD_OUT).glob("*.json"))
    return [
        read_availability(path, spot_dollars_per_hour=1 / PRICE_RATIO, on_demand_dollars_per_hour=1)
        for path in paths
    ]


def draw_rows(folder: Path, *, each: int = 10, seed: int = 0) -> list[list[tuple[SpotMarket, int]]]:
    """The starts of every row, drawn one after the other."""
    zones = read_zones(folder)
    random = np.random.default_rng(seed)
    return [draw_starts(zones, make_job(row), per_market=each, random=random) for row in ROWS]


def measure_row(
    row: Row, starts: list[tuple[SpotMarket, int]], *, knows_past: bool, with_optimum: bool
) -> list[PolicySummary]:
    """All policies, and ours where any zone will do."""
    job = make_job(row)
    trials = replay_jobs(job, starts, knows_past=knows_past, with_optimum=with_optimum)
    zones = list({market.name: market for market, _ in starts}.values())
    anywhere = replay_jobs_in_any_zone(job, zones, [start for _, start in starts][:: len(zones)])
    return [*summarise_policies(trials), summarise("planned, any zone", anywhere)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--each", type=int, default=10, help="random starts in each zone (10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-past", action="store_true", help="nothing is known before the start")
    parser.add_argument("--no-optimum", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    records: list[dict[str, Any]] = []
    table = Table(
        "deadline, restart", "policy", "cost / on-demand", "worst", "late", "starts", "asked"
    )
    for row, starts in zip(
        ROWS, draw_rows(asked.traces, each=asked.each, seed=asked.seed), strict=True
    ):
        standings = measure_row(
            row, starts, knows_past=not asked.no_past, with_optimum=not asked.no_optimum
        )
        records.append({"row": asdict(row), "policies": [asdict(each) for each in standings]})
        goals = {
            "greedy": f"published {row.greedy:.3f}",
            "optimum": f"published {row.optimum:.3f}",
            "planned": f"at most {row.goal:.3f}",
        }
        for each in standings:
            table.add_row(
                f"{row.deadline_h:g} h, {row.restart_h:g} h", each.policy, f"{each.ratio:.4f}",
                f"{each.worst_ratio:.3f}", str(each.late), f"{each.starts:.1f}",
                goals.get(each.policy, ""),
            )  # fmt: skip
        table.add_section()
    Console(width=140).print(table)
    if asked.json:
        asked.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
