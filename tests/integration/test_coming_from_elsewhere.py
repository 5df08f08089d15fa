"""The examples that are written for two tools: Yunlu's side and the other's do the same."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import ROOT, Yunlu
from yunlu.core.settings import use_keras_on_torch
from yunlu.spec.drafting.drafting import draft_job

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the first example, with its data and its model made."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert") / "bert_classifier"
    shutil.copytree(EXAMPLES / "bert_classifier", folder)
    run(folder, "make_inputs.py")
    return folder


def run(folder: Path, script: str) -> str:
    """What a script prints, run by hand in its folder."""
    environment = os.environ | {
        "KERAS_BACKEND": "torch",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_job_of_the_text_classifier_is_what_its_script_drafts() -> None:
    folder = EXAMPLES / "bert_classifier"
    drafted = yaml.safe_load(draft_job(folder / "trainer.py").text)
    assert drafted["train"].pop("precision") == "fp16"
    job = yaml.safe_load((folder / "job.yaml").read_text())
    assert job["train"].pop("precision") == "auto"
    assert drafted == job


def test_the_text_classifier_learns_in_three_epochs(bert: Path, yunlu: Yunlu) -> None:
    answer = yunlu("train", "job.yaml", "--json", cwd=bert)
    assert answer.code == 0, answer.err
    expected = re.search(r"accuracy >= ([\d.]+)", (bert / "job.yaml").read_text())
    assert expected
    assert answer.scores("test")["accuracy"] >= float(expected[1])


@pytest.mark.long
def test_fp16_is_obeyed_also_where_it_is_slow(bert: Path, yunlu: Yunlu) -> None:
    short = ("data.limit=32", "train.epochs=1", "train.schedule.warmup=0", "train.precision=fp16")
    overrides = [word for override in short for word in ("--set", override)]
    answer = yunlu("train", "job.yaml", *overrides, "--json", cwd=bert)
    assert answer.code == 0, answer.err
    plans = [record["plan"] for record in answer.records if record["event"] == "plan"]
    assert plans[-1]["precision"] == "fp16"


@pytest.mark.long
def test_the_trainers_side_of_the_text_classifier_runs(bert: Path) -> None:
    printed = run(bert, "trainer.py")
    reached = re.findall(r"'eval_accuracy': '?([\d.]+)", printed)
    assert float(reached[-1]) >= 0.95


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the second example."""
    use_keras_on_torch()
    pytest.importorskip("keras")
    shutil.copytree(EXAMPLES / "keras_grid", tmp_path / "keras_grid")
    monkeypatch.chdir(tmp_path / "keras_grid")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "keras_grid"), *sys.path])
    monkeypatch.delitem(sys.modules, "network", raising=False)
    return tmp_path / "keras_grid"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("side", ["with_yunlu.py", "with_keras.py"])
def test_both_sides_of_the_grid_search_find_a_setting(
    side: str, grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(grid / side), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"^Best parameters: .*learning_rate", printed, re.MULTILINE)
    reached = re.search(r"^Test accuracy: ([\d.]+)$", printed, re.MULTILINE)
    assert reached
    assert float(reached[1]) >= 0.93
