"""LoRA adapters: low-rank updates beside frozen weights, and merging into the model.

The layers of PEFT replace linear layers in place, so the model keeps its class, its way of being
called, and stable names for all of its weights.
"""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from yunlu.core.errors import ModelError, did_you_mean, missing_part, nearest
from yunlu.training.models.hf import is_hf

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from yunlu.spec.job import AdapterSpec

_NAME = "default"
_KINDS = "Linear, Conv1d, Conv2d"


def add_adapter(model: nn.Module, spec: AdapterSpec, *, new: Collection[str] = ()) -> nn.Module:
    """Freeze the model and add a low-rank update to each target layer (Hu et al. 2021, section 4.1).

    A classification head is small and fully trained, and so is every layer that has a
    weight in ``new``: a random matrix must not be frozen.

    Args:
        model: Changed in place, and returned.
        spec: Rank, scale, dropout and targets.
        new: Names of randomly initialised weights.
    """
    peft = _peft()
    fresh = {name.rpartition(".")[0] for name in new}
    targets = _find_targets(model, spec, fresh)
    fully_trained = (fresh | _label_heads(model)) - set(targets)
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        # Its fast path reads the original weights instead of calling the adapted layers.
        torch.backends.mha.set_fastpath_enabled(False)
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        # As one expression: names in a list also match suffixes of other names.
        target_modules="|".join(re.escape(name) for name in targets),
        fan_in_fan_out=_are_transposed(model, targets),
    )
    _inject(peft, config, model, targets)
    for name in fully_trained:
        model.get_submodule(name).requires_grad_(True)
    return model


def has_adapter(model: nn.Module) -> bool:
    """Whether any layer has an adapter."""
    return next(_adapted(model), None) is not None


def merge_adapter(model: nn.Module) -> nn.Module:
    """Merge every update into its weight matrix, in place."""
    model.float()
    for name, layer in list(_adapted(model)):
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model.requires_grad_(True)


def save_adapter(model: nn.Module, directory: Path, *, base: str) -> None:
    """Save only the trained weights, in PEFT's format."""
    directory.mkdir()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    tensors = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": weight.detach().float().cpu()
        for name, weight in trained.items()
    }
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config: Any = getattr(model, "peft_config")  # noqa: B009 - PEFT put it there, untyped
    fully_trained = {name.rpartition(".")[0] for name in trained if ".lora_" not in name}
    changes = {"base_model_name_or_path": base, "modules_to_save": sorted(fully_trained) or None}
    replace(peft_config[_NAME], inference_mode=True, **changes).save_pretrained(str(directory))


def find_head(model: nn.Module) -> str | None:
    """Name of the last layer of a plain module, if it is linear."""
    name, module = "", model
    while True:
        children = [(key, child) for key, child in module.named_children() if _has_weights(child)]
        if not children:
            return None
        key, module = children[-1]
        name = f"{name}.{key}" if name else key
        if isinstance(module, nn.Linear):
            return name
        if not isinstance(module, nn.Sequential | nn.ModuleList):
            return None


def _peft() -> Any:
    try:
        import peft  # noqa: PLC0415 - seconds to import, and optional
    except ImportError as error:
        raise missing_part("peft", "peft", "model.adapter: lora") from error
    return peft


def _inject(peft: Any, config: Any, model: nn.Module, targets: list[str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns each time it corrects its own settings
            peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model.adapter: lora does not fit {', '.join(targets[:5])}: {reason}"
        ) from error


def _find_targets(model: nn.Module, spec: AdapterSpec, fresh: set[str]) -> list[str]:
    layers = {name: module for name, module in model.named_modules() if _can_adapt(module)}
    if spec.targets != "auto":
        named = {name for target in spec.targets for name in _match(target, model, layers)}
        return [name for name in layers if name in named - fresh] or _refuse(model)
    left_out = fresh | _heads(model)
    linear = [name for name, module in layers.items() if _is_linear(module)]
    targets = [name for name in linear if not _is_within(name, left_out)]
    return targets or _refuse(model)


def _match(target: str, model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """Layers with this name or suffix."""
    matches = [name for name in layers if name == target or name.endswith(f".{target}")]
    if matches:
        return matches
    for name, module in model.named_modules():
        if name and (name == target or name.endswith(f".{target}")):
            raise ModelError(
                f"model.adapter.targets: {name} is a {type(module).__name__}; "
                f"lora adapts layers of the kinds {_KINDS}.",
                hint=f"layers of this model: {_listing(layers)}",
            )
    ends = {name.rpartition(".")[2] for name in layers} | (
        set(layers) if len(layers) < 20 else set()
    )
    guess = nearest(target, set(layers) | ends)
    raise ModelError(
        f"model.adapter.targets: the model has no layer {target!r}.",
        hint=f"did you mean {guess!r}?" if guess else did_you_mean(target, ends),
    )


def _refuse(model: nn.Module) -> list[str]:
    raise ModelError(
        f"model.adapter: {type(model).__name__} has no linear layers to adapt besides its head.",
        hint="name other layers in model.adapter.targets, or remove model.adapter to train all weights",
    )


def _heads(model: nn.Module) -> set[str]:
    """Output layers."""
    if not is_hf(model):
        return {head} if (head := find_head(model)) else set()
    output_layer: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if output_layer is not None:
        return {name for name, module in model.named_modules() if module is output_layer}
    return _label_heads(model)


def _label_heads(model: nn.Module) -> set[str]:
    if not is_hf(model):
        return {head} if (head := find_head(model)) else set()
    output_layer: Any = getattr(model, "get_output_embeddings", lambda: None)()
    prefix: Any = getattr(model, "base_model_prefix", "")
    if output_layer is not None or not hasattr(model, prefix or "-"):
        return set()
    return {
        name for name, child in model.named_children() if name != prefix and _has_weights(child)
    }


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    lora: Any = sys.modules.get("peft.tuners.lora")
    if lora is not None:
        for name, module in model.named_modules():
            if isinstance(module, lora.LoraLayer):
                yield name, module


def _is_linear(module: nn.Module) -> bool:
    # The output projection of torch's attention is never called: its weight is read directly.
    is_read_only = type(module).__name__ == "NonDynamicallyQuantizableLinear"
    return (isinstance(module, nn.Linear) and not is_read_only) or _is_transposed(module)


def _can_adapt(module: nn.Module) -> bool:
    return _is_linear(module) or isinstance(module, nn.Conv1d | nn.Conv2d)


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, with a transposed matrix."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _are_transposed(model: nn.Module, names: list[str]) -> bool:
    return any(_is_transposed(model.get_submodule(name)) for name in names)


def _is_within(name: str, above: set[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in above)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _listing(names: Collection[str], most: int = 8) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (f", … ({len(shown)} in all)" if len(shown) > most else "")
