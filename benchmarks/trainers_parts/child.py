"""One contender, one workload, one process: trains, then writes what its marks say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.trainers_parts.marks import begins_of, step_starts
from benchmarks.trainers_parts.workloads import WORKLOADS


def main() -> None:
    """The command line that the rounds use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=[*WORKLOADS, "data"])
    parser.add_argument("contender")
    parser.add_argument("mode", choices=["same", "defaults"])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.workload == "data":
        from benchmarks.trainers_parts.workloads import make_data  # noqa: PLC0415

        make_data(asked.directory, quick=asked.quick)
        return
    said = _train_text(asked) if asked.workload == "text" else _train_live(asked)
    asked.marks.with_suffix(".said").write_text(json.dumps(said))


def _train_text(asked: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.trainers_parts import text  # noqa: PLC0415 (torch comes with it)

    return text.CONTENDERS[asked.contender](asked.directory, asked.steps)


def _train_live(asked: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.trainers_parts.contenders import CONTENDERS  # noqa: PLC0415
    from benchmarks.trainers_parts.setup import Setup  # noqa: PLC0415

    setup = Setup(
        workload=asked.workload,
        steps=asked.steps,
        pinned=asked.mode == "same",
        threads=asked.threads,
        directory=asked.directory,
    )
    said = CONTENDERS[asked.contender](setup) or {}
    setup.marks.save(asked.marks)
    return said


def read_run(marks: Path, workload: str, steps: int) -> dict[str, Any]:
    """What one process measured, as plain numbers."""
    found = json.loads(marks.read_text())
    said = json.loads(marks.with_suffix(".said").read_text())
    history: list[dict[str, Any]] = said.get("history", [])
    rows = [tuple(row) for row in found["rows"]]
    starts = step_starts(rows, steps, begins_of(history) if history else None)
    first, last = rows[starts[0]], rows[starts[-1]]
    timed = rows[starts[WORKLOADS[workload].warmup_steps]]
    count = len(starts) - 1 - WORKLOADS[workload].warmup_steps
    # A process that only waits for another costs its user, too.
    waiting_s = said.get("waiting_cpu_s", 0.0) / steps
    return {
        "cpu_s": (last[0] - timed[0]) / count + waiting_s,
        "wall_s": (last[1] - timed[1]) / count,
        "start_cpu_s": first[0] + said.get("launch_cpu_s", 0.0),
        "peak_bytes": found["peak_bytes"],
        "training_peak_bytes": last[2],
        "losses": [record["loss"] for record in history] or found["losses"],
        "plan": said.get("plan"),
    }


if __name__ == "__main__":
    main()
