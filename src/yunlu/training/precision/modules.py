"""Full precision for single modules: candidates, promotion and its reversal."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

# Attention as a unit: it never calls its inner projection. Others may contain parametrisations.
_LOWERED = (nn.MultiheadAttention, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_NEVER_LOWERED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
_LOW = (torch.float16, torch.bfloat16)


def find_candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose products autocast lowers, by name: those that own matrices."""
    candidates: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_covered(name, candidates) or isinstance(module, _NEVER_LOWERED):
            continue
        is_leaf = next(module.children(), None) is None
        weights = module.parameters(recurse=False)
        if isinstance(module, _LOWERED) or (
            is_leaf and any(_is_matrix(weight) for weight in weights)
        ):
            candidates[name] = module
    return candidates


def is_covered(name: str, chosen: Container[str]) -> bool:
    """Whether the module, or a parent of it, is among the chosen."""
    while name and name not in chosen:
        name = name.rpartition(".")[0]
    return name in chosen


def is_movable(module: nn.Module) -> bool:
    """False if other code has replaced ``forward`` on the instance."""
    return "forward" not in vars(module)


def run_in_full(module: nn.Module) -> None:
    """Make the module compute in FP32, also under autocast."""
    # A bound method, unlike a closure, is rebound to the copy by a deep copy of the module.
    vars(module)["forward"] = MethodType(_forward_in_full, module)


def run_as_given(module: nn.Module) -> None:
    """Undo ``run_in_full``."""
    vars(module).pop("forward", None)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):  # model outputs of Hugging Face too
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


def _is_matrix(weight: Tensor) -> bool:
    return weight.ndim >= 2 and weight.is_floating_point()


def _forward_in_full(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward: Callable[..., Any] = type(self).forward
    kind = next(tensors_in((args, kwargs)), torch.empty(0)).device.type
    if not torch.is_autocast_enabled(kind):
        return forward(self, *args, **kwargs)
    with torch.autocast(kind, enabled=False):
        return forward(self, *_in_fp32(args), **_in_fp32(kwargs))


def _in_fp32(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.float() if values.dtype in _LOW else values
    if isinstance(values, PackedSequence):
        return values.to(torch.float32) if values.data.dtype in _LOW else values
    if isinstance(values, dict):
        return {key: _in_fp32(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        inside = [_in_fp32(value) for value in values]
        if hasattr(values, "_fields"):  # a named tuple takes its fields one by one
            return type(values)(*inside)
        return type(values)(inside)
    return values
