"""Tensor-parallel plans: how each layer of a model is sharded; or why it cannot be.

The styles have the names of transformers. ``colwise`` shards the outputs of a layer, ``rowwise`` its
inputs: in sequence they need a single all-reduce (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import nn

from yunlu.core.errors import ModelError
from yunlu.training.models.adapter import has_adapter
from yunlu.training.models.hf import is_hf
from yunlu.training.models.networks import MLP
from yunlu.training.models.transformer import (
    Attention,
    CausalTransformer,
    Embedding,
    FeedForward,
    Seq2SeqTransformer,
    TransformerClassifier,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Styles = dict[str, str]
"""Style of each sharded layer, by its name in the model; other layers are replicated."""

TRANSFORMERS = (CausalTransformer, TransformerClassifier, Seq2SeqTransformer)

_COLWISE = ("colwise", "colwise_gather_output")
_ROWWISE = ("rowwise", "rowwise_split_input")
_EMBEDDED = "embedding_rowwise"
_SUMMED = "replicated_with_grad_allreduce"
_REPLICATED = "replicate"
_SAME_SHARDING = (*_COLWISE, _EMBEDDED)
"""Styles that shard the rows of a weight, so that a head and an embedding can be tied."""


def why_not_tensor(model: nn.Module, ways: int, *, sequence: bool = False) -> str | None:
    """Why a model cannot be sharded this many ways; None if it can."""
    try:
        find_styles(model, ways, sequence=sequence)
    except ModelError as error:
        return error.message
    return None


def find_styles(model: nn.Module, ways: int, *, sequence: bool = False) -> Styles:
    """The style of each layer.

    Raises:
        ModelError: The model cannot be sharded this many ways.
    """
    if has_adapter(model):
        raise _refuse("layers with an adapter cannot be split")
    if sequence and not isinstance(model, TRANSFORMERS):
        raise _refuse(
            f"sequence parallelism needs a built-in transformer, not a {type(model).__name__}"
        )
    if isinstance(model, TRANSFORMERS):
        styles = dict(_transformer_styles(model, ways))
    elif isinstance(model, MLP):
        styles = dict(_mlp_styles(model, ways))
        if not styles:
            raise _refuse(f"no two layers of the MLP in a row share a width that divides by {ways}")
    elif is_hf(model):
        styles = _hf_styles(model, ways)
    else:
        raise _refuse(f"there is no tensor-parallel plan for a {type(model).__name__}")
    for name, style in styles.items():
        _check_layer(name, model.get_submodule(name), style, ways)
    return styles


def find_head(model: nn.Module, styles: Styles) -> str | None:
    """The sharded layer whose weight computes the logits; None if logits are replicated."""
    if isinstance(model, CausalTransformer | Seq2SeqTransformer):
        tied = getattr(model, "head", None) is None
        name = "embedding.token" if tied else "head"
    elif is_hf(model):
        hf: Any = model
        head = hf.get_output_embeddings()
        name = next((name for name, module in model.named_modules() if module is head), "")
        if not isinstance(head, nn.Linear) or styles.get(name) not in _COLWISE:
            return None
    else:
        return None
    return name if name in styles else None


def _transformer_styles(model: nn.Module, ways: int) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            heads = module.out.in_features // module.head_width
            if heads % ways:
                raise _refuse(f"{heads} heads cannot be divided among {ways} workers")
            yield from ((f"{name}.{part}", "colwise") for part in ("query", "key", "value"))
            yield f"{name}.out", "rowwise"
        elif isinstance(module, FeedForward):
            yield f"{name}.up", "colwise"
            yield f"{name}.down", "rowwise"
        elif isinstance(module, Embedding) and module.token.num_embeddings % ways == 0:
            yield f"{name}.token", _EMBEDDED
    head = getattr(model, "head", None)
    if isinstance(model, CausalTransformer) and head is not None and head.out_features % ways == 0:
        yield "head", "colwise"


def _mlp_styles(model: MLP, ways: int) -> Iterator[tuple[str, str]]:
    """Pairs of layers with only elementwise operations between them."""
    indices = [index for index, layer in enumerate(model.layers) if isinstance(layer, nn.Linear)]
    position = 0
    while position + 1 < len(indices):
        first, second = indices[position], indices[position + 1]
        between = [model.layers[index] for index in range(first + 1, second)]
        wide: Any = model.layers[first]
        mixed = any(isinstance(layer, nn.BatchNorm1d) for layer in between)
        if mixed or wide.out_features % ways:
            position += 1
            continue
        yield f"layers.{first}", "colwise"
        yield f"layers.{second}", "rowwise"
        position += 2


def _hf_styles(model: nn.Module, ways: int) -> Styles:
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise _refuse(f"transformers has no tensor-parallel plan for {type(model).__name__}")
    _check_parameters(model, plan)
    styles = {
        name: plan[pattern]
        for name, _ in model.named_modules()
        if (pattern := _without_numbers(name)) in plan and plan[pattern] != _REPLICATED
    }
    known = {*_COLWISE, *_ROWWISE, _EMBEDDED, _SUMMED}
    for name, style in styles.items():
        if style not in known:
            raise _refuse(
                f"the tensor-parallel plan of {type(model).__name__} shards {name} by {style!r}, "
                "which is not supported"
            )
    _check_heads(model, styles, ways)
    _replicate_ends(model, styles, ways)
    _check_blocks(model, styles)
    return styles


def _check_parameters(model: nn.Module, plan: dict[str, str]) -> None:
    """Refuse plans that shard bare weights outside layers, such as those of experts."""
    for name, _ in model.named_parameters():
        pattern = _without_numbers(name)
        if plan.get(pattern, _REPLICATED) != _REPLICATED:
            raise _refuse(
                f"the tensor-parallel plan of {type(model).__name__} shards the bare weight {name} "
                f"by {plan[pattern]!r}, which is not supported"
            )


def _check_blocks(model: nn.Module, styles: Styles) -> None:
    """Refuse plans without blocks, e.g. only the head: every worker would compute every block."""
    in_blocks = (style for name, style in styles.items() if "*" in _without_numbers(name))
    if any(style in _COLWISE for style in in_blocks):
        return
    if any(_without_numbers(name).endswith(".experts") for name, _ in model.named_modules()):
        why = ": the weights of its experts belong to no layer of their own"
    else:
        why = f", only {', '.join(styles)}" if styles else ""
    raise _refuse(
        f"the tensor-parallel plan of {type(model).__name__} shards none of its blocks{why}"
    )


def _check_heads(model: nn.Module, styles: Styles, ways: int) -> None:
    in_attention = any(
        style == "colwise" and re.search(r"att(n|ention)", name) for name, style in styles.items()
    )
    if not in_attention:
        return
    hf: Any = model
    config = hf.config.get_text_config()
    for key, what in (("num_attention_heads", "heads"), ("num_key_value_heads", "key-value heads")):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ways:
            raise _refuse(f"{heads} {what} cannot be divided among {ways} workers")


def _replicate_ends(model: nn.Module, styles: Styles, ways: int) -> None:
    """Replicate embedding and head if they cannot be sharded, or not both of a tied pair."""
    for name, style in list(styles.items()):
        module: Any = model.get_submodule(name)
        rows = getattr(module, "num_embeddings", getattr(module, "out_features", 0))
        if style in (_EMBEDDED, "colwise_gather_output") and rows % ways:
            del styles[name]
    for owners in tied_weights(model):
        names = [name for name, _ in owners]
        if not all(styles.get(name) in _SAME_SHARDING for name in names):
            for name in names:
                styles.pop(name, None)


def tied_weights(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Modules and parameter names of each tied weight."""
    owners: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            owners[id(weight)].append((name, key))
    return [shared for shared in owners.values() if len(shared) > 1]


def _check_layer(name: str, layer: nn.Module, style: str, ways: int) -> None:
    if style == _SUMMED:
        return
    expected = nn.Embedding if style == _EMBEDDED else nn.Linear
    # A replacement layer (quantised, adapted) uses its weight in its own way.
    if type(layer) is not expected:
        raise _refuse(
            f"{name} is a {type(layer).__name__}, and only a plain {expected.__name__} can be split"
        )
    if isinstance(layer, nn.Linear):
        size = layer.out_features if style in _COLWISE else layer.in_features
        if size % ways:
            raise _refuse(f"{name} has a width of {size}, which does not divide by {ways}")


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _refuse(reason: str) -> ModelError:
    return ModelError(reason)
