"""Precisions supported by a device."""

from __future__ import annotations

import torch

from yunlu.core.errors import JobError


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
