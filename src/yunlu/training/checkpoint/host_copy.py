"""Copies of live tensors in host memory: begun at a point of the computation, finished by any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yunlu.training.checkpoint.files import in_file_order
from yunlu.training.device import can_pin, has_streams, record_event

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor


class HostBuffer:
    """One contiguous buffer, reused between saves: allocation costs more than the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int, *, is_pinned: bool = False) -> None:
        """Allocate at least ``nbytes``, and touch the pages."""
        if self._memory.numel() < nbytes or (is_pinned and not self._memory.is_pinned()):
            self._memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=is_pinned)

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A view into the buffer for each tensor; overwrites earlier contents."""
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.reserve(nbytes, is_pinned=can_pin(tensor.device for tensor in tensors.values()))
        views: dict[str, Tensor] = {}
        start = 0
        for name in in_file_order(tensors):
            tensor = tensors[name]
            data = self._memory[start : start + tensor.nbytes]
            views[name] = data.view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
        return views


class HostCopy:
    """Tensors to be copied into views of a buffer, as they are when this is made.

    On an accelerator the copies run on a stream of their own, beside the steps that only read the tensors;
    whoever changes a tensor waits for ``run`` first.

    Args:
        views: Where to, by name.
        tensors: What to copy.
        moving: Names of tensors that change meanwhile: on an accelerator a copy there is made at once.
    """

    def __init__(
        self,
        views: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        *,
        moving: Collection[str] = (),
    ) -> None:
        self._views, self._tensors = views, dict(tensors)
        for name in self._tensors.keys() & moving:
            if has_streams(self._tensors[name].device):
                self._tensors[name] = self._tensors[name].detach().clone()
        devices = {tensor.device for tensor in self._tensors.values()}
        self._ready = {device: record_event(device) for device in devices if has_streams(device)}

    @torch.no_grad()
    def run(self, names: Collection[str] | None = None) -> None:
        """Copy these tensors, or all that are left, and wait until they are there."""
        chosen = {
            name: self._tensors.pop(name)
            for name in (list(self._tensors) if names is None else names)
        }
        for device in {tensor.device for tensor in chosen.values()}:
            here = {name: tensor for name, tensor in chosen.items() if tensor.device == device}
            if device in self._ready:
                self._copy_beside(here, self._ready[device])
            else:
                for name, tensor in here.items():
                    self._views[name].copy_(tensor)

    def clear(self) -> None:
        """Drop the tensors that are left."""
        self._tensors.clear()

    def _copy_beside(self, tensors: Mapping[str, Tensor], ready: torch.Event) -> None:
        # The stream belongs to the tensors' device; the current one of this thread may be another.
        stream = torch.Stream(next(iter(tensors.values())).device)
        stream.wait_event(ready)
        with stream:
            for name, tensor in tensors.items():
                self._views[name].copy_(tensor, non_blocking=True)
        stream.synchronize()


def must_copy_now(tensor: Tensor) -> bool:
    """Whether a tensor that forward passes change has to be copied to the host before they go on."""
    return not has_streams(tensor.device)
