"""The copy of the state that is written while training goes on, in memory that is used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yunlu.training.checkpoint.tensor_files import in_file_order

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor


class HostBuffer:
    """One stretch of memory, kept between saves: new memory costs more than the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Have that much at hand; also touches it, which is what costs."""
        if self._memory.numel() < nbytes:
            self._memory = torch.zeros(
                nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A place for each tensor; whatever was in the memory is given up."""
        self.reserve(sum(tensor.nbytes for tensor in tensors.values()))
        places: dict[str, Tensor] = {}
        start = 0
        for name in in_file_order(tensors):
            tensor = tensors[name]
            data = self._memory[start : start + tensor.nbytes]
            places[name] = data.view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
        return places


@torch.no_grad()
def copy_into(
    places: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: Collection[str]
) -> None:
    """Copy the named tensors to their places, and wait until that is done."""
    is_remote = False
    for name in names:
        places[name].copy_(tensors[name], non_blocking=True)
        is_remote |= tensors[name].is_cuda
    if is_remote:
        torch.cuda.current_stream().synchronize()
