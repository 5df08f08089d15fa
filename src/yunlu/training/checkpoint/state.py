"""Model, optimiser and random numbers as plain tensors and JSON, and back."""

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
    """A copy of every weight on the CPU; tied weights stand once, with their other names aside."""
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"The model keeps {name} ({type(value).__name__}) in its state, which is not a tensor.",
                hint="Keep such values as buffers, or outside the state dict.",
            )
        key = (value.data_ptr(), value.storage_offset(), tuple(value.shape))
        if value.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        tensors[name] = _copy(value)
    return tensors, aliases


def restore_weights(module: nn.Module, tensors: Tensors, aliases: dict[str, str]) -> None:
    """Load a copy back; refuses one of another model."""
    everything = tensors | {name: tensors[source] for name, source in aliases.items()}
    try:
        module.load_state_dict(everything)
    except RuntimeError as error:
        raise CheckpointError(
            f"The checkpoint does not fit the model: {error}",
            hint="Resume with the model and the data the run was started with.",
        ) from error


def copy_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Tensors named ``<index>.<key>``; numbers and groups as JSON."""
    packed = optimizer.state_dict()
    tensors: Tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, state in packed["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = _copy(value)
            else:
                numbers.setdefault(str(index), {})[key] = value
    return tensors, {"numbers": numbers, "groups": packed["param_groups"]}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Tensors, packed: dict[str, Any]
) -> None:
    """Load a copy back."""
    state: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in packed["numbers"].items()
    }
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    groups = [
        # JSON knows no tuples; optimisers compare and unpack them.
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in packed["groups"]
    ]
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"The checkpoint does not fit the optimiser: {error}") from error


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
    """Continue every generator where it stood."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, position, has_gauss, cached = state["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def seed_everything(seed: int) -> None:
    """Start every generator from one number."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _copy(value: Tensor) -> Tensor:
    # A clone, even on the CPU: training goes on while the copy is written.
    return value.detach().to("cpu", copy=True).contiguous()
