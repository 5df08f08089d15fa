"""Shapes of well-known public models by name, and of the built-in ones by arguments. Pure."""

from __future__ import annotations

import csv
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.errors import ModelError
from yunlu.planning.models.hf_config import shape_from_config
from yunlu.planning.models.hf_parts import SEVERAL_STACKS
from yunlu.planning.models.shape import Adapter, ModelShape

if TYPE_CHECKING:
    from yunlu.spec.job import AdapterSpec


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


def find_model(name: str) -> ModelShape | None:
    """The shape of a model by its hub name, its short name or a usual spelling; None: not known.

    ``meta-llama/Llama-3.1-8B``, ``llama3.1-8b``, ``LLAMA3.1_8B`` and ``Llama-3.1-8B pre-training``
    are one model.
    """
    config = find_config(name)
    if config is None:
        return None
    return shape_from_config(config, where=f"{config['_name_or_path']} (built in)")


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


Own = Literal["causal", "classifier", "seq2seq"]
_KINDS: dict[Own, Literal["decoder", "encoder", "encoder-decoder"]] = {
    "causal": "decoder",
    "classifier": "encoder",
    "seq2seq": "encoder-decoder",
}
_LAYERS: dict[Own, int] = {"causal": 4, "classifier": 2, "seq2seq": 2}
_ATTENTION_NAMES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "query",
    "key",
    "value",
    "out",
    "c_attn",
)
_POSITIONS: dict[Own, str] = {"causal": "rotary", "classifier": "learned", "seq2seq": "rotary"}


def own_transformer(
    kind: Own,
    *,
    vocabulary: int,
    max_length: int,
    classes: int = 0,
    width: int = 128,
    layers: int | None = None,
    heads: int = 4,
    tied: bool = True,
    positions: str | None = None,
    dropout: float = 0.0,
    mup_base: int | None = None,
    mup_heads: int | None = None,
) -> ModelShape:
    """Shape of the modules in ``training.models.transformer`` and ``seq2seq`` with these arguments."""
    del dropout, mup_base, mup_heads  # change no shapes
    depth = _LAYERS[kind] if layers is None else layers
    if min(width, depth, heads) < 1 or width % (2 * heads):
        raise ModelError(
            f"model.args: width {width}, layers {depth} and heads {heads} make no transformer.",
            hint=f"layers and heads of at least 1, and a width that is a multiple of {2 * max(heads, 1)}",
        )
    blocks = 2 * depth if kind == "seq2seq" else depth
    crossed = depth if kind == "seq2seq" else 0
    # A block's norms have 4 widths and its MLP's biases 5; a norm stands at the end of each stack.
    others = 9 * width * blocks + 2 * width * crossed + 2 * width * (2 if crossed else 1)
    if kind == "classifier":
        others += classes * (width + 1)
    return ModelShape(
        name="transformer",
        kind=_KINDS[kind],
        layers=blocks,
        decoder_layers=crossed,
        hidden=width,
        heads=heads,
        kv_heads=heads,
        ffn=4 * width,
        vocab=vocabulary,
        tied=tied and kind != "classifier",
        headless=kind == "classifier",
        positions=max_length if (positions or _POSITIONS[kind]) == "learned" else 0,
        other_parameters=others,
        causal=kind != "classifier",
        why_not_parted=SEVERAL_STACKS if crossed else "",
    )


def own_adapter(spec: AdapterSpec | None) -> Adapter | None:
    """Adapter of a job; frozen weights stay in FP32, as in our engine."""
    if spec is None:
        return None
    ends = {target.rpartition(".")[2] for target in spec.targets}
    is_attention = spec.targets != "auto" and ends <= set(_ATTENTION_NAMES)
    return Adapter(rank=spec.rank, targets="attention" if is_attention else "linear", base="fp32")
