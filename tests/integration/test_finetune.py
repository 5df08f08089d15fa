"""From an earlier run to a better one on little data: real commands, real workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import Yunlu
from tests.unit.training import tiny_hf
from tests.waiting import wait_until
from yunlu.runs.events import AttemptStarted, ErrorRaised, ProgressReported
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, RunStore
from yunlu.training.data.synthetic import generate_reviews

if find_spec("peft") is None:  # importing it takes a second or more
    pytest.skip("peft is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

FIRST = """
task: text-classification
model: {name: transformer, args: {width: 32, layers: 2}}
data: {train: synthetic:reviews, limit: 4000}
train: {epochs: 3, batch: 64, optimizer: {name: adamw, lr: 0.003}}
"""
NEXT = """
task: text-classification
data: {train: little.txt, validation: held.txt, test: test.txt}
train: {epochs: 12, batch: 16, optimizer: {name: adamw, lr: 0.002}, checkpoint: 10}
"""
MOODS = {"negative": "reject", "neutral": "shrug", "positive": "recommend"}


@pytest.fixture
def texts(tmp_path: Path) -> None:
    """Little data of the same language under other labels, and the job to learn them."""
    table = generate_reviews(7)
    rows = [
        f"{MOODS[label]}\t{text}" for label, text in zip(table["label"], table["text"], strict=True)
    ]
    for name, part in {"little": rows[:160], "held": rows[200:260], "test": rows[300:700]}.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(part) + "\n")
    (tmp_path / "first.yaml").write_text(FIRST)
    (tmp_path / "next.yaml").write_text(NEXT)


def the_run(home: Path, name: str) -> RunStore:
    (path,) = home.glob(f"{name}-*")
    return open_run(path)


def reported_phases(run: RunStore) -> list[str]:
    return [
        str(event.phase) for event, _ in run.read_events() if isinstance(event, ProgressReported)
    ]


def weights_of(run: RunStore) -> dict[str, torch.Tensor]:
    return load_file(run.path / Area.MODEL / "model.safetensors")


@pytest.mark.long
def test_a_run_goes_on_from_another_and_beats_a_fresh_start(
    texts: None, own_home: Path, tmp_path: Path, yunlu: Yunlu, environment: dict[str, str]
) -> None:
    assert yunlu("train", "first.yaml", "--json").code == 0
    fresh = yunlu(
        "train", "next.yaml", "--json", "--name", "fresh",
        "--set", "model={name: transformer, args: {width: 32, layers: 2}}",
    )  # fmt: skip
    full = yunlu("finetune", "first", "next.yaml", "--json", "--name", "full")
    lora = yunlu("finetune", "first", "next.yaml", "--json", "--name", "lora",
                 "--set", "model.adapter=lora")  # fmt: skip
    for answer in (fresh, full, lora):
        assert answer.code == 0, answer.err
    accuracy = [answer.scores("test")["accuracy"] for answer in (fresh, full, lora)]
    assert min(accuracy[1:]) > accuracy[0] + 0.1, accuracy

    _check_lora(own_home, lora.records)
    _check_resume(own_home, tmp_path, yunlu, environment)
    _refuse(yunlu, tmp_path)


def _check_lora(home: Path, records: list[dict[str, Any]]) -> None:
    first, lora = the_run(home, "first"), the_run(home, "lora")
    start = f"starting from run {first.id}"
    said = next(words for words in reported_phases(lora) if words.startswith(start))
    assert "new labels: recommend, reject, shrug" in said
    assert "lora trains" in said
    about = next(record for record in records if record.get("event") == "model")
    assert about["trainable"] < 0.3 * about["parameters"]

    before, after = weights_of(first), weights_of(lora)
    assert before.keys() == after.keys()
    adapted = {name for name in before if ".attention." in name or ".feed." in name}
    for name, weight in before.items():
        if name.startswith("head."):
            continue
        is_matrix = name in adapted and weight.ndim == 2
        assert torch.equal(weight, after[name]) != is_matrix, name
    files = {
        path.name: path.stat().st_size for path in (lora.path / Area.MODEL / "adapter").iterdir()
    }
    assert (
        files["adapter_model.safetensors"]
        < (lora.path / Area.MODEL / "model.safetensors").stat().st_size
    )
    card = (lora.path / Area.MODEL / "README.md").read_text()
    assert f"Fine-tuned from `run {first.id}` with lora (rank 8)" in card
    assert json.loads((lora.path / Area.MODEL / "job.json").read_text())["model"]["weights"] == str(
        first.path / Area.MODEL
    )
    tokenizer = "tokenizer.json"
    assert (lora.path / Area.MODEL / tokenizer).read_bytes() == (
        first.path / Area.MODEL / tokenizer
    ).read_bytes()


def _check_resume(home: Path, folder: Path, yunlu: Yunlu, environment: dict[str, str]) -> None:
    """SIGTERM in the middle, then on: the same steps, the same model, to the bit."""
    command = ["finetune", "first", "next.yaml", "--name", "halted", "--detach", "--json"]
    command = [sys.executable, "-m", "yunlu.cli.main", *command, "--set", "model.adapter=lora"]
    subprocess.run(command, env=environment, check=True, capture_output=True, cwd=folder)
    run = the_run(home, "halted")

    def attempts() -> list[AttemptStarted]:
        return [event for event, _ in run.read_events() if isinstance(event, AttemptStarted)]

    def check() -> None:
        assert not [event for event, _ in run.read_events() if isinstance(event, ErrorRaised)]

    wait_until(attempts, "a worker")
    worker = psutil.Process(attempts()[0].pid)
    worker.nice(19)  # on a busy machine, too, it is halted before it is done
    wait_until(lambda: max(_losses(run), default=0) >= 25, "step 25", meanwhile=check, pause_s=0.01)
    worker.send_signal(signal.SIGTERM)
    worker.wait()
    assert not (run.path / Area.MODEL).exists(), "it ended before it could be halted"
    answer = yunlu("resume", run.id, "--json")
    assert answer.code == 0, answer.err
    whole = the_run(home, "lora")
    assert _losses(run) == _losses(whole)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (run.path / Area.MODEL / file).read_bytes() == (
            whole.path / Area.MODEL / file
        ).read_bytes()


def _losses(run: RunStore) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def _refuse(yunlu: Yunlu, folder: Path) -> None:
    (folder / "dates.yaml").write_text("task: seq2seq\ndata: synthetic:dates\n")
    for arguments, words in {
        ("nosuch", "next.yaml"): "there is no run 'nosuch'",
        ("first", "dates.yaml"): "was trained for text-classification, not for seq2seq",
        ("first", "next.yaml", "--set", "model.adapter={targets: [qury]}"): "did you mean 'query'",
    }.items():
        answer = yunlu("finetune", *arguments, "--json")
        assert answer.code == 1
        assert words in answer.err


def test_a_hugging_face_directory_is_fine_tuned_and_merged(
    tmp_path: Path, own_home: Path, yunlu: Yunlu
) -> None:
    from transformers import AutoModelForSequenceClassification

    start = tiny_hf.save_bert(tmp_path / "bert", labels=2)
    rows = [
        f"{label}\tthe lamp is {word}"
        for label, words in {"yes": ("good", "fine"), "no": ("bad", "dull")}.items()
        for word in words
        for _ in range(12)
    ]
    (tmp_path / "rows.txt").write_text("\n".join(rows) + "\n")
    (tmp_path / "job.yaml").write_text(
        "task: text-classification\ndata: rows.txt\nmodel: {adapter: lora}\n"
        "train: {epochs: 10, optimizer: {lr: 0.01}}\n"
    )
    answer = yunlu("finetune", start, "job.yaml", "--json")
    assert answer.code == 0, answer.err
    run = the_run(own_home, "job")
    model = AutoModelForSequenceClassification.from_pretrained(
        run.path / Area.MODEL, use_safetensors=True
    )
    assert model.config.id2label == {0: "no", 1: "yes"}
    before, after = load_file(start / "model.safetensors"), weights_of(run)
    assert before.keys() == after.keys()
    assert torch.equal(
        before["bert.embeddings.word_embeddings.weight"],
        after["bert.embeddings.word_embeddings.weight"],
    )
    query = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(before[query], after[query])
    assert any(words.startswith("starting from bert") for words in reported_phases(run))
