"""What others register by entry point works as what is built in, from the command to the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import Answer, Yunlu
from tests.integration.foreign_package import install
from yunlu.runs.events import CommunicationChosen
from yunlu.runs.home import open_run

QUICK = "compile: false, threads: 1, workers: 0, precision: fp32"


@pytest.fixture
def environment(own_home: Path, tmp_path: Path) -> dict[str, str]:
    """That of every command here: the package is installed."""
    package = install(tmp_path / "site")
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"YUNLU_HOME": str(own_home), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _run(environment: dict[str, str], code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_task_is_scaffolded_planned_trained_and_predicts(
    tmp_path: Path, own_home: Path, yunlu: Yunlu, environment: dict[str, str]
) -> None:
    answer = yunlu("init", "denoise", "sklearn:digits")
    assert answer.code == 0, answer.err
    text = (tmp_path / "job.yaml").read_text()
    assert "model: bottleneck" in text
    assert "# image_size: 8" in text
    code = "import sys, yunlu; yunlu.load_job('job.yaml'); print('torch' in sys.modules)"
    assert _run(environment, code, tmp_path).strip() == "False"
    assert yunlu("validate", "job.yaml").code == 0
    quick = ["--set", "train.epochs=1", "--set", "train.compile=false"]
    plan = yunlu("plan", "job.yaml", "--json", *quick)
    assert plan.code == 0, plan.err
    trained = yunlu("train", "job.yaml", "--json", *quick)
    assert trained.code == 0, trained.err
    code = "import yunlu; print(yunlu.load_model('last').predict([[0.5] * 64])[0].value)"
    assert abs(float(_run(environment, code, tmp_path))) < 10
    (card,) = own_home.glob("job-*/model/README.md")
    assert "yunlu.load_model(" in card.read_text()


@pytest.mark.slow
def test_a_sampler_chooses_the_settings_of_a_study(tmp_path: Path, yunlu: Yunlu) -> None:
    job = f"""
task: tabular-classification
model: {{name: mlp, args: {{hidden: [8]}}}}
data: sklearn:iris
train: {{epochs: 1, {QUICK}}}
search:
  space: {{train.optimizer.lr: 0.1 .. 0.9}}
  method: halving
  trials: 2
"""
    (tmp_path / "job.yaml").write_text(job)
    answer = yunlu("tune", "job.yaml", "--json")
    assert answer.code == 0, answer.err
    shown = yunlu("study", "show", "last", "--json")
    assert shown.code == 0, shown.err
    assert "0.5" in shown.out
    assert "0.7" in shown.out
    (tmp_path / "job.yaml").write_text(job.replace("halving", "halvng"))
    refused = yunlu("validate", "job.yaml")
    assert refused.code != 0
    assert "did you mean 'halving'?" in refused.err + refused.out


@pytest.mark.slow
@pytest.mark.distributed
def test_a_codec_packs_gradients_and_is_refused_beyond_what_is_known(
    tmp_path: Path, own_home: Path, yunlu: Yunlu
) -> None:
    job = f"""
task: tabular-classification
model: {{name: mlp, args: {{hidden: [8]}}}}
data: sklearn:iris
devices: 2
spares: 0
communication: direct + halves
train: {{steps: 4, batch: 16, evaluate: never, {QUICK}}}
"""
    (tmp_path / "job.yaml").write_text(job)
    answer = yunlu("train", "job.yaml", "--json")
    assert answer.code == 0, answer.err
    (directory,) = own_home.glob("job-*")
    chosen = [
        event
        for event, _ in open_run(directory).read_events()
        if isinstance(event, CommunicationChosen)
    ]
    assert chosen[-1].setting.codec == "halves"
    for wrong, reason in (
        ("direct + halve", "did you mean 'halves'?"),
        ("{codec: halves, guarantee: near}", "keeps only relaxed"),
        ("{method: asynchronous, codec: halves}", "is not known to servers"),
    ):
        (tmp_path / "job.yaml").write_text(job.replace("direct + halves", wrong))
        refused = yunlu("validate", "job.yaml")
        assert refused.code != 0
        assert reason in refused.err + refused.out


@pytest.mark.slow
def test_a_policy_runs_a_pool(tmp_path: Path, yunlu: Yunlu) -> None:
    def answer_of(*arguments: str) -> Answer:
        return yunlu("pool", *arguments)

    refused = answer_of("up", "--policy", "politst")
    assert refused.code != 0
    assert "did you mean 'politest'?" in refused.err + refused.out
    try:
        started = answer_of("up", "--policy", "politest", "--devices", "1", "--json")
        assert started.code == 0, started.err
        assert json.loads(started.out.splitlines()[-1])["policy"] == "politest"
    finally:
        answer_of("down")
