from __future__ import annotations

import json
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.training.tiny_hf import save_bert, save_gpt2
from yunlu.core.errors import ModelError
from yunlu.spec.job import ModelSpec
from yunlu.training.models.build import build_model, is_hf
from yunlu.training.models.hf import (
    find_hf_directory,
    hub_commit,
    is_commit,
    names_hf,
    split_revision,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_bert(tmp_path / "bert", labels=2)


def load(name: str | Path, *, labels: int = 2, pretrained: bool = True, **args: Any) -> nn.Module:
    return build_model(
        ModelSpec(name=str(name), args=args, pretrained=pretrained),
        builtins={},
        sizes={},
        auto_class="AutoModelForSequenceClassification",
        hf_sizes={"num_labels": labels},
    )


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("prefix", ["hf:", ""])
def test_a_directory_is_loaded_with_its_weights_in_full_precision(bert: Path, prefix: str) -> None:
    stored = load_file(bert / "model.safetensors")
    save_file(
        {name: value.bfloat16() for name, value in stored.items()},
        bert / "model.safetensors",
        metadata={"format": "pt"},
    )
    model = load(f"{prefix}{bert}")
    assert is_hf(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, stored[name].bfloat16().float())


def test_without_weights_only_the_configuration_counts(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    model: Any = load(bert, pretrained=False, hidden_size=32)
    assert model.classifier.weight.shape == (2, 32)


def test_a_head_for_other_labels_is_new_and_the_rest_is_loaded(bert: Path) -> None:
    stored = load_file(bert / "model.safetensors")
    model: Any = load(bert, labels=5)
    assert model.classifier.weight.shape == (5, 16)
    kept = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(model.state_dict()[kept], stored[kept])


def test_arguments_change_the_configuration(bert: Path) -> None:
    model: Any = load(bert, hidden_dropout_prob=0.37)
    assert model.config.hidden_dropout_prob == 0.37


def test_an_unknown_argument_suggests_the_nearest(bert: Path) -> None:
    with pytest.raises(ModelError, match="did you mean 'hidden_size'"):
        load(bert, hidden_sise=8)


def test_an_argument_of_the_wrong_type_is_refused(bert: Path) -> None:
    with pytest.raises(ModelError, match="hidden_size"):
        load(bert, pretrained=False, hidden_size="wide")


def _torn(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:300])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "no config.json"),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), "not readable JSON"),
    "a list": (lambda path: (path / "config.json").write_text("[]"), "not an object"),
    "no type": (lambda path: (path / "config.json").write_text("{}"), "model_type"),
    "unknown type": (lambda path: change_config(path, model_type="nope"), "nope"),
    "other sizes": (lambda path: change_config(path, hidden_size=8), "configuration expects"),
    "other model": (lambda path: change_config(path, model_type="gpt2"), "none of the weights"),
    "quantised": (
        lambda path: change_config(path, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "no weights"),
    "torn weights": (_torn, "cannot be loaded"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_directory_gets_its_reason_in_words(bert: Path, kind: str) -> None:
    break_it, said = BROKEN[kind]
    break_it(bert)
    with pytest.raises(ModelError, match=said):
        load(f"hf:{bert}")


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    spec = ModelSpec(name=str(save_gpt2(tmp_path / "gpt2")))
    with pytest.raises(ModelError, match="cannot be loaded as AutoModelForSeq2SeqLM"):
        build_model(spec, builtins={}, sizes={}, auto_class="AutoModelForSeq2SeqLM")


class Canary:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


def test_a_pickle_of_weights_is_refused_and_never_opened(bert: Path, tmp_path: Path) -> None:
    (bert / "model.safetensors").unlink()
    (bert / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "ran")))
    with pytest.raises(ModelError, match=r"(?s)pickle.*convert"):
        load(bert)
    assert not (tmp_path / "ran").exists()


def test_an_index_cannot_smuggle_a_pickle_in(bert: Path, tmp_path: Path) -> None:
    names = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    (bert / "shard.bin").write_bytes(pickle.dumps(Canary(tmp_path / "ran")))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "shard.bin")}
    (bert / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(bert)
    assert not (tmp_path / "ran").exists()


def test_a_configuration_cannot_name_another_weights_file(bert: Path, tmp_path: Path) -> None:
    (bert / "adapter_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "ran")))
    change_config(bert, transformers_weights="adapter_model.bin")
    with pytest.raises(ModelError, match="weights file"):
        load(bert)
    assert not (tmp_path / "ran").exists()


def test_code_that_comes_with_a_model_never_runs(bert: Path, tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass C: ...\n"
    (bert / "code.py").write_text(code)
    change_config(bert, model_type="homemade", auto_map={"AutoConfig": "code.C"})
    with pytest.raises(ModelError):
        load(bert)
    assert not (tmp_path / "ran").exists()


def test_sharded_weights_are_read(bert: Path) -> None:
    stored = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    save_file(stored, bert / "one.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, "one.safetensors")}
    (bert / "model.safetensors.index.json").write_text(json.dumps(index))
    assert is_hf(load(bert))
    (bert / "one.safetensors").unlink()
    with pytest.raises(ModelError, match="missing"):
        load(bert)


def test_a_name_that_is_neither_here_nor_on_the_hub_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot be fetched from the hub"):
        load("hf:yunlu-tests/no-such-model")


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub() -> None:
    with pytest.raises(ModelError, match="there is no directory"):
        load("hf:./no/such/model")


def test_only_directories_with_a_configuration_count_as_models(tmp_path: Path) -> None:
    assert not names_hf(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert names_hf(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_implementation": "evil/kernel"}, "attn_implementation is 'evil/kernel'"),
        ({"_attn_implementation": "evil/kernel"}, "_attn_implementation"),
        ({"_attn_implementation_internal": "evil/kernel@main:f"}, "_attn_implementation_internal"),
        ({"attn_implementation": {"": "evil/kernel"}}, "evil/kernel"),
        ({"attn_implementation": "../../kernel"}, "a kernel from the hub"),
        ({"experts_implementation": "evil/experts"}, "experts_implementation"),
        ({"text_config": {"_attn_implementation": "a/b"}}, "text_config._attn_implementation"),
        ({"parts": [{"attn_implementation": "a/b"}]}, "parts.0.attn_implementation"),
    ],
)
@pytest.mark.parametrize("pretrained", [True, False])
def test_a_configuration_cannot_name_a_kernel_of_the_hub(
    bert: Path, changes: dict[str, Any], named: str, pretrained: bool
) -> None:
    change_config(bert, **changes)
    with pytest.raises(ModelError, match="a kernel from the hub, which is code") as raised:
        load(bert, pretrained=pretrained)
    assert named in raised.value.message


def test_nor_can_the_arguments_of_a_job(bert: Path) -> None:
    with pytest.raises(ModelError, match="a kernel from the hub"):
        load(bert, attn_implementation="evil/kernel")


def test_usual_implementations_are_allowed(bert: Path) -> None:
    change_config(bert, attn_implementation="eager")
    assert is_hf(load(bert))


@pytest.mark.parametrize("content", ["[" * 5000, '{"a": "\\ud800"}', "9" * 5000])
def test_a_hostile_configuration_is_refused(bert: Path, content: str) -> None:
    (bert / "config.json").write_text(content)
    with pytest.raises(ModelError, match="not readable JSON"):
        load(bert)


COMMIT = "0123abcd" * 5


@pytest.mark.parametrize(
    ("name", "revision"),
    [("hf:someone/m0", None), ("hf:someone/m1@v2", "v2"), (f"hf:someone/m2@{COMMIT}", COMMIT)],
)
def test_a_model_of_the_hub_is_fetched_once_at_its_revision(
    name: str, revision: str | None, bert: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched = tmp_path / "snapshots" / COMMIT
    shutil.copytree(bert, fetched)
    asked: list[Any] = []

    def download(repository: str, *, revision: str | None, **_: Any) -> str:
        asked.append((repository, revision))
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub_commit(find_hf_directory(name)) == COMMIT
    assert is_hf(load(name))
    assert asked == [(split_revision(name.removeprefix("hf:"))[0], revision)]
    assert hub_commit(bert) is None


def test_only_a_whole_commit_names_a_version_for_good() -> None:
    assert is_commit(COMMIT)
    assert not any(map(is_commit, (None, "main", COMMIT[:12], COMMIT.upper(), f"{COMMIT}0")))
