from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.waiting import LIMIT_S
from yunlu.core.settings import worker_environment
from yunlu.jobs import doctor

if TYPE_CHECKING:
    from pathlib import Path

# Python loads this before anything else: torch is then as if it had never been installed.
WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_doctor(*arguments: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = worker_environment() | {"YUNLU_HOME": str(home), "COLUMNS": "100", **variables}
    return subprocess.run(
        [sys.executable, "-m", "yunlu.cli.main", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=LIMIT_S,
    )


@pytest.mark.slow
def test_a_machine_with_torch_can_train_and_says_what_it_has(tmp_path: Path) -> None:
    done = run_doctor(home=tmp_path / "not-yet" / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ This machine can train." in done.stdout
    for words in ("cores", "memory", "fp32", "the reference", "transformers", "C++ compiler"):
        assert words in done.stdout
    assert not (tmp_path / "not-yet").exists(), "looking must leave nothing behind"


def test_without_torch_it_still_answers_and_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    done = run_doctor(home=tmp_path / "runs", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "torch is not installed" in done.stdout
    assert 'pip install "yunlu[train]"' in done.stdout
    assert "cores" in done.stdout
    assert done.stderr == ""


def test_the_same_findings_come_as_json(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    done = run_doctor("--json", home=tmp_path / "runs", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["can_train"] is False
    assert found["torch"] == {"version": None, "problem": "is not installed", "builds": []}
    assert found["machine"]["cores"] >= 1
    assert found["store"]["path"] == str(tmp_path / "runs")
    assert len(found["advice"]) == 1


def test_a_probe_that_breaks_is_a_finding_not_a_crash(tmp_path: Path) -> None:
    broken = WITHOUT_TORCH.replace(
        'raise ModuleNotFoundError(f"No module named {name!r}", name=name)',
        'raise RuntimeError("driver too old")',
    )
    (tmp_path / "sitecustomize.py").write_text(broken)
    done = run_doctor(home=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "driver too old" in done.stdout


def test_a_store_that_cannot_be_written_is_found_by_writing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = doctor.examine_store(tmp_path / "file" / "runs")
    assert found.problem == "Not a directory"
    advice = doctor.list_advice(doctor.TorchState(version="2"), found)
    assert len(advice) == 1
    assert "YUNLU_HOME" in advice[0]


def test_a_store_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    found = doctor.examine_store(tmp_path)
    assert found.problem is None
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_each_part_has_its_version_or_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = {part.name: part for part in doctor.find_parts()}
    assert here["git"].version is not None
    assert here["git"].version[0].isdigit()

    def absent(_: str) -> str:
        raise doctor.metadata.PackageNotFoundError

    monkeypatch.setattr(doctor.metadata, "version", absent)
    (tmp_path / "dnf").write_text("#!/bin/sh\n")
    (tmp_path / "dnf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    parts = {part.name: part for part in doctor.find_parts()}
    assert all(part.version is None for part in parts.values())
    assert parts["wandb"].install == 'pip install "yunlu[wandb]"'
    assert parts["C++ compiler"].install == "sudo dnf install gcc-c++"
    assert parts["espeak-ng"].install == "sudo dnf install espeak-ng"
