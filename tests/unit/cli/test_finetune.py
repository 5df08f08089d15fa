"""``yunlu finetune`` before any worker starts: what it takes, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import yunlu
from yunlu.cli.main import main


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("task: text-classification\ndata: texts.txt\n")
    return path


def test_it_needs_a_start_and_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "last"]) == 2
    assert "yunlu finetune --help" in capsys.readouterr().err


def test_help_says_what_a_start_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "a model directory, or hf:NAME" in said
    assert "model.adapter=lora" in said


def test_without_runs_it_says_what_else_there_is(
    job: Path, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", "nosuch", str(job)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "there are no runs" in said
    assert "hf:NAME" in said
    assert not own_home.exists(), "a refused job leaves nothing behind"


def test_a_directory_that_is_no_model_is_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", str(tmp_path), str(job)]) == 1
    assert "it has no config.json" in " ".join(capsys.readouterr().err.split())


def test_python_says_the_same(job: Path) -> None:
    with pytest.raises(yunlu.YunluError, match="there are no runs"):
        yunlu.finetune("nosuch", job)
