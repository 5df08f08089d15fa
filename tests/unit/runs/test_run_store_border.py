"""Only the run store knows which files a run has."""

from __future__ import annotations

import re
from pathlib import Path

from yunlu.runs.run_store import Claim, Document, Log

SOURCE = Path(__file__).parents[3] / "src" / "yunlu"
STORE = {SOURCE / "runs" / name for name in ("run_store.py", "items.py", "home.py")}
OWN_NAMES = {
    # An exported model holds a copy of its job, for whoever gets the model without the run.
    SOURCE / "training" / "export.py": {Document.JOB},
    SOURCE / "jobs" / "job_input.py": {Document.JOB},
    # Whether a directory of weights belongs to a run that trained it.
    SOURCE / "training" / "models" / "initial_weights.py": {Log.EVENTS},
    # The command line sees the client alone; the report names the directory of its run.
    SOURCE / "cli" / "runs.py": {Document.REPORT_PAGE},
    # The page of a study, which is no document of a run.
    SOURCE / "render" / "study_report.py": {Document.REPORT_PAGE},
}


def test_only_the_home_chooses_an_implementation() -> None:
    naming = {path for path in modules() if "DirectoryRunStore" in path.read_text()}
    assert naming == set()


def test_file_names_of_a_run_stand_in_its_store_alone() -> None:
    names = {str(name) for kind in (Document, Log, Claim) for name in kind if "." in name}
    found = {
        (str(path.relative_to(SOURCE)), name)
        for path in modules()
        for name in re.findall(r"[\"/]([\w.]+)\"", path.read_text())
        if name in names and name not in OWN_NAMES.get(path, ())
    }
    assert found == set()


def test_nobody_takes_a_run_for_a_directory() -> None:
    taken = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in modules()
        if re.search(r"\bRunStore\b|\bopen_run\b", text := path.read_text())
        for line in text.splitlines()
        if re.search(r"\b_?(run|store|directory)\.path\b", line)
    ]
    assert taken == []


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path not in STORE]
