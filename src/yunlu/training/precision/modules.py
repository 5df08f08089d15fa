"""Precisions of a device, and full precision for single modules and operators.

Operators kept in FP32 under CPU autocast, which lets some follow their input type.
On CUDA autocast runs norms, softmax, exponentials and losses in FP32. On the CPU it does so for the
losses only: a layer norm or a ``log_softmax`` of BF16 scores gives BF16, three digits. The rules
below close the gap. (Batch norm is on neither list: its kernels sum in FP32 and round the result.)
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from yunlu.core.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator


def check_precision(name: str, device: torch.device) -> None:
    """Refuse a precision that the device does not support; a slow one is allowed."""
    missing = _missing(name, device)
    if missing is not None:
        raise JobError(
            f"train.precision: {name} needs {missing}; this device is {_describe(device)}.",
            hint="Use precision: auto, which picks a fast one for the device, or fp32.",
        )


def _missing(name: str, device: torch.device) -> str | None:
    """The missing requirement of a precision; None if supported."""
    if name == "fp32":
        return None
    needs = {
        "tf32": (_has_tf32, "an NVIDIA GPU of compute capability 8.0 (Ampere) or newer"),
        "bf16": (_has_bf16, "a device with bfloat16"),
        "fp16": (_has_autocast, "a device with automatic mixed precision"),
        "fp8": (has_fp8, "a GPU with FP8 products (NVIDIA 8.9 or newer, AMD MI300 or newer)"),
    }
    has_it, need = needs[name]
    return None if has_it(device) else need


def _has_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return _has_autocast(device)


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and not _is_amd() and _capability(device) >= (8, 0)


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies in FP8."""
    if device.type != "cuda":
        return False
    if _is_amd():
        architecture: str = torch.cuda.get_device_properties(device).gcnArchName
        return architecture.startswith(("gfx94", "gfx95"))
    return _capability(device) >= (8, 9)


def _is_amd() -> bool:
    return torch.version.hip is not None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"a {device.type}"
    major, minor = _capability(device)
    return f"{torch.cuda.get_device_name(device)} (capability {major}.{minor})"


_IN_FP32 = (
    "layer_norm",
    "group_norm",
    "rms_norm",
    "softmax.int",
    "log_softmax.int",
    "logsumexp",
    "exp",
    "pow.Tensor_Scalar",
)
_LSTM = ("lstm.input", "lstm.data")


@cache
def keep_in_fp32() -> torch.library.Library:
    """Add the missing rules to CPU autocast, once in a process; they last as long as it does."""
    rules = torch.library.Library("aten", "IMPL")
    for operator in _IN_FP32 if _lowers_lstm() else _IN_FP32 + _LSTM:
        torch.library.register_autocast(f"aten::{operator}", "cpu", torch.float32, lib=rules)
    return rules


def _lowers_lstm() -> bool:
    """Whether oneDNN has a low-precision LSTM here; autocast requests one anyway, and fails."""
    return (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )


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
