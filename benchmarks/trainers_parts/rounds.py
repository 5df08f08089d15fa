"""Rounds: every contender in a fresh process of its own, one after another, again and again."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.trainers_parts.child import read_run
from benchmarks.trainers_parts.figures import MODES, NAMES, Run
from benchmarks.trainers_parts.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"
_TEXT_CONTENDERS = ("hand", "hf", "yunlu")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    workload: str
    mode: str
    contender: str


def list_cases(
    workloads: Sequence[str], contenders: Sequence[str], modes: Sequence[str] = tuple(MODES)
) -> list[Case]:
    """The rows to measure; those of one workload and mode stand together, so they see one weather."""
    cases: list[Case] = []
    for workload in workloads:
        # Texts differ in length, and how to treat that is a tool's own affair.
        for mode in {"defaults"} & {*modes} if workload == "text" else modes:
            able = _TEXT_CONTENDERS if workload == "text" else tuple(NAMES)
            cases += [
                Case(workload, mode, name)
                for name in able
                # The bare loop has no defaults of its own.
                if name in contenders and not (name == "bare" and mode == "defaults")
            ]
    return cases


def make_data(directory: Path, *, quick: bool) -> None:
    """In a process of its own: a large parent would count as its children's memory."""
    log = directory / "data.log"
    arguments = ["data", "none", "same", "--marks", str(log), "--steps", "0"]
    _call([*arguments, *(["--quick"] if quick else [])], directory, log, _environment(directory, 1))


def run_rounds(
    cases: Sequence[Case],
    directory: Path,
    *,
    rounds: int,
    quick: bool,
    threads: int,
    default_threads: int | None,
) -> Iterator[tuple[Case, Run | str]]:
    """Each case of each round: what it measured, or why it could not."""
    for number in range(rounds):
        for case in cases:
            steps = WORKLOADS[case.workload].length(quick=quick)
            marks = directory / f"{case.workload}-{case.mode}-{case.contender}-{number}.json"
            count = threads if case.mode == "same" else default_threads
            environment = _environment(directory, count)
            if case.workload == "text":
                environment["YUNLU_BENCH_MARKS"] = str(marks)
                environment["PYTHONPATH"] = os.pathsep.join((str(SITE), str(ROOT)))
            options = ["--marks", str(marks), "--steps", str(steps), "--threads", str(threads)]
            log = marks.with_suffix(".log")
            try:
                _call([case.workload, case.contender, case.mode, *options], directory, log,
                      environment)  # fmt: skip
                found = read_run(marks, case.workload, steps)
            except (subprocess.CalledProcessError, OSError, ValueError) as error:
                yield case, f"{error}; {log} says:\n{log.read_text(errors='replace')[-2000:]}"
                continue
            found.pop("plan")
            found["losses"] = tuple(found["losses"])
            yield (
                case,
                Run(
                    workload=case.workload,
                    mode=case.mode,
                    contender=case.contender,
                    round=number,
                    **found,
                ),
            )


def _call(
    arguments: Sequence[str], directory: Path, log: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "benchmarks.trainers_parts.child", *arguments]
    with log.open("w") as output:
        subprocess.run(  # noqa: S603 (our own script)
            [*command, "--directory", str(directory)],
            check=True,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _environment(directory: Path, threads: int | None) -> dict[str, str]:
    """The caller's, with places of our own for whatever a tool keeps between runs."""
    environment = dict(os.environ)  # noqa: TID251 (a script, not the package)
    environment |= {
        "YUNLU_HOME": str(directory / "home"),
        "YUNLU_CACHE": str(directory / "cache"),
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment
