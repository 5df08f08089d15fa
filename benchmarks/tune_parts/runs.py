"""Replays every contender on every task, and remembers what is done."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.tune_parts.evidence import load_task
from yunlu.lab.tuning_replay import replay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.tune_parts.contenders import Contender
    from benchmarks.tune_parts.evidence import Lcbench, Taskset

Title = str
Reason = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One study; cases that are equal give equal runs."""

    contender: str
    version: str
    task: str
    seed: int
    workers: int
    trainings: float
    """What the workers could train to the end in the time they have, in all."""
    resume_steps: float = 0.0
    """What it costs to go on with a held trial, in steps of a typical training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A case, and what came of it."""

    case: Case
    budget_s: float
    improvements: tuple[tuple[float, float], ...]
    """When the best value so far came, and that value."""
    trials: int
    evaluations: int
    resumed: int
    cpu_s: float
    """What deciding took, curves included."""


def list_cases(
    contenders: Sequence[Contender],
    tasks: Sequence[str],
    seeds: Sequence[int],
    *,
    workers: int,
    trainings: float,
    resume_steps: float,
) -> list[Case]:
    """Seed by seed, so that what is there of an unfinished measurement is fair to all."""
    versions = {each.name: each.find_version() for each in contenders}
    return [
        Case(
            contender=contender.name,
            version=versions[contender.name],
            task=task,
            seed=seed,
            workers=workers,
            trainings=trainings,
            resume_steps=resume_steps,
        )
        for seed in seeds
        for task in tasks
        for contender in contenders
    ]


def run_cases(
    cases: Sequence[Case], contenders: dict[str, Contender], folder: Path, kept: Path | None
) -> Iterator[tuple[Title, Run | Reason]]:
    """Each case's run, from those kept in a file of JSON lines where it is there."""
    known = _read(kept) if kept else {}
    curves: dict[str, Lcbench | Taskset] = {}
    for case in cases:
        title = f"{case.contender}, {case.task}, seed {case.seed}"
        if case in known:
            yield title, known[case]
            continue
        if case.task not in curves:
            curves[case.task] = load_task(folder, case.task)
        try:
            run = _run(case, contenders[case.contender], curves[case.task])
        except Exception as error:  # noqa: BLE001 (a peer's failure is a result)
            yield title, f"{type(error).__name__}: {error}"
            continue
        if kept:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")
        yield title, run


def _run(case: Case, contender: Contender, curves: Lcbench | Taskset) -> Run:
    budget_s = case.trainings * curves.whole_s / case.workers
    started = time.process_time()
    method = contender.make(curves.dimensions, curves.rungs, case.seed)
    trace = replay(
        method,
        curves,
        workers=case.workers,
        budget_s=budget_s,
        resume_s=case.resume_steps * curves.whole_s / curves.rungs,
    )
    return Run(
        case=case,
        budget_s=budget_s,
        improvements=tuple(trace.improvements()),
        trials=len(trace.trials),
        evaluations=len(trace.evaluations),
        resumed=trace.resumed,
        cpu_s=time.process_time() - started,
    )


def _read(kept: Path) -> dict[Case, Run]:
    if not kept.exists():
        return {}
    lines = kept.read_text(encoding="utf-8").splitlines()
    runs = [_parse(json.loads(line)) for line in lines if line.endswith("}")]
    return {run.case: run for run in runs}


def _parse(stored: dict[str, Any]) -> Run:
    case = Case(**stored.pop("case"))
    improvements = tuple((at_s, value) for at_s, value in stored.pop("improvements"))
    return Run(case=case, improvements=improvements, **stored)
