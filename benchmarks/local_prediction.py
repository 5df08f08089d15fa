"""Predicted step time beside measured, for the examples on this machine.

``python benchmarks/local_prediction.py`` probes the machine, then trains each example a few times,
shortened. A table shows ratios of the measured median to three predictions: the analytic estimate from
the machine profile alone; the same corrected by runs of the other examples (never of the example
itself); and the prediction after start-up had timed some passes.

The wall clock is what a user sees; on a machine that others use it measures them, too. So each example
is run a second time by the processor time of the one computing thread, in start-up and steps alike, and
there are two tables. ``--clock`` asks for one of them. Nothing is taken from earlier runs of this
benchmark, unless ``--cache`` names a place to keep the probe and made data; ``--afresh`` probes again.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console
from rich.table import Table

from yunlu.core.settings import worker_environment
from yunlu.jobs.calibration import figures_of
from yunlu.planning.calibration import Calibration, RunMeasurement, learn
from yunlu.runs.events import PlanMade
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState
from yunlu.spec.load import load_job
from yunlu.training import loop, profile, worker
from yunlu.training.autotune import timer

EXAMPLES = Path(__file__).parents[1] / "examples"
LEFT_OUT = {"finetune"}
"""Needs the run of another example."""
NEAR = 0.2
WARM_STEPS = 3
"""The first steps fill caches; a run of thousands does not notice them."""


def main() -> int:
    """Probe, train, print."""
    asked = _parse()
    if asked.child:
        return _train(Path(asked.child), clock=asked.clock)
    screen = Console(highlight=False)
    names = asked.only or sorted(
        path.stem for path in EXAMPLES.glob("*.yaml") if path.stem not in LEFT_OUT
    )
    with tempfile.TemporaryDirectory(prefix="yunlu-local-") as directory:
        cache = asked.cache or f"{directory}/cache"
        place = {"YUNLU_HOME": f"{directory}/home", "YUNLU_CACHE": cache}
        environment = {**worker_environment(), "OMP_NUM_THREADS": str(asked.threads), **place}
        screen.print("probing ...")
        program = [sys.executable, "-m", "yunlu.cli.main", "probe", "--json"]
        program += ["--afresh"] if asked.afresh else []
        subprocess.run(program, env=environment, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        clocks = [asked.clock] if asked.clock else ["cpu", "wall"]
        runs = [
            found
            for turn in range(asked.rounds)
            for name in names
            for clock in clocks  # in turns: what others do now, they do to both
            if (found := _measure(name, turn, asked, clock, environment=environment, screen=screen))
        ]
    for clock in clocks:
        _print([run for run in runs if run["clock"] == clock], screen, clock=clock)
    if asked.json:
        asked.json.write_text(json.dumps(runs, indent=1, default=str))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="an example; repeat")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--steps", type=int, default=40, help="of each run (40)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), help="only this one")
    parser.add_argument("--cache", help="where made data and the probe are kept (nowhere)")
    parser.add_argument("--afresh", action="store_true", help="probe, though the cache has one")
    parser.add_argument("--json", type=Path, help="write every run here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(
    name: str,
    turn: int,
    asked: argparse.Namespace,
    clock: str,
    *,
    environment: dict[str, str],
    screen: Console,
) -> dict[str, Any] | None:
    run = open_run(Path(environment["YUNLU_HOME"]) / f"{name}-{turn}-{clock}")
    run.path.mkdir(parents=True)
    job = load_job(EXAMPLES / f"{name}.yaml")
    train = {"steps": asked.steps, "epochs": None, "evaluate": "never", "threads": asked.threads}
    job = job.model_copy(update={"train": job.train.model_copy(update=train)})
    (run.path / Document.JOB).write_text(job.model_dump_json())
    program = [sys.executable, __file__, "--child", str(run.path), "--clock", clock]
    started_at = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - ourselves
        program, env=environment, check=False, capture_output=True, text=True, cwd=EXAMPLES.parent
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        screen.print(f"{name}: {last}", style="yellow")
        return None
    events = [event for event, _ in run.read_events()]
    plan = next(event.plan for event in reversed(events) if isinstance(event, PlanMade))
    steps = [record["data_s"] + record["compute_s"] for record, _ in run.read_metrics()]
    measured_s = median(steps[WARM_STEPS:])
    screen.print(
        f"{name} {turn + 1}, {clock}: {measured_s * 1e3:.2f} ms ({time.perf_counter() - started_at:.0f} s)"
    )
    if plan.estimate is None:
        return None
    # The clock of the thread does not see others: nor must the prediction.
    busy = plan.estimate.busy if clock == "cpu" else 1.0
    return {
        "name": name,
        "clock": clock,
        "measured_s": measured_s,
        "analytic_s": plan.estimate.raw["step_s"] / busy,
        "predicted_s": plan.prediction.step_s,
        "figures": [
            each.model_copy(
                update={
                    "measured": measured_s,
                    "predicted": plan.estimate.raw["step_s"] / busy,
                    "busy": each.busy / busy,
                }
            )
            for each in figures_of(run)
            if each.quantity == "step_s"
        ],
    }


def _train(directory: Path, *, clock: str) -> int:
    """One attempt of a run, by one clock or the other."""
    if clock == "cpu":
        for module in (loop, profile, timer):
            module.perf_counter = time.thread_time
    return 0 if worker.run(directory) is RunState.FINISHED else 1


def _print(runs: list[dict[str, Any]], screen: Console, *, clock: str) -> None:
    names = list(dict.fromkeys(run["name"] for run in runs))
    table = Table(title=f"Measured step time over predicted, {clock} clock", title_justify="left")
    table.add_column("example")
    for column in ("measured", "analytic", "with others' runs", "after timing"):
        table.add_column(column, justify="right")
    ratios: dict[str, list[float]] = {"analytic": [], "corrected": [], "predicted": []}
    for name in names:
        mine = [run for run in runs if run["name"] == name]
        others = [figure for run in runs if run["name"] != name for figure in run["figures"]]
        factor = _factor(mine[0]["figures"], others)
        row = {
            "analytic": median(run["measured_s"] / run["analytic_s"] for run in mine),
            "predicted": median(run["measured_s"] / run["predicted_s"] for run in mine),
        }
        row["corrected"] = row["analytic"] / factor
        for key, ratio in row.items():
            ratios[key].append(ratio)
        shown = [f"{row[key]:.2f}" for key in ("analytic", "corrected", "predicted")]
        table.add_row(name, f"{median(r['measured_s'] for r in mine) * 1e3:.2f} ms", *shown)
    shares = [_near(ratios[key]) for key in ("analytic", "corrected", "predicted")]
    table.add_section()
    table.add_row(f"within {NEAR:.0%}", "", *shares)
    errors = [_error(ratios[key]) for key in ("analytic", "corrected", "predicted")]
    table.add_row("median error", "", *errors)
    screen.print(table)


def _factor(mine: list[RunMeasurement], others: list[RunMeasurement]) -> float:
    if not mine or not others:
        return 1.0
    path = mine[0].path
    return learn(Calibration(), others).belief(*path).factor


def _near(ratios: list[float]) -> str:
    near = sum(abs(1 / ratio - 1) <= NEAR for ratio in ratios)
    return f"{near} of {len(ratios)}"


def _error(ratios: list[float]) -> str:
    return f"{median(abs(math.expm1(-math.log(ratio))) for ratio in ratios):.0%}"


if __name__ == "__main__":
    sys.exit(main())
