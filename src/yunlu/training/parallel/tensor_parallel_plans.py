"""Which layers of a model are cut across workers, and in which way; or why a model cannot be.

The ways have the names that transformers gives them. ``colwise`` cuts what a layer answers,
``rowwise`` what it reads: one after the other, they need a single sum (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import nn

from yunlu.core.errors import ModelError
from yunlu.training.models.adapter import has_adapter
from yunlu.training.models.hf import is_hf
from yunlu.training.models.mlp import MLP
from yunlu.training.models.seq2seq import Seq2SeqTransformer
from yunlu.training.models.transformer import (
    Attention,
    CausalTransformer,
    Embedding,
    FeedForward,
    TransformerClassifier,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Styles = dict[str, str]
"""The way in which each layer is cut, by its name in the model; the others are whole everywhere."""

TRANSFORMERS = (CausalTransformer, TransformerClassifier, Seq2SeqTransformer)

_COLWISE = ("colwise", "colwise_gather_output")
_ROWWISE = ("rowwise", "rowwise_split_input")
_EMBEDDED = "embedding_rowwise"
_SUMMED = "replicated_with_grad_allreduce"
_WHOLE = "replicate"
_SAME_CUT = (*_COLWISE, _EMBEDDED)
"""Ways that cut the rows of a weight, so that a head and an embedding can share one."""


def why_not_tensor(model: nn.Module, ways: int, *, sequence: bool = False) -> str | None:
    """The reason why a model cannot be cut so many ways; none if it can."""
    try:
        find_styles(model, ways, sequence=sequence)
    except ModelError as error:
        return error.message
    return None


def why_not_vocabulary(model: nn.Module, ways: int) -> str | None:
    """The reason why every worker gets the scores of all classes; none if they stay cut in training."""
    if reason := why_not_tensor(model, ways):
        return reason
    if find_head(model, find_styles(model, ways)) is None:
        return f"{type(model).__name__} ends in a layer that is not cut {ways} ways"
    return None


def find_styles(model: nn.Module, ways: int, *, sequence: bool = False) -> Styles:
    """How each layer is cut.

    Raises:
        ModelError: The model cannot be cut so many ways.
    """
    if has_adapter(model):
        raise _refuse("layers with an adapter are not cut")
    if sequence and not isinstance(model, TRANSFORMERS):
        raise _refuse(
            f"the sequence is not cut in a {type(model).__name__}, only in our transformers"
        )
    if isinstance(model, TRANSFORMERS):
        styles = dict(_cut_transformer(model, ways))
    elif isinstance(model, MLP):
        styles = dict(_cut_mlp(model, ways))
        if not styles:
            raise _refuse(f"no two layers of the MLP in a row share a width that divides by {ways}")
    elif is_hf(model):
        styles = _cut_hf(model, ways)
    else:
        raise _refuse(f"no plan is known for cutting a {type(model).__name__}")
    for name, style in styles.items():
        _check_layer(name, model.get_submodule(name), style, ways)
    return styles


def find_head(model: nn.Module, styles: Styles) -> str | None:
    """The cut layer whose weight makes the scores; none where the scores are whole on every worker."""
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


def _cut_transformer(model: nn.Module, ways: int) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            heads = module.out.in_features // module.head_width
            if heads % ways:
                raise _refuse(f"{heads} heads cannot be shared out among {ways} workers")
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


def _cut_mlp(model: MLP, ways: int) -> Iterator[tuple[str, str]]:
    """Pairs of layers with nothing between them that looks at more than one column."""
    places = [place for place, layer in enumerate(model.layers) if isinstance(layer, nn.Linear)]
    position = 0
    while position + 1 < len(places):
        first, second = places[position], places[position + 1]
        between = [model.layers[place] for place in range(first + 1, second)]
        wide: Any = model.layers[first]
        mixed = any(isinstance(layer, nn.BatchNorm1d) for layer in between)
        if mixed or wide.out_features % ways:
            position += 1
            continue
        yield f"layers.{first}", "colwise"
        yield f"layers.{second}", "rowwise"
        position += 2


def _cut_hf(model: nn.Module, ways: int) -> Styles:
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise _refuse(f"transformers has no tensor-parallel plan for {type(model).__name__}")
    _check_parameters(model, plan)
    styles = {
        name: plan[pattern]
        for name, _ in model.named_modules()
        if (pattern := _without_numbers(name)) in plan and plan[pattern] != _WHOLE
    }
    known = {*_COLWISE, *_ROWWISE, _EMBEDDED, _SUMMED}
    for name, style in styles.items():
        if style not in known:
            raise _refuse(
                f"the tensor-parallel plan of {type(model).__name__} cuts {name} by {style!r}, "
                "which is not supported"
            )
    _check_heads(model, styles, ways)
    _keep_ends_whole(model, styles, ways)
    _check_blocks(model, styles)
    return styles


def _check_parameters(model: nn.Module, plan: dict[str, str]) -> None:
    """Some plans cut bare weights, such as those of experts, which no layer stands for."""
    for name, _ in model.named_parameters():
        pattern = _without_numbers(name)
        if plan.get(pattern, _WHOLE) != _WHOLE:
            raise _refuse(
                f"the tensor-parallel plan of {type(model).__name__} cuts the bare weight {name} "
                f"by {plan[pattern]!r}, which is not supported"
            )


def _check_blocks(model: nn.Module, styles: Styles) -> None:
    """Some plans name the head alone: every worker would compute every block, for nothing."""
    in_blocks = (style for name, style in styles.items() if "*" in _without_numbers(name))
    if any(style in _COLWISE for style in in_blocks):
        return
    if any(_without_numbers(name).endswith(".experts") for name, _ in model.named_modules()):
        why = ": the weights of its experts belong to no layer of their own"
    else:
        why = f", only {', '.join(styles)}" if styles else ""
    raise _refuse(
        f"the tensor-parallel plan of {type(model).__name__} cuts none of its blocks{why}"
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
            raise _refuse(f"{heads} {what} cannot be shared out among {ways} workers")


def _keep_ends_whole(model: nn.Module, styles: Styles, ways: int) -> None:
    """Leave embedding and head whole where they cannot be cut, or not both of a pair that is tied."""
    for name, style in list(styles.items()):
        module: Any = model.get_submodule(name)
        rows = getattr(module, "num_embeddings", getattr(module, "out_features", 0))
        if style in (_EMBEDDED, "colwise_gather_output") and rows % ways:
            del styles[name]
    for owners in tied_weights(model):
        names = [name for name, _ in owners]
        if not all(styles.get(name) in _SAME_CUT for name in names):
            for name in names:
                styles.pop(name, None)


def tied_weights(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Who shares a weight: for each shared one, the modules and the name it has there."""
    owners: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            owners[id(weight)].append((name, key))
    return [shared for shared in owners.values() if len(shared) > 1]


def _check_layer(name: str, layer: nn.Module, style: str, ways: int) -> None:
    if style == _SUMMED:
        return
    wanted = nn.Embedding if style == _EMBEDDED else nn.Linear
    # A layer that takes its place (quantised, adapted) computes with its weight in its own way.
    if type(layer) is not wanted:
        raise _refuse(
            f"{name} is a {type(layer).__name__}, and only a plain {wanted.__name__} is cut"
        )
    if isinstance(layer, nn.Linear):
        size = layer.out_features if style in _COLWISE else layer.in_features
        if size % ways:
            raise _refuse(f"{name} has a width of {size}, which does not divide by {ways}")


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _refuse(reason: str) -> ModelError:
    return ModelError(reason)
