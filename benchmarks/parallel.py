"""Yunlu's layouts beside plain torch scripts, written by hand, on two processes.

``make bench-parallel`` runs this; ``benchmarks/README.md`` says how to read what it prints.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.faults_parts.processes import ROOT
from benchmarks.parallel_parts.figures import Run, judge, make_table
from benchmarks.parallel_parts.rounds import run_rounds
from benchmarks.parallel_parts.workload import LAYOUTS, MODEL_ARGS, WORKLOAD

_STEPS, _QUICK_STEPS = 40, 15
_WARMUP = 5
_CONTENDERS = ("hand", "yunlu")


def main() -> int:
    """Measure, print the table, and say by the exit code whether every run gave figures."""
    asked = _parse()
    screen = Console(stderr=True)
    directory = (asked.keep or Path(tempfile.mkdtemp(prefix="yunlu-parallel-"))).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    layouts = asked.only or list(LAYOUTS)
    steps = _QUICK_STEPS if asked.quick else _STEPS
    runs: list[Run] = []
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Interrupted, it shows what it has.
    with (
        suppress(KeyboardInterrupt),
        Progress(*columns, TimeElapsedColumn(), console=screen) as bar,
    ):
        total = len(layouts) * len(asked.contenders) * asked.rounds
        task = bar.add_task("making the data", total=total)
        _make_data(directory, steps)
        bar.update(task, description="measuring")
        for layout, contender, found in run_rounds(
            layouts, asked.contenders, directory, rounds=asked.rounds, steps=steps, warmup=_WARMUP
        ):
            bar.update(task, description=f"{layout}, {contender}", advance=1)
            if isinstance(found, str):
                failed += 1
                screen.print(f"{layout}, {contender} failed: {found}", markup=False)
            else:
                runs.append(found)
    print(_heading(asked, steps))  # noqa: T201 (its product)
    print(make_table(runs))  # noqa: T201
    if asked.json:
        content = {"runs": [asdict(run) for run in runs], "figures": judge(runs)}
        asked.json.write_text(json.dumps(content))
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each layout (5)")
    parser.add_argument("--quick", action="store_true", help="fewer steps, for a first look")
    parser.add_argument("--only", action="append", choices=LAYOUTS, help="a layout; repeat")
    parser.add_argument(
        "--contenders", nargs="+", choices=_CONTENDERS, default=list(_CONTENDERS), metavar="NAME",
        help=f"of {', '.join(_CONTENDERS)}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write every run and verdict here")
    parser.add_argument("--keep", type=Path, help="directory for data, logs and runs")
    return parser.parse_args()


def _make_data(directory: Path, steps: int) -> None:
    """In a process of its own: this one stays small and never imports torch."""
    words = "import sys; from pathlib import Path; from benchmarks.parallel_parts.workload import "
    words += "make_data; make_data(Path(sys.argv[1]), int(sys.argv[2]))"
    command = [sys.executable, "-c", words, str(directory), str(steps)]
    subprocess.run(command, check=True, cwd=ROOT)  # noqa: S603 (our own script)


def _heading(asked: argparse.Namespace, steps: int) -> str:
    listed = ", ".join(f"{name} {metadata.version(name)}" for name in ("yunlu", "torch"))
    return (
        f"{listed}; {MODEL_ARGS['layers']} layers of {MODEL_ARGS['width']}, batch "
        f"{WORKLOAD.batch} × {WORKLOAD.length} tokens, 2 processes of one thread; {asked.rounds} "
        f"rounds of {steps} steps, the first {_WARMUP} not counted. Median over rounds (range).\n"
    )


if __name__ == "__main__":
    sys.exit(main())
