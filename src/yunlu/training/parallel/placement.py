"""Moving a model to a device in place: its weights stay the same objects, also those that are shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from yunlu.training.tensor_slices import is_distributed

if TYPE_CHECKING:
    from torch import Tensor

_torch: Any = torch


def move_in_place(module: nn.Module, device: torch.device) -> None:
    """Move weights and buffers; distributed ones are where their mesh is, blank ones nowhere."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_distributed(tensor) and tensor.device.type not in {device.type, "meta"}:
            _move(tensor, device)


@torch.no_grad()
def _move(tensor: Tensor, device: torch.device) -> None:
    moved = tensor.detach().to(device)
    if _torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
        return
    # Tensors of devices that torch does not have itself cannot take the place of others' data.
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, moved)
