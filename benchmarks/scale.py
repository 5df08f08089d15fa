"""Long runs and many runs: ``python benchmarks/scale.py [--steps N] [--runs N]``.

Writes the metrics of a million steps through the worker's own writer, and ten thousand runs through the run
store; then measures what reading them costs, in processes of their own: CPU seconds, memory, bytes, directories
touched. Prints each figure beside its goal; the exit code says whether all are met.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console
from rich.table import Table

from tests.sample_events import sample_plan
from yunlu.runs.changes import mark_changed
from yunlu.runs.events import AttemptStarted, Evaluated, PlanMade, StateChanged
from yunlu.runs.home import new_run, open_run
from yunlu.runs.metric_writer import MetricWriter
from yunlu.runs.run_store import Area, Log, write_job
from yunlu.runs.states import RunState
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore

STEPS, RUNS = 1_000_000, 10_000
FLUSHED = 250
"""Records a write, as at a step of 2 ms."""
STEP_S = 0.002
SPIKE = 1e3
SEALING = "metric segments"
PLAN = sample_plan(
    choices=[
        {"name": f"choice {number}", "value": "auto", "reason": "as long as a reason is"}
        for number in range(12)
    ]
)

_MEASURED = """
import os, sys
home, seen = sys.argv[1], set()
def look(event, arguments):
    if event in {"open", "os.listdir", "os.scandir"} and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        if path.startswith(home + "/"):
            seen.add(path[len(home) + 1 :].split("/")[0])
if sys.argv[2] == "count":
    sys.addaudithook(look)
from yunlu.cli.main import main
code = main(sys.argv[3:])
runs = [name for name in seen if name[0] != "." and os.path.isdir(os.path.join(home, name))]
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(len(runs), peak.split()[1], file=sys.stderr)
sys.exit(code)
"""

console = Console(width=120, highlight=False)


def main() -> int:
    """Print a table; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--runs", type=int, default=RUNS)
    chosen = parser.parse_args()
    rows: list[tuple[str, float, float | None, str]] = []
    with tempfile.TemporaryDirectory(prefix="yunlu-scale-") as directory:
        if chosen.steps:
            rows += measure_steps(Path(directory) / "long", chosen.steps)
        if chosen.runs:
            rows += measure_runs(Path(directory) / "many", chosen.runs)
    table = Table("measured", "value", "goal", "")
    for what, value, goal, unit in rows:
        verdict = "" if goal is None else "met" if value <= goal else "MISSED"
        table.add_row(what, f"{value:,.3g} {unit}", "" if goal is None else f"≤ {goal:g}", verdict)
    console.print(table)
    return int(any(goal is not None and value > goal for _, value, goal, _ in rows))


def measure_steps(home: Path, steps: int) -> list[tuple[str, float, float | None, str]]:
    """One run of so many steps: written, then reported."""
    home.mkdir(mode=0o700)
    run = make_run(home, "long-1")
    write_s, slowest_s = write_metrics(run, steps)
    run.emit(StateChanged(state=RunState.FINISHED))
    path = Path(run.location(""))
    stored = sum(file.stat().st_size for file in (path / Area.METRICS).rglob("*"))
    stored += (path / Log.METRICS).stat().st_size
    report = run_yunlu(home, "report", str(path), "--json")
    (curve,) = (
        curve for curve in json.loads(report.output)["curves"] if curve["key"] == "train_loss"
    )
    assert max(curve["values"]) == SPIKE, "the report lost the highest loss"
    assert (curve["steps"][0], curve["steps"][-1]) == (1, steps)
    return [
        (f"report of {steps:,} steps", report.cpu_s, 5.0, "CPU-s"),
        ("its peak memory", report.peak_bytes / 1e6, 250.0, "MB"),
        ("points of its longest curve", len(curve["steps"]), 1000, ""),
        ("metrics on disk", stored / steps, 60.0, "bytes a step"),
        (
            "the writer, in the thread that trains",
            write_s / steps / STEP_S * 100,
            1.0,
            "% of a 2-ms step",
        ),
        ("its slowest append", slowest_s * 1000, None, "ms"),
    ]


def measure_runs(home: Path, count: int) -> list[tuple[str, float, float | None, str]]:
    """So many runs: listed for the first time, again, after a change; one of them shown."""
    home.mkdir(mode=0o700)
    for number in range(count):
        run = make_run(home, f"run-{number:05d}")
        states = (RunState.FINISHED, RunState.FAILED, RunState.STOPPED)
        run.emit(
            Evaluated(
                split="validation", step=100, loss=1.0, metrics={"accuracy": 0.9}, seconds=1.0
            )
        )
        if number % 3 == 2:
            run.emit(StateChanged(state=RunState.STOPPING))
        run.emit(StateChanged(state=states[number % 3]))
    first, again = run_yunlu(home, "ps"), run_yunlu(home, "ps")
    counted = run_yunlu(home, "ps", count=True)
    run.emit(StateChanged(state=RunState.PENDING, reason="resumed"))
    changed = run_yunlu(home, "ps")
    shown = run_yunlu(home, "show", "run-00007")
    shown_counted = run_yunlu(home, "show", "run-00007", count=True)
    every = run_yunlu(home, "ps", "--json")
    assert len(every.output.splitlines()) == count
    few = home.with_name("few")
    few.mkdir(mode=0o700)
    make_run(few, "run-00007").emit(StateChanged(state=RunState.FINISHED))
    run_yunlu(few, "ps")
    mark_changed(few, "run-00007")
    changed_alone = run_yunlu(few, "ps")
    alone, shown_alone = run_yunlu(few, "ps"), run_yunlu(few, "show", "run-00007")
    return [
        (f"first ps of {count:,} runs", first.cpu_s, 5.0, "CPU-s"),
        ("later ps", again.cpu_s, 0.5, "CPU-s"),
        ("the same with one run", alone.cpu_s, None, "CPU-s"),
        ("run directories that it opens", counted.runs_opened, 0, ""),
        ("ps after a run was resumed", changed.cpu_s, None, "CPU-s"),
        ("the same with one run", changed_alone.cpu_s, None, "CPU-s"),
        ("ps --json", every.cpu_s, None, "CPU-s"),
        ("show ID", shown.cpu_s, None, "CPU-s"),
        ("the same with one run", shown_alone.cpu_s, None, "CPU-s"),
        ("run directories that it opens", shown_counted.runs_opened, 1, ""),
    ]


def make_run(home: Path, name: str) -> RunStore:
    """A run that has begun."""
    job = {"name": name, "task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
    with new_run(home, name) as run:
        write_job(run, Job.model_validate(job))
    run = open_run(home / name)
    run.emit(StateChanged(state=RunState.PENDING, reason="submitted"))
    run.emit(AttemptStarted(number=1, pid=1, process_started_at=1.0, began_at=time.time()))
    run.emit(StateChanged(state=RunState.PLANNING))
    run.emit(PlanMade(plan=PLAN))
    run.emit(StateChanged(state=RunState.RUNNING))
    return run


def write_metrics(run: RunStore, steps: int) -> tuple[float, float]:
    """Seconds of the calls, and of the slowest."""
    writer, draw = MetricWriter(run), random.Random(0)  # noqa: S311 (no secret)
    whole_s = slowest_s = 0.0
    for first in range(1, steps + 1, FLUSHED):
        records = [
            make_record(step, steps, draw) for step in range(first, min(first + FLUSHED, steps + 1))
        ]
        began_at = time.thread_time()
        wall_at = time.perf_counter()
        writer.append(records)
        whole_s += time.thread_time() - began_at
        slowest_s = max(slowest_s, time.perf_counter() - wall_at)
        if any(thread.name == SEALING for thread in threading.enumerate()):
            time.sleep(
                FLUSHED * STEP_S / 10
            )  # steps take time: the writer is not asked for more than that
    writer.close()
    return whole_s, slowest_s


def make_record(step: int, steps: int, draw: random.Random) -> dict[str, Any]:
    """A record as a worker writes it; the noise has all digits."""
    loss = SPIKE if step == steps // 3 else 2.0 * math.exp(-step / steps) + draw.gauss(0, 0.1)
    return {
        "step": step,
        "epoch": step * 64 / 50_000,
        "loss": loss,
        "lr": 1e-3 * math.cos(step / steps),
        "grad_norm": draw.lognormvariate(0, 1),
        "samples": step * 64,
        "items": 64.0,
        "data_s": draw.lognormvariate(-9, 1),
        "compute_s": STEP_S + draw.gauss(0, 1e-4),
        "communication_s": 0.0,
        "evaluate_s": 0.0,
        "checkpoint_s": 0.0,
        "at": 1.8e9 + step * STEP_S + draw.gauss(0, 1e-4),
        "attempt": 1,
        "memory_bytes": 1_234_567_890,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What one command did."""

    output: str
    cpu_s: float
    peak_bytes: float
    runs_opened: int
    """Directories of runs in which it opened something."""


def run_yunlu(home: Path, *arguments: str, count: bool = False) -> Command:
    """Run a command in a process of its own; counting slows it down."""
    mode = "count" if count else "time"
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _MEASURED, str(home), mode, *arguments],
            stdout=output,
            stderr=errors,
            env=os.environ | {"YUNLU_HOME": str(home), "COLUMNS": "120"},  # noqa: TID251
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        said = errors.read().decode()
        if process.returncode:
            raise RuntimeError(f"yunlu {' '.join(arguments)} failed: {said}")
        opened, peak = said.split()[-2:]
        return Command(
            output=output.read().decode(),
            cpu_s=used.ru_utime + used.ru_stime,
            peak_bytes=int(peak) * 1024.0,
            runs_opened=int(opened),
        )


if __name__ == "__main__":
    sys.exit(main())
