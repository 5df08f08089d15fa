"""An optimiser of another package, one file and one entry point, goes through every room."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration.conftest import Yunlu
from tests.optimizer_package import install_lion
from yunlu.runs.home import open_run

JOB = """
task: image-classification
model: cnn
data: sklearn:digits
train:
  epochs: 2
  precision: fp32
  checkpoint: 10
  optimizer: lion
"""
# A worker that dies in the middle of a step, once.
CRASH = """

import os
from dataclasses import replace
from pathlib import Path

_crash = Path(__file__).with_name("crash")


def build_mortal(groups, settings):
    optimizer = build_lion(groups, settings)
    steps = []

    def die(*_):
        steps.append(1)
        if len(steps) == 25 and _crash.exists():
            _crash.unlink()
            os._exit(1)

    optimizer.register_step_pre_hook(die)
    return optimizer


LION = replace(LION, build=build_mortal)
"""


def losses(path: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in open_run(path).read_metrics()}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install_lion(tmp_path / "site", further=CRASH)
    return tmp_path / "site"


@pytest.fixture
def environment(own_home: Path, site: Path) -> dict[str, str]:
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(site), *([found] if found else [])])
    return os.environ | {"YUNLU_HOME": str(own_home), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "lion.yaml").write_text(JOB)
    return tmp_path / "lion.yaml"


@pytest.mark.slow
def test_it_is_planned_by_its_traits(yunlu: Yunlu, job: Path) -> None:
    bytes_of: dict[str, float] = {}
    for name in ("lion", "adamw"):
        answer = yunlu("plan", job, "--json", "--set", f"train.optimizer.name={name}")
        assert answer.code == 0, answer.err
        bytes_of[name] = json.loads(answer.out)["options"][0]["prediction"]["memory_parts"][
            "optimizer"
        ]
    assert bytes_of["lion"] == pytest.approx(bytes_of["adamw"] / 2)


@pytest.mark.slow
def test_it_trains_and_a_killed_run_resumes_bit_for_bit(
    yunlu: Yunlu, job: Path, site: Path, own_home: Path
) -> None:
    whole = yunlu("train", job, "--json")
    assert whole.code == 0, whole.err
    assert whole.scores("test")["accuracy"] > 0.8
    (site / "crash").touch()
    assert yunlu("train", job, "--json").code != 0
    assert not (site / "crash").exists()
    first, second = sorted(own_home.glob("lion-*"), key=lambda path: path.stat().st_ctime)
    assert max(losses(second)) >= 20  # past a checkpoint, and not while settings were tried
    assert yunlu("resume", second.name, "--json").code == 0
    assert losses(second) == losses(first)
