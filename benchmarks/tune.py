"""Yunlu's tuning beside Optuna and Ray Tune: ``python benchmarks/tune.py [--only PART]``.

``make bench-tune`` installs the others and runs this; ``benchmarks/README.md`` says how to read what
it prints. Where the evidence is not there, it says so and does nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console

from benchmarks.measurement import gather
from benchmarks.tune_parts.contenders import CONTENDERS
from benchmarks.tune_parts.curves import make_figures, make_score_table, make_task_table, plot
from benchmarks.tune_parts.evidence import DEFAULT_FOLDER, LCBENCH, TASKS, list_tasks
from benchmarks.tune_parts.figures import Figure, make_table
from benchmarks.tune_parts.runs import Run, list_cases, run_cases
from benchmarks.tune_parts.scoring import BASE, make_scales, score

console = Console(width=140, highlight=False)
errors = Console(stderr=True, highlight=False)

PARTS = {
    "curves": "The same simulated time on recorded learning curves",
    "suggest": "Processor time of the next suggestion",
    "elastic": "Devices of stopped trials go to the others",
    "transfer": "Learning rate and batch size from small models",
}
_MODULES = {"suggest": "suggest", "elastic": "elastic", "transfer": "steplaw"}


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables; 1 if a figure is not reached, or something failed."""
    options = _parse(arguments)
    if not (options.evidence / "yahpo_lcbench").is_dir():
        console.print(f"skipped: no curves in {options.evidence}; name theirs with --evidence")
        return 0
    if options.list_tasks:
        console.print("\n".join(list_tasks(options.evidence)))
        return 0
    found: dict[str, list[Figure]] = {}
    runs: list[Run] = []
    failed = 0
    for part in options.only or PARTS:
        if part == "curves":
            runs, failed = _compare(options)
            found[part] = make_figures(score(runs, make_scales(runs)))
        else:
            module: Any = import_module(f"benchmarks.tune_parts.{_MODULES[part]}")
            found[part] = module.measure(options.evidence, _say, quick=options.quick)
        if found[part]:
            console.print(make_table(PARTS[part], found[part]))
    if options.json:
        options.json.write_text(json.dumps(_as_dict(found, runs), indent=1), encoding="utf-8")
    request = [
        each.is_met for figures in found.values() for each in figures if each.is_met is not None
    ]
    if request:
        missed = request.count(False)
        console.print(f"{missed} figures are not reached" if missed else "all figures are reached")
    return 1 if failed or not all(request) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = [each.name for each in CONTENDERS.values() if each.is_default]
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeat")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=default, metavar="NAME",
        help=f"of {', '.join(CONTENDERS)}; {BASE} always takes part",
    )  # fmt: skip
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), metavar="TASK",
        help="others than the nine: 3945, ... (see --list-tasks); or lcbench, taskset: all of them",
    )  # fmt: skip
    parser.add_argument("--list-tasks", action="store_true", help="print the names of all tasks")
    parser.add_argument("--seeds", type=int, default=10, help="studies of each on a task (10)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4, help="simulated (4)")
    parser.add_argument(
        "--trainings", type=float, default=50, help="whole trainings that the time is worth (50)"
    )
    parser.add_argument(
        "--resume-steps", type=float, default=0, help="what going on with a held trial costs (0)"
    )
    parser.add_argument("--quick", action="store_true", help="two seeds, smaller sizes")
    parser.add_argument("--evidence", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--keep", type=Path, help="file of runs: what is in it is not run again")
    parser.add_argument("--plot", type=Path, help="draw regret over time into this picture")
    parser.add_argument("--json", type=Path, help="write every run and figure here")
    return parser.parse_args(arguments)


def _compare(options: argparse.Namespace) -> tuple[list[Run], int]:
    names = [*dict.fromkeys([BASE, *options.contenders])]
    contenders = {name: CONTENDERS[name] for name in names if CONTENDERS[name].is_installed}
    for name in names:
        if name not in contenders:
            _say(f"{CONTENDERS[name].label} is not installed here and is left out: make bench-tune")
    cases = list_cases(
        list(contenders.values()),
        _choose_tasks(options),
        range(options.first_seed, options.first_seed + (2 if options.quick else options.seeds)),
        workers=options.workers,
        trainings=options.trainings,
        resume_steps=options.resume_steps,
    )
    runs, failed = gather(
        lambda: None,
        run_cases(cases, contenders, options.evidence, options.keep),
        total=len(cases),
        screen=errors,
    )
    scores = score(runs, make_scales(runs))
    if not scores:
        return [], failed
    console.print(make_task_table(scores))
    console.print(make_score_table(scores, _describe(options, len(scores[0].final_by_task))))
    for name, contender in contenders.items():
        _say(f"{contender.label}: {next(c.version for c in cases if c.contender == name)}")
    if options.plot:
        plot(runs, options.plot)
    return runs, failed


def _choose_tasks(options: argparse.Namespace) -> list[str]:
    known = list_tasks(options.evidence)
    chosen: list[str] = []
    for name in options.tasks:
        matching = [each for each in known if name in {each, *each.split("/")}]
        if not matching:
            sys.exit(f"no task {name}; --list-tasks names them all")
        chosen += matching
    if find_spec("onnxruntime") is None:
        _say("LCBench needs onnxruntime and is left out: make bench-tune")
        chosen = [each for each in chosen if not each.startswith(LCBENCH)]
    return list(dict.fromkeys(chosen))


def _describe(options: argparse.Namespace, tasks: int) -> str:
    cost = f", {options.resume_steps:g} steps to resume" if options.resume_steps else ""
    return (
        f"Regret at parts of the budget: mean over {tasks} tasks of medians over seeds; "
        f"{options.workers} workers, time of {options.trainings:g} whole trainings{cost}"
    )


def _say(text: str) -> None:
    errors.print(text, style="dim")


def _as_dict(found: dict[str, list[Figure]], runs: list[Run]) -> dict[str, Any]:
    parts = {part: [figure.as_dict() for figure in figures] for part, figures in found.items()}
    scores = score(runs, make_scales(runs))
    return {
        "figures": parts,
        "scores": [asdict(each) for each in scores],
        "runs": [asdict(run) for run in runs],
    }


if __name__ == "__main__":
    sys.exit(main())
