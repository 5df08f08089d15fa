"""A user's mistake gets a message that helps, a non-zero exit, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import Answer, Yunlu

TEXT = "\n".join(f"{label}\tthis is a {label} sentence number {i}" for i in range(40)
                 for label in ("good", "bad"))  # fmt: skip


def refused(answer: Answer, *words: str) -> None:
    assert answer.code not in {0, 3}, answer.out + answer.err
    for word in words:
        assert word in answer.err + answer.out
    assert "Traceback" not in answer.err + answer.out


def job(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text(TEXT)
    return path


def test_a_missing_job_file(yunlu: Yunlu) -> None:
    refused(yunlu("train", "nowhere.yaml"), "nowhere.yaml")


def test_several_mistakes_at_once_with_their_places(yunlu: Yunlu, tmp_path: Path) -> None:
    path = job(tmp_path, "task: tabular-classificaton\nmodel: mlp\ndata: x.csv\n"
                         "train:\n  epoch: 3\n  batch: many\n")  # fmt: skip
    answer = yunlu("train", path)
    refused(answer, "job.yaml", "line 5", "epochs", "line 6", "many", "tabular-classification")


def test_missing_data(yunlu: Yunlu, tmp_path: Path) -> None:
    path = job(tmp_path, "task: text-classification\nmodel: transformer\ndata: nothing.txt\n")
    refused(yunlu("train", path), "nothing.txt")


def test_empty_data(yunlu: Yunlu, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    path = job(tmp_path, "task: tabular-classification\nmodel: mlp\ndata: empty.csv\n")
    refused(yunlu("train", path), "empty")


def test_an_unknown_label_in_the_test_data(yunlu: Yunlu, tmp_path: Path, sentences: Path) -> None:
    (tmp_path / "test.txt").write_text("good\tfine\nugly\ta new kind of label\n")
    path = job(tmp_path, "task: text-classification\nmodel: transformer\n"
                         "data: {train: sentences.txt, test: test.txt}\n")  # fmt: skip
    refused(yunlu("train", path), "ugly")


def test_a_model_directory_with_a_wrong_config(
    yunlu: Yunlu, tmp_path: Path, sentences: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    path = job(tmp_path, "task: text-classification\nmodel: hf:broken\ndata: sentences.txt\n")
    refused(yunlu("train", path), "broken")


def test_a_batch_larger_than_the_data(yunlu: Yunlu, tmp_path: Path, sentences: Path) -> None:
    path = job(tmp_path, "task: text-classification\nmodel: transformer\ndata: sentences.txt\n"
                         "train: {batch: 1000}\n")  # fmt: skip
    refused(yunlu("train", path), "1000", "64 training samples")


def test_a_loss_that_explodes(yunlu: Yunlu, tmp_path: Path) -> None:
    path = job(tmp_path, "task: tabular-regression\nmodel: mlp\ndata: sklearn:diabetes\n"
                         "train:\n  epochs: 50\n  optimizer: {name: sgd, lr: 1e30}\n"
                         "  clip: {norm: null}\n")  # fmt: skip
    refused(yunlu("train", path), "not finite", "train.optimizer.lr")


def test_a_full_disk(
    yunlu: Yunlu, tmp_path: Path, small_disk: Path, environment: dict[str, str]
) -> None:
    environment["YUNLU_HOME"] = str(small_disk / "home")
    path = job(tmp_path, "task: image-classification\nmodel: cnn\ndata: sklearn:digits\n"
                         "train: {epochs: 3, checkpoint: {every: 10, keep_last: 9}}\n")  # fmt: skip
    refused(yunlu("train", path), "No space left", "yunlu resume")
    assert "failed" in yunlu("ps", "--all").out
    (run,) = (small_disk / "home").glob("job-*")
    kept = list((run / "checkpoints").iterdir())
    assert kept == [] or all(entry.name.startswith("step-") for entry in kept)


def test_an_unknown_model_argument(yunlu: Yunlu, tmp_path: Path) -> None:
    path = job(tmp_path, "task: tabular-regression\nmodel: {name: mlp, args: {hiden: [8]}}\n"
                         "data: sklearn:diabetes\n")  # fmt: skip
    refused(yunlu("train", path), "hiden", "hidden")


def test_an_unknown_run(yunlu: Yunlu) -> None:
    for verb in ("show", "logs", "stop", "resume", "report"):
        refused(yunlu(verb, "no-such-run"), "there are no runs")


def test_debug_shows_the_traceback(yunlu: Yunlu, tmp_path: Path) -> None:
    answer = yunlu("train", "nowhere.yaml", "--debug")
    assert answer.code != 0
    assert "Traceback" in answer.err


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys; from yunlu.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'sqlalchemy', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_training_without_torch_says_what_to_install_and_makes_no_run(
    verb: str, yunlu: Yunlu, tmp_path: Path, own_home: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    environment["PYTHONPATH"] = str(tmp_path)
    path = job(tmp_path, "task: tabular-regression\nmodel: mlp\ndata: sklearn:diabetes\n")
    refused(yunlu(verb, path), "torch", 'pip install "yunlu[train]"')
    assert not list(own_home.glob("job-*"))
