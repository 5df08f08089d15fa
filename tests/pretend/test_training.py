"""Yunlu trains on an accelerator that is stricter than a real one: same losses as on the CPU, no race."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.canned_profiles import store_profiles
from tests.pretend.build import environment
from yunlu.training.probe import cpu_name

JOB = """
task: tabular-classification
model: mlp
data: sklearn:breast_cancer
train: {steps: 12, batch: 32, precision: fp32, compile: false, micro_batch: 32, checkpoint: {every: 4}}
"""


def train(folder: Path, *options: str, accelerators: str) -> list[float]:
    """Losses of a run by the command line; its races, if any, end up in ``races``."""
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    env = dict(os.environ) if accelerators == "cpu" else environment(memory=256 << 20)
    env |= {
        "YUNLU_HOME": str(folder / "runs"),
        "YUNLU_CACHE": str(folder / "cache"),
        "YUNLU_ACCELERATORS": accelerators,
        "YUNLU_PATIENCE": "20",
        "PRETEND_RACE_LOG": str(folder / "races"),
        "OMP_NUM_THREADS": "1",
    }
    store_profiles(folder / "cache", cpu=cpu_name(), npu="Pretend npu 0")
    done = subprocess.run(
        [sys.executable, "-m", "yunlu.cli.main", "train", "job.yaml", *options],
        check=False,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (folder / "runs").glob("*/metrics*.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("cpu") / "run", accelerators="cpu")


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="single", marks=pytest.mark.long),
        pytest.param(("--devices", "2"), id="dp", marks=pytest.mark.long),
        pytest.param(("--devices", "2", "--set", "layout.fsdp=2"), id="fsdp"),
        pytest.param(("--devices", "2", "--set", "layout.pp=2"), id="pp"),
    ],
)
def test_losses_are_those_of_the_cpu_and_nothing_races(
    tmp_path: Path, on_cpu: list[float], options: tuple[str, ...]
) -> None:
    losses = train(tmp_path / "run", *options, accelerators="npu:2")
    assert losses == pytest.approx(on_cpu, rel=1e-6)
    assert len(losses) == 12
    races = tmp_path / "run" / "races"
    assert not races.exists(), races.read_text()
