"""A queue of small elastic jobs on this machine, for real: Yunlu's allocator beside FIFO of fixed sizes.

``make bench-pool-live`` runs this; ``benchmarks/README.md`` says how to read what it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console
from rich.table import Table

from benchmarks.pool_parts.live import JobRecord, run_queue
from benchmarks.pool_parts.predict import QueuePrediction, measure, predict_queue
from benchmarks.pool_parts.queue import EVERY_S, make_queue

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICIES = ("yunlu", "fifo")
_WITHIN = 0.25
"""How far the simulator may be off."""


def main() -> int:
    """Live through the queue under each policy, predict both, print the table."""
    asked = _parse()
    screen = Console(stderr=True)
    queue = make_queue(every_s=asked.every, scale=asked.scale)
    directory = (asked.keep or Path(tempfile.mkdtemp(prefix="yunlu-pool-"))).absolute()
    records: dict[str, list[JobRecord]] = {}
    for policy in asked.policies:
        home = directory / policy
        home.mkdir(parents=True)
        os.environ["YUNLU_HOME"] = str(home)  # noqa: TID251 (each policy has runs of its own)
        with screen.status(f"{policy}: bringing the pool up") as status:
            records[policy] = run_queue(
                queue,
                home,
                policy=policy,
                devices=asked.devices,
                round_s=asked.round,
                watch=lambda over, all_, policy=policy: status.update(
                    f"{policy}: {over} of {all_} jobs submitted so far are over"
                ),
            )
        _write(asked.json, records, {})
    together = [job for jobs in records.values() for job in jobs]
    measured = measure(together, devices=asked.devices)
    resizes = [span_s for job in together for span_s in job.resize_s]
    predicted = {
        policy: predict_queue(
            queue,
            measured,
            policy=policy,
            devices=asked.devices,
            round_s=asked.round,
            resize_s=median(resizes) if resizes else 1.0,
        )
        for policy in records
    }
    _write(asked.json, records, predicted)
    Console(width=110).print(_table(records, predicted))
    print(_verdict(records, predicted))  # noqa: T201 (its product)
    print(f"runs and logs: {directory}")  # noqa: T201
    return 0 if all(job.state == "finished" for job in together) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="shares of this machine (4)")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between jobs")
    parser.add_argument("--scale", type=float, default=1.0, help="make all jobs longer, or shorter")
    parser.add_argument("--round", type=float, default=10.0, help="seconds between decisions (10)")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write every job and figure here")
    parser.add_argument("--keep", type=Path, help="directory for runs and logs")
    return parser.parse_args()


def summarise(jobs: Sequence[JobRecord]) -> dict[str, float]:
    """The figures of one live run."""
    first = min(job.submitted_at for job in jobs)
    return {
        "average_s": mean(job.jct_s for job in jobs),
        "makespan_s": max(job.ended_at for job in jobs) - first,
        "restarts": sum(job.attempts - 1 for job in jobs),
        "resizes": sum(job.resizes for job in jobs),
        "samples_lost": sum(job.samples_lost for job in jobs),
    }


def _table(records: dict[str, list[JobRecord]], predicted: dict[str, QueuePrediction]) -> Table:
    table = Table(title=f"{len(next(iter(records.values())))} jobs")
    for title in ("policy", "average, s", "predicted", "makespan, s", "predicted", "restarts",
                  "resizes", "samples lost"):  # fmt: skip
        table.add_column(title, justify="left" if title == "policy" else "right")
    for policy, jobs in records.items():
        figures, told = summarise(jobs), predicted[policy]
        table.add_row(
            policy,
            f"{figures['average_s']:.1f}",
            _beside(told.average_s, figures["average_s"]),
            f"{figures['makespan_s']:.1f}",
            _beside(told.makespan_s, figures["makespan_s"]),
            f"{figures['restarts']:.0f}",
            f"{figures['resizes']:.0f}",
            f"{figures['samples_lost']:.0f}",
        )
    return table


def _beside(told: float, found: float) -> str:
    return f"{told:.1f} ({told / found - 1:+.0%})"


def _verdict(records: dict[str, list[JobRecord]], predicted: dict[str, QueuePrediction]) -> str:
    words: list[str] = []
    for policy, jobs in records.items():
        figures, told = summarise(jobs), predicted[policy]
        worst = max(abs(told.average_s / figures["average_s"] - 1),
                    abs(told.makespan_s / figures["makespan_s"] - 1))  # fmt: skip
        is_within = "within" if worst <= _WITHIN else "NOT within"
        words.append(f"{policy}: predicted {is_within} {_WITHIN:.0%} (worst {worst:.0%})")
    return "\n".join(words)


def _write(
    path: Path | None, records: dict[str, list[JobRecord]], predicted: dict[str, QueuePrediction]
) -> None:
    if path is None:
        return
    content: dict[str, Any] = {
        policy: {
            "figures": summarise(jobs),
            "predicted": asdict(predicted[policy]) if policy in predicted else None,
            "jobs": [{**asdict(job), "seen": [s.model_dump() for s in job.seen]} for job in jobs],
        }
        for policy, jobs in records.items()
    }
    path.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
