"""Yunlu beside torchrun and torchft when workers and nodes are killed, hang, leave and come back.

``make bench-faults`` installs what it needs and runs this; ``benchmarks/README.md`` says how to read
what it prints.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.faults_parts.contenders import (
    HANG_TIMEOUT_S,
    Contender,
    Torchft,
    Torchrun,
    TorchrunDefault,
    why_torchft_is_absent,
)
from benchmarks.faults_parts.figures import FAULTS, NAMES, judge, make_tables
from benchmarks.faults_parts.trials import NODE_TRIALS, TRIALS, Outcome, run_trial
from benchmarks.faults_parts.workload import Workload
from benchmarks.faults_parts.yunlu_contender import Yunlu
from benchmarks.netrig import Rig, RigError, why_no_rig

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENDERS: dict[str, type[Contender]] = {
    "torchrun": Torchrun,
    "torchrun-default": TorchrunDefault,
    "torchft": Torchft,
    "yunlu": Yunlu,
}
_SLOW = {("worker hung", "torchrun"): 2, ("cable back", "torchrun"): 1}
"""A trial of more than a minute tells as much in two rounds as in ten."""
_CABLES = {"node cut off", "cable back"}
_ONLY_WHERE_ASKED = ("torchrun-default",)
_LENGTHS = {"quick": (20.0, 60.0), "full": (30.0, 120.0), "long": (60.0, 600.0)}
"""Of the run under kills: a kill every so many seconds, for so many."""


def main() -> int:
    """Measure, print the tables, and say by the exit code whether every trial ended."""
    asked = _parse()
    screen = Console(stderr=True)
    contenders, faults = _choose(asked, screen)
    directory = (asked.keep or Path(tempfile.mkdtemp(prefix="yunlu-faults-"))).absolute()
    cases = list(_list_cases(contenders, faults, asked))
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Interrupted, it shows what it has.
    with (
        suppress(KeyboardInterrupt),
        Progress(*columns, TimeElapsedColumn(), console=screen) as bar,
    ):
        task = bar.add_task("measuring", total=len(cases))
        for fault, contender, number in cases:
            bar.update(task, description=f"{fault}, {NAMES[contender]}")
            outcome = _measure(fault, contender, number, directory, asked)
            outcomes.append(outcome)
            if asked.json:
                _write(asked.json, outcomes)
            if outcome.failure:
                where = _place(directory, fault, contender, number)
                screen.print(f"{NAMES[contender]}, {fault}: {outcome.failure}; see {where}")
            bar.advance(task)
    print(_heading(asked, contenders))  # noqa: T201 (its product)
    print(make_tables(outcomes))  # noqa: T201
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, help="of each contender and fault (10; 1 if quick)")
    parser.add_argument("--quick", action="store_true", help="one round, for a first look")
    parser.add_argument(
        "--long", action="store_true", help="ten minutes with a kill per minute, instead of two"
    )
    parser.add_argument("--only", action="append", choices=FAULTS, help="a fault; repeat")
    parser.add_argument(
        "--contenders", nargs="+", choices=NAMES, metavar="NAME",
        default=[name for name in NAMES if name not in _ONLY_WHERE_ASKED],
        help=f"of {', '.join(NAMES)}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write every outcome and verdict here")
    parser.add_argument("--keep", type=Path, help="directory for data, logs and journals")
    asked = parser.parse_args()
    asked.rounds = asked.rounds or (1 if asked.quick else 10)
    return asked


def _choose(asked: argparse.Namespace, screen: Console) -> tuple[list[str], list[str]]:
    """Who can take part here, and what can be done to them."""
    contenders: list[str] = []
    for name in asked.contenders:
        reason = why_torchft_is_absent() if name == "torchft" else None
        if reason is None:
            contenders.append(name)
        else:
            screen.print(f"{NAMES[name]} is left out: {reason}")
    faults = list(asked.only or FAULTS)
    if _CABLES & {*faults} and (reason := why_no_rig()) is not None:
        faults = [fault for fault in faults if fault not in _CABLES]
        screen.print(f"no cable can be cut here: {reason}")
    return contenders, faults


def _list_cases(
    contenders: list[str], faults: list[str], asked: argparse.Namespace
) -> Iterator[tuple[str, str, int]]:
    """Those of one fault and round stand together, so they see one weather."""
    for fault in faults:
        # The run under kills is many trials in one.
        rounds = 1 if fault == "many kills" else asked.rounds
        for number in range(rounds):
            for name in contenders:
                if number < _SLOW.get((fault, name), rounds):
                    yield fault, name, number


def _measure(
    fault: str, name: str, number: int, directory: Path, asked: argparse.Namespace
) -> Outcome:
    options: dict[str, float] = {}
    if fault == "many kills":
        length = "long" if asked.long else "quick" if asked.quick else "full"
        options["every_s"], options["length_s"] = _LENGTHS[length]
    try:
        with Rig(2) if fault in _CABLES else nullcontext() as hosts:
            contender = CONTENDERS[name](
                directory=_place(directory, fault, name, number),
                workload=Workload(),
                hosts=hosts,
                nodes=fault in NODE_TRIALS,
            )
            return run_trial(
                contender,
                TRIALS[fault],
                fault=fault,
                name=name,
                round_number=number,
                **options,
            )
    # Of the machine; the others go on.
    except (OSError, RigError, subprocess.SubprocessError) as error:
        return Outcome(fault=fault, contender=name, round=number, failure=str(error))


def _place(directory: Path, fault: str, contender: str, number: int) -> Path:
    return directory / f"{fault.replace(' ', '-')}-{contender}-{number}"


def _write(path: Path, outcomes: list[Outcome]) -> None:
    content = {"outcomes": [asdict(each) for each in outcomes], "figures": judge(outcomes)}
    path.write_text(json.dumps(content))


def _heading(asked: argparse.Namespace, contenders: list[str]) -> str:
    names = ["yunlu", "torch", *(["torchft"] if "torchft" in contenders else [])]
    listed = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return (
        f"{listed}; 2 workers, {asked.rounds} rounds; torchrun's processes wait "
        f"{HANG_TIMEOUT_S:.0f} s for each other. Median over rounds, worst.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
