"""``--devices`` and ``devices=``: the number of workers, said from outside the job file."""

from __future__ import annotations

from pathlib import Path

import pytest

import yunlu
from yunlu.cli.main import main

ON_FOUR = ["--devices", "4"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("task: tabular-classification\nmodel: mlp\ndata: d.csv\nlayout: dp2\n")
    return path


@pytest.mark.parametrize("verb", [["train"], ["plan"], ["finetune", "hf:some/model"]])
def test_the_number_of_devices_is_checked_against_the_layout(
    verb: list[str], job: Path, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, str(job), *ON_FOUR]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "--set devices: is 4, but the layout dp2 has 2 workers" in said
    assert not own_home.exists(), "a refused job leaves nothing behind"


@pytest.mark.parametrize("verb", ["train", "plan", "finetune"])
def test_help_tells_of_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert "--devices" in capsys.readouterr().out


def test_python_says_the_same(job: Path) -> None:
    with pytest.raises(yunlu.YunluError, match="is 4, but the layout dp2 has 2 workers"):
        yunlu.train(job, devices=4)
    with pytest.raises(yunlu.YunluError, match="is 3, but the layout dp2"):
        yunlu.plan(job, devices=3)


def test_a_model_object_stays_in_its_process() -> None:
    with pytest.raises(yunlu.YunluError, match="in this process, on one device"):
        yunlu.train(model=object(), data=[], devices=2)
