"""Files that a command calls into: how much code a reader meets on the way of a job.

    python scripts/journey.py [--tree DIR] [--json] [--list]

Trains ``digits`` on one worker and runs a study of two trials, each with a profile function in every
process. A file counts as called where one of its functions was entered; its lines are those of the
whole file. The spine are the files on the call stack when a worker process is started and when the
first step begins; helpers are the other files called until then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = {"task": "image-classification", "model": "cnn", "data": "sklearn:digits"}
TRAIN = JOB | {"train": {"epochs": 1}}
TUNE = TRAIN | {"search": {"space": {"train.optimizer.lr": "1e-4 .. 1e-2 log"}}}
HOOK = """
import os, sys, threading

_source, _folder = os.environ["JOURNEY_SOURCE"], os.environ["JOURNEY_FOLDER"]
_seen, _codes, _spine, _before = set(), set(), set(), set()


def _stack(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith(_source) and frame.f_code.co_flags & 1:
            _spine.add(frame.f_code.co_filename)
        frame = frame.f_back


def _called(frame, event, argument):
    if event != "call" or frame.f_code in _codes:
        return
    code = frame.f_code
    _codes.add(code)
    if code.co_filename.endswith("subprocess.py") and code.co_name == "_execute_child":
        _codes.discard(code)
        _stack(frame)
        _write()
    if not code.co_filename.startswith(_source) or not code.co_flags & 1:
        return
    _seen.add(code.co_filename)
    if code.co_filename.endswith(os.path.join("training", "loop.py")) and not _before:
        _stack(frame)
        _before.update(_seen)
    _write()  # at once: a worker may end by os._exit, and new code becomes rare


def _write():
    path = os.path.join(_folder, f"{os.getpid()}.txt")
    with open(path, "w") as file:
        for kind, names in (("seen", _seen), ("spine", _spine), ("before", _before or _seen)):
            file.writelines(f"{kind} {name}\\n" for name in sorted(names))


sys.setprofile(_called)
threading.setprofile(_called)
"""


def main() -> None:
    """Measure both commands in one tree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="also name the files")
    options = parser.parse_args()
    figures = {
        "train digits": measure(options.tree, TRAIN, "train", names=options.list),
        "tune, two trials": measure(
            options.tree, TUNE, "tune", "--trials", "2", names=options.list
        ),
    }
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for command, counted in figures.items():
        for name, value in counted.items():
            print(f"{command}: {name}  {value}")


def measure(
    tree: Path, job: dict[str, object], verb: str, *more: str, names: bool
) -> dict[str, object]:
    """Files and lines called by one command, in all of its processes."""
    source = tree / "src" / "yunlu"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("hook", "home", "cache", "files"):
            (place / name).mkdir()
        (place / "hook" / "sitecustomize.py").write_text(HOOK, "utf-8")
        path = place / "job.json"
        path.write_text(json.dumps(job), "utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{place / 'hook'}{os.pathsep}{tree / 'src'}",
            "JOURNEY_SOURCE": str(source),
            "JOURNEY_FOLDER": str(place / "files"),
            "YUNLU_HOME": str(place / "home"),
            "YUNLU_CACHE": str(place / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        words = [sys.executable, "-m", "yunlu.cli.main", verb, str(path), *more]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
        called = read(place / "files")
    counted: dict[str, object] = {
        "files": len(called["seen"]),
        "lines": sum(Path(name).read_text("utf-8").count("\n") for name in called["seen"]),
        "spine": len(called["spine"]),
        "helpers": len(called["before"] - called["spine"]),
    }
    if names:
        counted |= {
            f"{kind} files": sorted(str(Path(name).relative_to(source)) for name in paths)
            for kind, paths in called.items()
        }
    return counted


def read(folder: Path) -> dict[str, set[str]]:
    """What the processes wrote."""
    called: dict[str, set[str]] = {"seen": set(), "spine": set(), "before": set()}
    for path in folder.iterdir():
        for line in path.read_text("utf-8").splitlines():
            kind, _, name = line.partition(" ")
            called[kind].add(name)
    return called


if __name__ == "__main__":
    main()
