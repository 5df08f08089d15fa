"""Yunlu's layouts beside plain torch scripts, written by hand, on two processes.

``make bench-parallel`` runs this; ``benchmarks/README.md`` says how to read what it prints.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console

from benchmarks.faults_parts.processes import ROOT
from benchmarks.measurement import gather, make_parser, write_figures
from benchmarks.parallel_parts.figures import judge, make_table
from benchmarks.parallel_parts.rounds import run_rounds
from benchmarks.parallel_parts.workload import LAYOUTS, MODEL_ARGS, WORKLOAD

if TYPE_CHECKING:
    import argparse

_STEPS, _QUICK_STEPS = 40, 15
_WARMUP = 5
_CONTENDERS = ("hand", "yunlu")


def main() -> int:
    """Measure, print the table, and say by the exit code whether every run gave figures."""
    asked = make_parser(__doc__, only=LAYOUTS, kind="layout", contenders=_CONTENDERS).parse_args()
    directory = (asked.keep or Path(tempfile.mkdtemp(prefix="yunlu-parallel-"))).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    layouts = asked.only or list(LAYOUTS)
    steps = _QUICK_STEPS if asked.quick else _STEPS
    found = run_rounds(
        layouts, asked.contenders, directory, rounds=asked.rounds, steps=steps, warmup=_WARMUP
    )
    runs, failed = gather(
        lambda: _make_data(directory, steps),
        ((f"{layout}, {contender}", run) for layout, contender, run in found),
        total=len(layouts) * len(asked.contenders) * asked.rounds,
        screen=Console(stderr=True),
    )
    print(_heading(asked, steps))  # noqa: T201 (its product)
    print(make_table(runs))  # noqa: T201
    if asked.json:
        write_figures(asked.json, runs, judge(runs))
    return 1 if failed else 0


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
