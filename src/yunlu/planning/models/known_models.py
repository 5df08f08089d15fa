"""Shapes of well-known public models by name, without a download. Pure."""

from __future__ import annotations

import csv
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from yunlu.planning.models.hf_config import shape_from_config

if TYPE_CHECKING:
    from yunlu.planning.models.hf_config import Head
    from yunlu.planning.models.shape import ModelShape

_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
    "experts": "num_experts",
    "active": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}
"""Field names of our columns in a ``config.json``."""

# Suffixes of model names that do not change the shape.
_IN_BRACKETS = re.compile(r"\(.*?\)")
_FRILLS = re.compile(
    r"(hf|instruct|it|pt|chat|base|sft|lora|qlora|gptq|awq|bf16|fp8|nvfp4|pretrained|preview|maxtext"
    r"|pre|fine|training|tuning|pretraining|finetuning|huggingface|uncased|cased|meta|nvidia"
    r"|24\d\d|25\d\d|v0\.[12])"
)
_BETWEEN = re.compile(r"[\s_/-]+")


def find_model(name: str, *, head: Head | None = None) -> ModelShape | None:
    """The shape of a model by its hub name, its short name or a usual spelling; None: not known.

    ``meta-llama/Llama-3.1-8B``, ``llama3.1-8b``, ``LLAMA3.1_8B`` and ``Llama-3.1-8B pre-training``
    are one model.
    """
    config = find_config(name)
    if config is None:
        return None
    return shape_from_config(config, where=f"{config['_name_or_path']} (built in)", head=head)


def find_config(name: str) -> dict[str, Any] | None:
    """The configuration of a known model, as its ``config.json`` has it, where shapes depend on it."""
    table = _table()
    for spelling in _spellings(name):
        if spelling in table:
            return dict(table[spelling])
    return None


@cache
def _table() -> dict[str, dict[str, Any]]:
    """Configurations by every alias."""
    text = files("yunlu.planning").joinpath("data/models.csv").read_text(encoding="utf-8")
    result: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(text.splitlines()):
        config = _config_of(row)
        own = row["name"].rpartition("/")[2]
        for item in (row["name"], own, *row["aliases"].split(";")):
            result.setdefault(_plain(item), config)
        result.setdefault(_plain(_bare(own)), config)
    return result


def _config_of(row: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {"_name_or_path": row["name"], "model_type": row["model_type"]}
    config |= {field: int(row[column]) for column, field in _FIELDS.items() if row[column]}
    for item in row["more"].split():
        key, _, value = item.partition("=")
        config[key] = _value(key, value)
    return config


def _value(key: str, text: str) -> Any:
    if key == "architectures":
        return [text]
    if "*" in text:  # number of blocks of each kind; their order does not matter here
        runs = [run.split("*") for run in text.split("+")]
        return [kind for kind, times in runs for _ in range(int(times))]
    return int(text) if text.isdigit() else text


def _spellings(name: str) -> list[str]:
    """The name itself, then with fewer prefixes and suffixes."""
    plain = _IN_BRACKETS.sub(" ", name.removeprefix("hf:")).strip()
    last = plain.rpartition("/")[2]
    return [_plain(plain), _plain(last), _plain(_bare(last))]


def _bare(name: str) -> str:
    """Without parts that do not change the shape."""
    parts = _BETWEEN.split(name.lower().strip())
    return " ".join(word for word in parts if word and not _FRILLS.fullmatch(word))


def _plain(name: str) -> str:
    """Without separators; a point stays: 1.3b is not 13b."""
    return _BETWEEN.sub("", name.lower())
