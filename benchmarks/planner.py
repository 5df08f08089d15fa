"""Judges the planner on measured rows: ``python benchmarks/planner.py [fit]``.

``fit`` rewrites the constants that the package ships; without it, the table of the protocols is
printed (docs/planner-model.md). Where the evidence is not there, it says so and does nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console

from benchmarks.planner_parts import evaluate_memory, layout_choice
from benchmarks.planner_parts import evidence as timed
from benchmarks.planner_parts.evaluate_time import Figure, evaluate
from benchmarks.planner_parts.fit_memory import fit_and_write
from benchmarks.planner_parts.ship_time import ship

console = Console(width=120, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables, or fits."""
    options = _parse(arguments)
    if not (options.evidence / "vtrain_multi.csv").is_file():
        console.print(f"skipped: no rows in {options.evidence}; name their folder with --evidence")
        return 0
    # Rows that no formula fits (stages without a block) give infinities on the way.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    parts = ("time", "memory", "layout") if options.only == "all" else (options.only,)
    if options.what == "fit":
        _fit(options.evidence, parts)
        return 0
    found: dict[str, Any] = {}
    if "time" in parts:
        found["time"] = _judge_time(options.evidence)
    if "memory" in parts:
        found["memory"] = _show(evaluate_memory.evaluate(options.evidence))
    if "layout" in parts:
        found["layout"] = _show(layout_choice.evaluate(options.evidence))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, default=float), encoding="utf-8")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("judge", "fit"), default="judge")
    parser.add_argument("--only", choices=("all", "time", "memory", "layout"), default="all")
    parser.add_argument("--evidence", type=Path, default=timed.DEFAULT_FOLDER)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args(arguments)


def _fit(folder: Path, parts: tuple[str, ...]) -> None:
    if "time" in parts:
        ship(timed.load(folder))
    if "memory" in parts:
        fit_and_write(folder)


def _judge_time(folder: Path) -> list[dict[str, Any]]:
    evidence = timed.load(folder)
    console.print(
        f"{'protocol':14} {'source':22} {'rows':>5} {'mean %':>7} {'median %':>8}  target"
    )
    figures = evaluate(evidence, _say)
    for source, reasons in evidence.reasons.items():
        console.print(f"not predicted: {sum(reasons.values())} rows of {source}")
    return [figure.as_dict() for figure in figures]


def _say(figure: Figure) -> None:
    mark = {None: "", True: "reached", False: "missed"}[figure.reached]
    console.print(
        f"{figure.protocol:14} {figure.source:22} {figure.rows:5d} {figure.mean_percent:7.1f}"
        f" {figure.median_percent:8.1f}  {figure.target} {mark}"
    )


def _show(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        console.print(
            "  ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in line.items()
            )
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
