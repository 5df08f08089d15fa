"""A real text task with HF Trainer and with Yunlu: lines written, CPU to an accuracy, peak memory.

``python benchmarks/text_task.py``; ``benchmarks/README.md`` says how to read what it prints. Needs the
extras ``train`` and ``hf``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

import psutil

PARTS = Path(__file__).parent / "text_task_parts"
SIDES = {"HF Trainer": "with_trainer.py", "Yunlu": "job.yaml"}
_ACCURACY = re.compile(r"""['"](?:eval_)?accuracy['"]: ['"]?([\d.]+)""")
_TARGETS = {"lines written": 0.5, "CPU s to the accuracy": 0.7, "peak memory": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """What one process tree took, from its start."""

    side: str
    cpu_to_target_s: float | None
    """Until the first evaluation at or above the accuracy; None: never."""
    cpu_s: float
    """Until its end, with the model saved."""
    peak_bytes: int
    """Resident memory of all its processes together, at the most."""
    best: float
    evaluations: int


def main() -> int:
    """Measure in interleaved rounds, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accuracy", type=float, default=0.5, help="the accuracy to reach (0.5)")
    parser.add_argument("--json", type=Path, help="write every run here")
    parser.add_argument("--keep", type=Path, help="directory for data, logs and runs")
    asked = parser.parse_args()
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="yunlu-text-"))
    folder.mkdir(parents=True, exist_ok=True)
    # A process of its own: this one stays small.
    making = "from pathlib import Path; from benchmarks.text_task_parts.inputs import make_inputs; "
    _call(
        [sys.executable, "-c", f"{making}make_inputs(Path({str(folder)!r}))"],
        folder,
        folder / "inputs.log",
    )
    for name in SIDES.values():
        shutil.copy(PARTS / name, folder / name)
    runs: list[TaskRun] = []
    for number in range(asked.rounds):
        for side in sorted(SIDES, reverse=bool(number % 2)):
            found = measure(side, folder, asked.accuracy, folder / f"{side}-{number}.log")
            runs.append(found)
            print(f"round {number + 1}: {found}", file=sys.stderr, flush=True)  # noqa: T201
    print(table(runs, asked.accuracy))  # noqa: T201 (its product)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(run) for run in runs]))
    return 0


def measure(side: str, folder: Path, accuracy: float, log: Path) -> TaskRun:
    """Run one side; its processor time is read when it prints an evaluation."""
    command = [sys.executable, "-u", SIDES[side]]
    if side == "Yunlu":
        command = [sys.executable, "-m", "yunlu.cli.main", "train", SIDES[side], "--json"]
    shutil.rmtree(folder / "output", ignore_errors=True)
    with log.open("w") as errors:
        process = subprocess.Popen(  # noqa: S603 (our own commands)
            command,
            cwd=folder,
            env=_environment(folder),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    root, peak, is_over = psutil.Process(process.pid), [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(root, peak, is_over))
    watcher.start()
    reached, scores, last = None, list[float](), 0.0
    assert process.stdout is not None
    for line in process.stdout:
        last = max(last, _cpu_s(root))
        if "validation" in line or "eval_accuracy" in line:
            scores += [float(found) for found in _ACCURACY.findall(line)]
            if reached is None and scores and scores[-1] >= accuracy:
                reached = last
    before = os.times()
    if process.wait() != 0:
        raise SystemExit(f"{side} failed: see {log}")
    after = os.times()  # what has ended is counted whole
    is_over.set()
    watcher.join()
    total = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return TaskRun(
        side=side,
        cpu_to_target_s=reached,
        cpu_s=max(total, last),
        peak_bytes=peak[0],
        best=max(scores, default=0.0),
        evaluations=len(scores),
    )


def _watch(root: psutil.Process, peak: list[int], is_over: threading.Event) -> None:
    while not is_over.is_set():
        peak[0] = max(peak[0], sum(_rss(each) for each in _tree(root)))
        time.sleep(0.5)


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def _cpu_s(root: psutil.Process) -> float:
    """Of the process, its descendants, and those of them that have ended."""
    total = 0.0
    for each in _tree(root):
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def table(runs: list[TaskRun], accuracy: float) -> str:
    """Medians, and the ratio of each round with its smallest and largest."""
    lines = {side: _written(PARTS / name) for side, name in SIDES.items()}
    theirs, ours = ([run for run in runs if run.side == side] for side in SIDES)
    pairs = list(zip(theirs, ours, strict=True))
    both = [(a, b) for a, b in pairs if a.cpu_to_target_s and b.cpu_to_target_s]
    rows = [
        (
            "lines written",
            *map(float, lines.values()),
            [lines["Yunlu"] / lines["HF Trainer"]],
            "{:.0f}",
        )
    ]
    if both:
        rows.append(
            ("CPU s to the accuracy", median(a.cpu_to_target_s or 0 for a, _ in both),
             median(b.cpu_to_target_s or 0 for _, b in both),
             [(b.cpu_to_target_s or 0) / (a.cpu_to_target_s or 1) for a, b in both], "{:.1f}")
        )  # fmt: skip
    rows += [
        ("CPU s in all", median(a.cpu_s for a, _ in pairs), median(b.cpu_s for _, b in pairs),
         [b.cpu_s / a.cpu_s for a, b in pairs], "{:.1f}"),
        ("peak memory", median(a.peak_bytes for a, _ in pairs) / 2**20, median(b.peak_bytes for _, b in pairs) / 2**20,
         [b.peak_bytes / a.peak_bytes for a, b in pairs], "{:.0f} MiB"),
        ("best accuracy", median(a.best for a, _ in pairs), median(b.best for _, b in pairs),
         [b.best / a.best for a, b in pairs], "{:.3f}"),
    ]  # fmt: skip
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("yunlu", "torch", "transformers")
    )
    text = [
        (
            f"{versions}; {_cpu_name()}; {len(pairs)} rounds; one thread; accuracy {accuracy}. "
            "Median (range of the ratios).\n"
        ),
        "| | HF Trainer | Yunlu | ratio | target |",
        "|---|---|---|---|---|",
    ]
    for name, a, b, ratios, form in rows:
        target = f"≤ {_TARGETS[name]:g}" if name in _TARGETS else ""
        shown = f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        text.append(f"| {name} | {form.format(a)} | {form.format(b)} | {shown} | {target} |")
    return "\n".join(text)


def _written(path: Path) -> int:
    lines = path.read_text().splitlines()
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)


def _cpu_name() -> str:
    about = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", about.read_text()) if about.exists() else None
    return f"{found[1] if found else 'CPU of unknown name'}, {os.cpu_count()} cores"


def _environment(folder: Path) -> dict[str, str]:
    return dict(os.environ) | {  # noqa: TID251 (a script, not the package)
        "YUNLU_HOME": str(folder / "home"),
        "YUNLU_CACHE": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _call(command: list[str], folder: Path, log: Path) -> None:
    with log.open("w") as output:
        subprocess.run(  # noqa: S603 (our own commands)
            command, check=True, cwd=Path(__file__).parents[1], env=_environment(folder),
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
