"""Judges the pool's policy on public workloads: ``python benchmarks/pool.py [--only PART]``.

``benchmarks/README.md`` says how to read what it prints. Where the evidence is not there, it says
so and does nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console

from benchmarks.pool_parts import decisions, homogeneous
from benchmarks.pool_parts.evidence import DEFAULT_FOLDER, TUNED_ON, WORKLOADS
from benchmarks.pool_parts.figures import Figure, make_table

if TYPE_CHECKING:
    from collections.abc import Sequence

console = Console(width=140, highlight=False)
errors = Console(stderr=True, highlight=False)

PARTS = {
    "selftest": "Does the simulator reproduce what was published?",
    "load": "One type of device: Pollux's workloads, 16 nodes of 4",
    "blind": "Without declared lengths",
    "robust": "When things go wrong",
    "decision": "Time to decide",
    "mixed": "Several types of devices: Sia's semantics",
    "spot": "Spot with a deadline",
}


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables; 1 if a figure is not reached."""
    options = _parse(arguments)
    if not (options.evidence / "pollux").is_dir():
        console.print(f"skipped: no workloads in {options.evidence}; name theirs with --evidence")
        return 0
    workloads = (TUNED_ON,) if options.quick else tuple(options.workloads)
    found: dict[str, list[Figure]] = {}
    for part in options.only or PARTS:
        found[part] = _measure(part, options.evidence, workloads, quick=options.quick)
        console.print(make_table(PARTS[part], found[part]))
    if options.json:
        options.json.write_text(json.dumps(_as_dict(found, workloads), indent=1), encoding="utf-8")
    missed = [figure for figures in found.values() for figure in figures if figure.is_met is False]
    console.print(f"{len(missed)} figures are not reached" if missed else "all figures are reached")
    return 1 if missed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeat")
    parser.add_argument("--workloads", type=int, nargs="+", default=WORKLOADS)
    parser.add_argument("--quick", action="store_true", help=f"workload {TUNED_ON} alone")
    parser.add_argument("--evidence", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--json", type=Path, help="write every figure here")
    return parser.parse_args(arguments)


def _measure(part: str, folder: Path, workloads: Sequence[int], *, quick: bool) -> list[Figure]:
    if part == "selftest":
        return homogeneous.check_simulator(folder, workloads, _say)
    if part == "load":
        loads = (1.0,) if quick else (1.0, 0.5, 1.5, 2.0)
        return [f for load in loads for f in homogeneous.compare(folder, workloads, load, _say)]
    if part == "blind":
        return homogeneous.compare_blind(folder, workloads, _say)
    if part == "robust":
        return homogeneous.compare_robust(folder, workloads, _say)
    if part == "decision":
        scales = decisions.SCALES[-1:] if quick else decisions.SCALES
        return decisions.measure(folder, _say, scales=scales)
    module: Any = import_module(f"benchmarks.pool_parts.{part}")
    return module.measure(folder, _say, quick=quick)


def _say(text: str) -> None:
    errors.print(text, style="dim")


def _as_dict(found: dict[str, list[Figure]], workloads: Sequence[int]) -> dict[str, Any]:
    parts = {part: [figure.as_dict() for figure in figures] for part, figures in found.items()}
    return {"workloads": list(workloads), "tuned_on": TUNED_ON, "figures": parts}


if __name__ == "__main__":
    sys.exit(main())
