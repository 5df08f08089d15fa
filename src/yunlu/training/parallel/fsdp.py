"""Weights, gradients and optimiser state in shards: torch's FSDP2, made to add and never to average."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def shard(model: nn.Module, mesh: DeviceMesh, *, blocks: Sequence[nn.Module]) -> None:
    """Split every weight over the mesh, along its first dimension; each block is gathered by itself.

    After tensor parallelism, where there is any. What belongs to no block is gathered with the model.
    Gradients are summed over the members.

    Args:
        model: Whose weights become DTensors, in place.
        mesh: Of one axis, or of two: replicas of the shards, then shards.
        blocks: See ``find_blocks``.
    """
    for weight in model.parameters():
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()
    for block in reversed(_whole_blocks(model, blocks)):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # Else torch asks for a scaled sum, which only NCCL has.
        module.set_force_sum_reduction_for_comms(True)
        # A weight that some members did not use: they send zeros, instead of a shorter message.
        module.set_reduce_scatter_unused_params(True, recurse=False)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: of the longest list of modules of one class, and its like elsewhere."""
    longest = max(_lists(model), key=len, default=[])
    return list(
        dict.fromkeys(
            module
            for layers in _lists(model)
            if longest and type(layers[0]) is type(longest[0])
            for module in layers
        )
    )


def set_sync(model: nn.Module, *, last: bool) -> None:
    """Before each backward pass of a step: gradients are exchanged in the last one only."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def reshard(model: nn.Module) -> None:
    """Forget weights that were gathered; nothing happens to a model that is not sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def why_not_shard(model: nn.Module, ways: int) -> str | None:
    """What keeps the model from being sharded, in words; none where nothing does."""
    if ways == 1:
        return None
    for name, weight in model.named_parameters():
        if weight.ndim == 0:
            return f"{name} is a single number without a dimension to split"
    blocks = _whole_blocks(model, find_blocks(model))
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in inside]
    for weights in (*(list(block.parameters()) for block in blocks), rest):
        kinds = {str(weight.dtype) for weight in weights if weight.requires_grad}
        if len(kinds) > 1:
            return f"weights that are gathered together have different types: {', '.join(sorted(kinds))}"
    return None


class UsedWeights:
    """Tells weights that nobody used from those with a gradient of zero, which FSDP2 does not.

    An optimiser leaves a weight without a gradient alone, but decays one whose gradient is zero.
    Made after ``shard``; every member calls ``settle`` after the last backward pass of each step.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._is_used = [False] * len(self._weights)
        numbers = {id(weight): number for number, weight in enumerate(self._weights)}
        for module in _sharded_modules(model):
            places = [
                (owner, name, numbers[id(weight)])
                for owner, name, weight in _own_weights(module)
                if id(weight) in numbers
            ]
            self._watch(module, places)

    def settle(self) -> None:
        """Set the gradients to none that are zero because no member had one."""
        if not self._weights:
            return
        flags = torch.tensor(self._is_used, dtype=torch.float32, device=self._weights[0].device)
        dist.all_reduce(flags, group=self._group)
        for number, users in enumerate(flags.tolist()):
            self._is_used[number] = False
            if not users:
                self._weights[number].grad = None

    def _watch(self, module: nn.Module, places: list[tuple[nn.Module, str, int]]) -> None:
        def find_gathered(*_: Any) -> None:
            # Gathered weights exist from the first forward pass on, and stay the same objects.
            handle.remove()
            for owner, name, number in places:
                weight: Tensor = getattr(owner, name)
                weight.register_post_accumulate_grad_hook(partial(self._note, number))

        handle = module.register_forward_pre_hook(find_gathered)

    def _note(self, number: int, _weight: Tensor) -> None:
        self._is_used[number] = True


def _lists(model: nn.Module) -> list[list[nn.Module]]:
    """Of every container the members with weights, where they are several and of one class."""
    found: list[list[nn.Module]] = []
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        layers = [layer for layer in container if any(True for _ in layer.parameters())]
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1:
            found.append(layers)
    return found


def _whole_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that share no weight with the rest: FSDP2 would make two of a weight in two blocks."""
    uses = Counter(id(weight) for _, _, weight in _all_weights(model))
    whole: list[nn.Module] = []
    wanted = {id(block) for block in blocks if block is not model}
    for module in model.modules():
        if id(module) in wanted:
            inside = Counter(id(weight) for _, _, weight in _all_weights(module))
            if inside and all(uses[weight] == count for weight, count in inside.items()):
                whole.append(module)
    return whole


def _all_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, weight


def _own_weights(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Those gathered with this module, not with one inside it."""
    for name, weight in module.named_parameters(recurse=False):
        yield module, name, weight
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_weights(child)


def _sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
