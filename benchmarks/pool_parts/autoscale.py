"""Spot with fallback on the real price history of AWS: cost against on-demand and Uniform Progress.

    python -m benchmarks.pool_parts.autoscale [--history FILE] [--each 3] [--seed 0] [--json FILE]

Jobs of 24 h with 36 h to do them and 6 min a start, at random moments of 2022-12 to 2026-08. The history
tells what spot cost in each zone, day by day, not when machines were taken away. Two readings:
``prices`` (a machine stays as long as it is on offer below on-demand) and ``interrupted`` (spells are
drawn from the shipped model, the same for every policy, zone by zone). Greedy and Uniform Progress stay
in the job's zone; ours is shown in the same zone, and free to start in any zone of the region.

Then a queue of 30 elastic jobs with deadlines over three days: four fixed devices for each, on-demand, greedy
and Uniform Progress, against our pool, which decides sizes and machines anew every five minutes.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.pool_parts.autoscale_queue import make_queue, run_fixed, run_pool
from yunlu.lab.spot.replay import (
    draw_starts,
    interrupt,
    read_prices,
    replay_jobs,
    replay_jobs_in_any_zone,
    summarise,
    summarise_policies,
)
from yunlu.scheduler.autoscaling import ScalingRules
from yunlu.scheduler.spot import HOUR_S, PRIOR, DeadlineJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pool_parts.autoscale_queue import Bill
    from yunlu.lab.spot.replay import PolicySummary
    from yunlu.scheduler.spot import SpotMarket, SpotOutcome

DEFAULT_FILE = (
    Path(__file__).resolve().parents[3]
    / "shared/evidence/planner/catalog/aws_gpu_spot_history.csv.gz"
)
INSTANCES = ("p3.2xlarge", "g5.12xlarge", "p4d.24xlarge", "p5.48xlarge")
REGIONS = ("use1", "usw2")
JOB = DeadlineJob(work_s=24 * HOUR_S, deadline_s=36 * HOUR_S, restart_s=0.1 * HOUR_S)
STEP_S, QUEUE_STEP_S = 360.0, 300.0
LEAST_DAYS = 60
"""A zone is used where its history has at least so long a stretch with one on-demand price."""


def read_region(
    path: Path, instance: str, region: str, *, step_s: float = STEP_S
) -> list[SpotMarket]:
    """The zones of a region, cut to the days that all of them have."""
    markets = [
        market
        for market in read_prices(path, instance=instance, zones=region, step_s=step_s)
        if len(market) * step_s >= LEAST_DAYS * 86_400
    ]
    eras: dict[str, list[SpotMarket]] = defaultdict(list)
    for market in markets:
        eras[market.name.rsplit(" ", 1)[1]].append(market)
    found = max(eras.values(), key=len, default=[])
    return [market.cut(min(len(other) for other in found)) for market in found]


def measure(zones: Sequence[SpotMarket], *, each: int, seed: int) -> list[PolicySummary]:
    """All policies in each zone, and ours anywhere in the region."""
    random = np.random.default_rng(seed)
    starts = draw_starts(zones, JOB, per_market=each, random=random)
    trials = replay_jobs(JOB, starts, with_optimum=True)
    anywhere: list[SpotOutcome] = replay_jobs_in_any_zone(
        JOB, zones, [start for _, start in starts]
    )
    return [*summarise_policies(trials), summarise("planned, any zone", anywhere)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--history", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--each", type=int, default=3, help="random starts in each zone (3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instances", nargs="*", default=INSTANCES, help=", ".join(INSTANCES))
    parser.add_argument("--queues", type=int, default=3, help="queues of 30 jobs (3)")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    records: list[dict[str, Any]] = []
    table = Table(title="cost against on-demand")
    for instance in asked.instances:
        for region in REGIONS:
            zones = read_region(asked.history, instance, region)
            if not zones:
                continue
            random = np.random.default_rng(asked.seed)
            taken = [interrupt(zone, PRIOR, random=random) for zone in zones]
            for reading, seen in (("prices", zones), ("interrupted", taken)):
                standings = measure(seen, each=asked.each, seed=asked.seed)
                where = f"{instance} {region}, {len(zones)} zones"
                records.append(
                    {
                        "machine": where,
                        "reading": reading,
                        "policies": [asdict(s) for s in standings],
                    }
                )
                if not table.columns:
                    for head in (
                        "machine",
                        "reading",
                        *(each.policy for each in standings),
                        "late",
                    ):
                        table.add_column(head)
                late = str(sum(each.late for each in standings))
                table.add_row(where, reading, *(f"{each.ratio:.3f}" for each in standings), late)
    Console(width=140).print(table)
    queue_records: list[dict[str, Any]] = []
    if asked.queues:
        bills, queue_records = measure_queues(asked.history, queues=asked.queues)
        Console(width=140).print(bills)
    if asked.json:
        asked.json.write_text(
            json.dumps({"jobs": records, "queues": queue_records}, indent=1) + "\n"
        )


def measure_queues(history: Path, *, queues: int) -> tuple[Table, list[dict[str, Any]]]:
    """The queue on one zone of each region, at several moments, with interruptions drawn."""
    table = Table("machine", "policy", "dollars / on-demand", "late", "hours a job")
    records: list[dict[str, Any]] = []
    for instance, region in (("p3.2xlarge", "use1"), ("p4d.24xlarge", "usw2")):
        zone = read_region(history, instance, region, step_s=QUEUE_STEP_S)[0]
        totals: dict[str, list[Bill]] = defaultdict(list)
        for seed in range(queues):
            random = np.random.default_rng(seed)
            market = interrupt(zone, PRIOR, random=random)
            start = int(random.integers(0, len(market) - int(7 * 86_400 / QUEUE_STEP_S)))
            jobs = make_queue(days=3.0, count=30, seed=seed)
            for bill in run_fixed(jobs, market, start):
                totals[bill.name].append(bill)
            for worth in (0.5, 0.8):
                name = f"our pool, worth {worth:g}"
                jobs = make_queue(days=3.0, count=30, seed=seed)
                totals[name].append(run_pool(jobs, market, start, ScalingRules(worth=worth)))
        base = sum(bill.dollars for bill in totals["on-demand"])
        for name, bills in totals.items():
            share = sum(bill.dollars for bill in bills) / base
            late, hours = sum(b.late for b in bills), float(np.mean([b.mean_hours for b in bills]))
            table.add_row(f"{instance} {region}", name, f"{share:.3f}", str(late), f"{hours:.1f}")
            records.append(
                {"machine": instance, "policy": name, "ratio": share, "late": late, "hours": hours}
            )
        table.add_section()
    return table, records


if __name__ == "__main__":
    main()
