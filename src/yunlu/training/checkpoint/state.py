"""Copies of model weights and random-number state, as plain tensors and JSON."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from yunlu.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

Tensors = dict[str, Tensor]


def copy_weights(module: nn.Module) -> tuple[Tensors, dict[str, str]]:
    """Copies of all weights on the CPU; tied weights appear once, with aliases for other names."""
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"The model keeps {name} ({type(value).__name__}) in its state, which is not a tensor.",
                hint="Keep such values as buffers, or outside the state dict.",
            )
        key = (value.data_ptr(), value.storage_offset(), tuple(value.shape))
        if value.numel() and key in names:
            aliases[name] = names[key]
            continue
        names[key] = name
        tensors[name] = _copy(value)
    return tensors, aliases


def copy_random() -> tuple[Tensors, dict[str, Any]]:
    """The state of every generator that training may draw from."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.array(keys, np.int64))}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, int(position), int(has_gauss), float(cached)],
    }
    return tensors, state


def restore_random(tensors: Tensors, state: dict[str, Any]) -> None:
    """Restore the state of every generator."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, position, has_gauss, cached = state["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def seed_everything(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _copy(value: Tensor) -> Tensor:
    # A clone, even on the CPU: training goes on while the copy is written.
    return value.detach().to("cpu", copy=True).contiguous()
