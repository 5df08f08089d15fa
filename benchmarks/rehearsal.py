"""Rehearsed peaks beside real ones: ``python benchmarks/rehearsal.py [CASE...]``.

Real is the training loop in real processes on the pretend accelerator of the tests, which counts every byte
of its devices (Linux and a C++ compiler are needed, no accelerator). ``--large`` rehearses a transformer of
70 billion weights on 512 workers instead, and ``--formulas`` compares the planner's memory model with
rehearsals. The exit code says whether the goals are met.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console
from rich.table import Table

from benchmarks.rehearsal_parts.cases import CASES, LARGE
from tests.pretend.build import ROOT, environment, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GOAL, GOAL_CPU_S, GOAL_FORMULAS = 0.03, 60.0, 0.05
_MOST_DEVICES, _MEMORY = 4, 2 << 30

console = Console(width=140, highlight=False)


def main() -> int:
    """Print a table; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="; ".join(CASES))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--formulas", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if unknown := set(asked.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if asked.large:
        found, is_good = _rehearse_large()
    elif asked.formulas:
        found, is_good = _judge_formulas()
    else:
        if reason := why_not():
            console.print(f"skipped: {reason}")
            return 0
        found, is_good = _compare(asked.cases or list(CASES))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if is_good else 1


def compare(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Real and rehearsed peaks of cases, one after the other, in processes with pretend devices."""
    command = [sys.executable, "-m", "benchmarks.rehearsal_parts.on_device", *names]
    env = environment(devices=_MOST_DEVICES, memory=_MEMORY)
    with subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def ratios(found: dict[str, Any]) -> list[float]:
    """Rehearsed over real peak of each worker that was rehearsed."""
    ranks = found["rehearsed"]["ranks"]
    return [rank["peak_bytes"] / found["real"][rank["rank"]]["peak"] for rank in ranks]


def _compare(names: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    table = Table("case", "worker", "rehearsed", "real", "ratio", "at its peak", "built", box=None)
    for title in ("rehearsed", "real", "ratio", "built"):
        next(item for item in table.columns if item.header == title).justify = "right"
    rows: list[dict[str, Any]] = []
    worst: list[float] = []
    for found in compare(names):
        rows.append(found)
        if "error" in found:
            table.add_row(found["case"], "", found["error"])
            continue
        for rank, ratio in zip(found["rehearsed"]["ranks"], ratios(found), strict=True):
            real = found["real"][rank["rank"]]
            figures = [_mib(value) for value in (rank["peak_bytes"], real["peak"])]
            table.add_row(found["case"], str(rank["rank"]), *figures, f"{ratio:.3f}", rank["phase"],
                          _mib(real["built"]))  # fmt: skip
            worst.append(abs(ratio - 1))
    console.print(table)
    is_whole = len(rows) == len(names) and not any("error" in found for found in rows)
    console.print(
        f"MiB; {len(rows)} cases, {len(worst)} workers: median error {median(worst or [1]):.1%}, largest "
        f"{max(worst or [1]):.1%} (goal {GOAL:.0%})"
    )
    return rows, is_whole and max(worst) <= GOAL


def _rehearse_large() -> tuple[list[dict[str, Any]], bool]:
    table = Table("layout", "peak of worker 0", "by what takes it", "CPU seconds", box=None)
    rows: list[dict[str, Any]] = []
    for case in LARGE.values():
        given = {
            "job": case.job.model_dump(mode="json"),
            "plan": case.plan("cuda").model_dump(mode="json"),
        }
        command = [sys.executable, "-m", "yunlu.training.rehearsal"]
        done = subprocess.run(  # noqa: S603 (our own interpreter and module)
            command, input=json.dumps(given), capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout)["found"]
        rows.append(found)
        first = found["ranks"][0]
        parts = ", ".join(f"{name} {_mib(count)}" for name, count in first["parts"].items())
        table.add_row(str(case.layout), _mib(first["peak_bytes"]), parts, f"{found['cpu_s']:.1f}")
    console.print(table)
    return rows, all(found["cpu_s"] <= GOAL_CPU_S for found in rows)


def _judge_formulas() -> tuple[list[dict[str, Any]], bool]:
    from benchmarks.rehearsal_parts.formulas import FormulaError, judge  # noqa: PLC0415 - torch

    table = Table("model", "layout", "recompute", "precision", "rehearsed", "engine's formulas",
                  "error", "search's formulas", "error", box=None)  # fmt: skip
    found: list[FormulaError] = []
    for row in judge():
        found.append(row)
        table.add_row(*row.texts())
    console.print(table)
    engine = median(abs(row.engine_error) for row in found)
    search = median(abs(row.search_error) for row in found)
    console.print(
        f"median error: engine's formulas {engine:.1%}, search's {search:.1%} (goal {GOAL_FORMULAS:.0%})"
    )
    return [row.as_dict() for row in found], max(engine, search) <= GOAL_FORMULAS


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f}"


if __name__ == "__main__":
    sys.exit(main())
