"""Yunlu beside a hand-written loop, HF Trainer, Lightning and Accelerate, in one interleaved run.

``make bench-trainers`` installs the others and runs this; ``benchmarks/README.md`` says how to read
what it prints.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console

from benchmarks.measurement import gather, make_parser, write_figures
from benchmarks.trainers_parts.figures import MODES, NAMES, judge, make_table
from benchmarks.trainers_parts.rounds import list_cases, make_data, run_rounds
from benchmarks.trainers_parts.workloads import WORKLOADS

if TYPE_CHECKING:
    import argparse

_PACKAGES = {"hf": "transformers", "lightning": "lightning", "accelerate": "accelerate"}


def main() -> int:
    """Measure, print the table, and say by the exit code whether every contender ran."""
    asked = _parse()
    screen = Console(stderr=True)
    contenders = [
        name
        for name in asked.contenders
        if name not in _PACKAGES or find_spec(_PACKAGES[name]) is not None
    ]
    for name in sorted(set(asked.contenders) - set(contenders)):
        screen.print(f"{NAMES[name]} is not installed here and is left out: make bench-trainers")
    cases = list_cases(
        asked.only or list(WORKLOADS), contenders, [asked.mode] if asked.mode else [*MODES]
    )
    directory = asked.keep or Path(tempfile.mkdtemp(prefix="yunlu-bench-"))
    directory.mkdir(parents=True, exist_ok=True)
    found = run_rounds(
        cases,
        directory,
        rounds=asked.rounds,
        quick=asked.quick,
        threads=asked.threads,
        default_threads=asked.default_threads,
    )
    runs, failed = gather(
        lambda: make_data(directory, quick=asked.quick),
        ((f"{case.workload}, {case.mode}, {NAMES[case.contender]}", run) for case, run in found),
        total=len(cases) * asked.rounds,
        screen=screen,
    )
    print(_versions(asked, contenders))  # noqa: T201 (its product)
    print(make_table(runs))  # noqa: T201
    if asked.json:
        write_figures(asked.json, runs, judge(runs))
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, only=WORKLOADS, kind="workload", contenders=NAMES)
    parser.add_argument("--mode", choices=MODES, help="only these rows")
    parser.add_argument("--threads", type=int, default=1, help="with the same settings (1)")
    parser.add_argument(
        "--default-threads", type=int, help="with defaults; unset, each tool takes what it takes"
    )
    return parser.parse_args()


def _versions(asked: argparse.Namespace, contenders: list[str]) -> str:
    names = ["yunlu", "torch", *(_PACKAGES[name] for name in contenders if name in _PACKAGES)]
    listed = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    length = "quick" if asked.quick else "full"
    threads = asked.default_threads or "each tool's own"
    return (
        f"{listed}; {asked.rounds} rounds, {length}; threads: {asked.threads} with the same "
        f"settings, {threads} with defaults. Median over rounds (range).\n"
    )


if __name__ == "__main__":
    sys.exit(main())
