from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from yunlu.core.errors import DataError, ModelError, TrainingError
from yunlu.jobs.model_profile import JobShape, find_shape
from yunlu.planning.models.shape import parameters, trainable
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = (sys.executable, "-c", "raise SystemExit('nobody is asked')")
"""A program that must not be needed."""
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def job(**parts: Any) -> Job:
    given = {"task": "language-modeling", "model": "transformer", "data": "synthetic:nothing"}
    return Job.model_validate({**given, **parts})


def saying(answer: Any, path: Path) -> tuple[str, ...]:
    """A program that counts how often it is asked, and prints the answer."""
    code = f"open({str(path)!r}, 'a').write('asked\\n'); print({json.dumps(answer)!r})"
    return (sys.executable, "-c", code)


def test_a_known_model_needs_neither_network_nor_process() -> None:
    found = find_shape(job(model="hf:meta-llama/Llama-3.1-8B"), command=NOBODY)
    assert (found.source, found.shape.name) == ("known", "meta-llama/Llama-3.1-8B")
    assert parameters(found.shape) == 8_030_261_248
    assert found.seq is None


def test_the_job_says_the_length_and_the_adapter() -> None:
    asked = job(
        model={"name": "hf:llama3-8b", "adapter": {"name": "lora", "rank": 4}},
        data={"train": "synthetic:nothing", "max_length": 2048},
    )
    found = find_shape(asked, command=NOBODY)
    assert found.seq == 2048
    assert trainable(found.shape) < parameters(found.shape) / 500


@pytest.mark.parametrize(
    ("model", "longest"),
    [("hf:gpt2", 1024), ("hf:facebook/opt-125m", 2048), ("hf:roberta-base", 512)],
)
def test_a_sequence_beyond_the_positions_is_refused(model: str, longest: int) -> None:
    data = {"train": "synthetic:nothing", "max_length": longest}
    assert find_shape(job(model=model, data=data), command=NOBODY).seq == longest
    data["max_length"] = longest + 1
    with pytest.raises(ModelError, match=rf"data\.max_length: {longest + 1} tokens") as caught:
        find_shape(job(model=model, data=data), command=NOBODY)
    assert f"{longest} at most" in (caught.value.hint or "")


def test_rotary_positions_have_no_end() -> None:
    data = {"train": "synthetic:nothing", "max_length": 1 << 20}
    assert find_shape(job(model="hf:llama3-8b", data=data), command=NOBODY).seq == 1 << 20


def test_arguments_of_the_job_override_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = {"name": f"hf:{tmp_path}", "args": {"num_hidden_layers": 5}, "pretrained": False}
    found = find_shape(job(model=model), command=NOBODY)
    assert (found.source, found.shape.layers) == ("config", 5)


def test_the_task_decides_the_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = f"hf:{tmp_path}"
    assert find_shape(job(task="text-classification", model=model), command=NOBODY).shape.headless
    assert not find_shape(job(model=model), command=NOBODY).shape.headless


def test_a_configuration_without_a_field_names_field_and_file(tmp_path: Path) -> None:
    short = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps(short))
    with pytest.raises(ModelError, match="'vocab_size' is missing") as caught:
        find_shape(job(model=f"hf:{tmp_path}"), command=NOBODY)
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_torn_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        find_shape(job(model=f"hf:{tmp_path}"), command=NOBODY)


def test_an_unknown_name_asks_the_hub_for_the_configuration_once(tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = saying({"config": LLAMA}, count)
    for _ in range(2):
        found = find_shape(job(model="hf:somebody/brand-new"), command=command)
        assert (found.source, found.shape.layers) == ("config", 2)
    assert count.read_text() == "asked\n"


def test_our_own_transformer_is_known_by_its_arguments() -> None:
    data = {"train": "synthetic:nothing", "max_length": 64, "tokenizer": "bytes"}
    asked = job(model={"name": "transformer", "args": {"layers": 6, "width": 64}}, data=data)
    found = find_shape(asked, command=NOBODY)
    assert (found.source, found.shape.layers, found.shape.vocab) == ("arguments", 6, 259)
    assert found.seq == 64


def test_what_nobody_describes_is_measured_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("# a model")
    count = tmp_path / "count"
    shape = {"name": "n", "kind": "measured", "layers": 1, "hidden": 2, "measured_flops": 5.0}
    answer = {"shape": shape, "how": "real", "note": "so", "seq": 7, "train_samples": 9}
    command = saying({"found": answer}, count)

    def ask(name: str = "net.py:Net") -> JobShape:
        return find_shape(job(task="net:Task", model=name), command=command)

    first = ask()
    assert first == ask()
    assert (first.source, first.note, first.seq, first.train_samples) == ("measured", "so", 7, 9)
    assert count.read_text() == "asked\n"
    ask("net.py:Other")
    (tmp_path / "net.py").write_text("# another model")
    ask()
    assert count.read_text() == "asked\n" * 3


def test_a_torn_cache_is_measured_again(tmp_path: Path, own_cache: Path) -> None:
    count = tmp_path / "count"
    shape = {"name": "n", "kind": "measured", "layers": 1, "hidden": 2}
    answer = {"shape": shape, "how": "fake", "note": "", "seq": 1, "train_samples": 9}
    command = saying({"found": answer}, count)
    first = find_shape(job(model="net:Net"), command=command)
    (kept,) = (own_cache / "shapes").iterdir()
    kept.write_text(kept.read_text()[:20])
    assert find_shape(job(model="net:Net"), command=command) == first
    assert count.read_text() == "asked\n" * 2


def test_a_mistake_comes_back_as_what_it_was() -> None:
    told = {"code": "data", "message": "no such file", "hint": "look"}
    command = (sys.executable, "-c", f"print({json.dumps({'error': told})!r})")
    with pytest.raises(DataError, match="no such file") as caught:
        find_shape(job(), command=command)
    assert caught.value.hint == "look"


def test_a_process_that_dies_shows_its_last_words() -> None:
    with pytest.raises(TrainingError, match="nobody is asked"):
        find_shape(job(), command=NOBODY)


def test_the_second_plan_imports_no_torch(tmp_path: Path) -> None:
    """The real process the first time; then the numbers alone, in a fresh interpreter."""
    asked = job(task="tabular-classification", model="mlp", data="sklearn:iris")
    first = find_shape(asked)
    assert first.source == "measured"
    assert first.train_samples == 120
    code = (
        "import sys\n"
        "from yunlu.jobs.model_profile import find_shape\n"
        "from yunlu.spec.job import Job\n"
        "found = find_shape(Job.model_validate_json(sys.stdin.read()), command=['false'])\n"
        "assert not {'torch', 'transformers', 'yunlu.training.prepare'} & set(sys.modules)\n"
        "print(found.model_dump_json())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=asked.model_dump_json(),
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert JobShape.model_validate_json(done.stdout) == first
