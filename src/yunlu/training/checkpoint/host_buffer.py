"""Reusable host memory for the copy of the state that is written while training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yunlu.training.checkpoint.tensor_files import in_file_order

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor


class HostBuffer:
    """One contiguous buffer, reused between saves: allocation costs more than the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Allocate at least ``nbytes``, and touch the pages."""
        if self._memory.numel() < nbytes:
            self._memory = torch.zeros(
                nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A view into the buffer for each tensor; overwrites earlier contents."""
        self.reserve(sum(tensor.nbytes for tensor in tensors.values()))
        views: dict[str, Tensor] = {}
        start = 0
        for name in in_file_order(tensors):
            tensor = tensors[name]
            data = self._memory[start : start + tensor.nbytes]
            views[name] = data.view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
        return views


@torch.no_grad()
def copy_into(
    views: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: Collection[str]
) -> None:
    """Copy the named tensors into the buffer, and wait for completion."""
    is_cuda = False
    for name in names:
        views[name].copy_(tensors[name], non_blocking=True)
        is_cuda |= tensors[name].is_cuda
    if is_cuda:
        torch.cuda.current_stream().synchronize()
