"""Compare what two checkouts compute: losses, ledgers, allocations, predictions, to the last bit.

    python scripts/compare_trees.py OLD NEW [--evidence DIR]

Each checkout runs the same commands in a home of its own. ``--evidence`` is a directory with
recorded workloads and measured trainings (``sched/pollux``, ``planner/*.csv``); without it the
allocations and the predictions of recorded layouts are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMES = ("_s", "at", "memory_bytes", "attempt", "life", "generation")
DIGITS = {"task": "image-classification", "model": "cnn", "data": "sklearn:digits"}
TRAIN = {
    "steps": 40,
    "seed": 7,
    "batch": 64,
    "micro_batch": 32,
    "precision": "fp32",
    "evaluate": 20,
}
COUNTS = ("batch", "micro_batch", "accumulation", "recompute", "precision", "steps", "lr_factor")
FIGURES = ("memory_bytes", "step_s", "samples_per_s", "tokens_per_s", "total_s", "dollars")
MODEL = {
    "task": "language-modeling",
    "model": {"name": "transformer", "args": {"layers": 24, "width": 2048, "heads": 16}},
    "data": "text.txt",
    "train": {"epochs": 1, "batch": 64},
}


def main() -> int:
    """Run both trees and tell where they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--evidence", type=Path)
    options = parser.parse_args()
    old, new = (compute(tree.resolve(), options.evidence) for tree in (options.old, options.new))
    differing = [name for name in old if old[name] != new.get(name)]
    for name in old:
        verdict = "differs" if name in differing else "equal"
        print(f"{verdict:<8} {name:<40} {digest(old[name])} {digest(new.get(name))}")
    return 1 if differing else 0


def compute(tree: Path, evidence: Path | None) -> dict[str, Any]:
    """Everything that must not change, by name."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        for devices in (1, 2):
            results |= train(tree, home, devices)
        results["options of a plan"] = plan(tree, home)
        if evidence is not None:
            results |= replay(tree, home, evidence)
    return results


def train(tree: Path, home: Path, devices: int) -> dict[str, Any]:
    """Losses and ledger of a short training on so many workers."""
    job = DIGITS | {"name": f"on{devices}", "devices": devices, "train": TRAIN}
    if devices > 1:
        job |= {"communication": {"method": "ring"}}
    (home / "job.yaml").write_text(json.dumps(job), "utf-8")
    command(tree, home, "train", "job.yaml")
    run = max((home / "yunlu-runs").glob(f"*on{devices}*"), key=lambda path: path.stat().st_mtime)
    # As a tree of any version writes them; so few stay lines.
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    results: dict[str, Any] = {
        f"losses, {devices} workers": [
            (row["step"], row["loss"], row["grad_norm"]) for row in records
        ]
    }
    ledger = run / "ledger.jsonl"
    if ledger.exists():
        rows = [json.loads(line) for line in ledger.read_text("utf-8").splitlines()]
        results[f"ledger, {devices} workers"] = [
            {key: value for key, value in row.items() if not key.endswith(TIMES)} for row in rows
        ]
    return results


def plan(tree: Path, home: Path) -> Any:
    """Options for a transformer on priced hardware, without what depends on the clock."""
    (home / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog\n" * 20_000, "utf-8"
    )
    (home / "model.yaml").write_text(json.dumps(MODEL), "utf-8")
    printed = command(
        tree, home, "plan", "model.yaml", "--gpu", "A100-80GB", "--top", "5", "--json"
    )
    return [
        {key: option[key] for key in ("layout", "hardware", *COUNTS)} | figures(option)
        for option in json.loads(printed)["options"]
    ]


def figures(option: dict[str, Any]) -> dict[str, list[float]]:
    """Predicted figures of an option, each with its interval."""
    if "prediction" not in option:  # before options were plans
        return {name: [option[name][end] for end in ("value", "low", "high")] for name in FIGURES}
    prediction = option["prediction"]
    return {name: [prediction[name], *prediction["intervals"][name]] for name in FIGURES}


def replay(tree: Path, home: Path, evidence: Path) -> dict[str, Any]:
    """Allocations on a recorded workload, and predictions of recorded layouts."""
    pollux = (evidence / "sched" / "pollux").resolve()
    workload = next((pollux / "workloads").glob("*6.csv"))
    simulate = (
        "pool",
        "simulate",
        "--trace",
        str(workload),
        "--profiles",
        str(pollux / "profiles"),
    )
    printed = command(tree, home, *simulate, "--cluster", "16x4", "--policy", "yunlu", "--json")
    results: dict[str, Any] = {
        "allocations, one workload": numbers(json.loads(printed.splitlines()[0]))
    }
    for name in ("vtrain_multi", "llm_foundry", "torchtitan"):
        rows = (evidence / "planner" / f"{name}.csv").resolve()
        results[f"predictions, {name}"] = command(
            tree, home, "plan", "predict", str(rows), "--json"
        )
    return results


def numbers(value: Any, prefix: str = "") -> dict[str, float]:
    """Numbers of a JSON value by their path; texts may be worded anew, times are not repeatable."""
    if isinstance(value, dict):
        parts = [numbers(inner, f"{prefix}.{key}".strip(".")) for key, inner in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    if isinstance(value, list):
        parts = [numbers(inner, f"{prefix}[{index}]") for index, inner in enumerate(value)]
        return {key: number for part in parts for key, number in part.items()}
    is_number = isinstance(value, int | float) and "decision" not in prefix
    return {prefix: float(value)} if is_number else {}


def command(tree: Path, home: Path, *arguments: str) -> str:
    """Run one command of a checkout, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    environment["YUNLU_HOME"] = str(home / "yunlu-runs")
    words = [sys.executable, "-m", "yunlu.cli.main", *arguments]
    done = subprocess.run(  # noqa: S603 (our own words)
        words, cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def digest(value: Any) -> str:
    """A short name for a value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
