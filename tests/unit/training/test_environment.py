from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from yunlu import __version__
from yunlu.hardware.fleet import Device, Machine
from yunlu.spec.job import Job
from yunlu.training.attempt import describe_environment, read_git
from yunlu.training.trackers.tracker import flatten, public_config

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = Machine(
    hostname="furnace",
    cores=2,
    memory_bytes=1 << 30,
    devices=(Device(kind="cpu", name="Abacus", memory_bytes=1 << 29),),
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text("x = 1\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    return tmp_path


def test_the_environment_of_a_run_is_described_in_plain_values(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setattr(sys, "argv", ["yunlu", "train", "--set", "data.train=s3://me:hunter2@b/x"])
    found = describe_environment(MACHINE)
    assert found["yunlu"] == __version__
    assert found["hostname"] == "furnace"
    assert found["devices"][0]["name"] == "Abacus"
    assert found["packages"]["torch"]
    assert len(found["git_commit"]) == 40
    assert found["git_dirty"] is False
    assert found["argv"][-1] == "data.train=s3://***@b/x"
    assert "hunter2" not in json.dumps(found)


def test_a_changed_file_makes_the_working_directory_dirty(repository: Path) -> None:
    commit, _ = read_git(repository)
    (repository / "new-data.bin").write_text("untracked files do not count")
    assert read_git(repository) == (commit, False)
    (repository / "job.py").write_text("x = 2\n")
    assert read_git(repository) == (commit, True)


def test_outside_a_repository_or_without_git_the_commit_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_git(tmp_path) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_git(tmp_path) == (None, None)


def test_a_published_job_keeps_its_shape_and_hides_its_secrets() -> None:
    job = Job.model_validate(
        {
            "task": "tabular-regression",
            "model": {"name": "mlp", "args": {"hidden": [64, 32]}},
            "data": {
                "train": "https://me:hunter2@host/x.csv",
                "options": {"key": "hunter2", "anon": False, "client": {"api_key": "hunter2"}},
                "tokenizer": "bytes",
            },
        }
    )
    flat = flatten(public_config(job))
    assert flat["model.args.hidden"] == [64, 32]
    assert flat["data.train"] == "https://***@host/x.csv"
    assert flat["data.options.key"] == "***"
    assert flat["data.options.client.api_key"] == "***"
    assert flat["data.options.anon"] is False
    assert flat["data.tokenizer"] == "bytes"
