"""Sharded weights, gradients and optimiser state with torch's FSDP2; gradients are summed, not averaged."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from yunlu.training.parallel.placement import move_in_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    blocks: Sequence[nn.Module],
    device: torch.device | None = None,
) -> None:
    """Shard every weight over the mesh, along its first dimension; each block is gathered separately.

    Applied after tensor parallelism. Weights outside blocks are gathered with the model.
    Gradients are summed over the workers.

    Args:
        model: Its weights become DTensors, in place.
        mesh: One axis, or two: replicas, then shards.
        blocks: See ``find_blocks``.
        device: Where the shards belong; never more than one block is there as a whole.
    """
    for weight in model.parameters():
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()
    for module in (*reversed(_separate_blocks(model, blocks)), model):
        if device is not None:
            move_in_place(module, device)
        fully_shard(module, mesh=mesh)
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # Otherwise torch uses a scaled sum, which only NCCL supports.
        module.set_force_sum_reduction_for_comms(True)
        # Workers that did not use a weight send zeros instead of a shorter message.
        module.set_reduce_scatter_unused_params(True, recurse=False)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: the longest list of modules of one class, and other lists of that class."""
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
    """Before each backward pass: replicas of the shards add up the gradients in the last one only.

    Shards are reduced in each: until then every worker would hold the gradients of the whole model.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)


def reshard(model: nn.Module) -> None:
    """Free gathered weights; no effect on a model that is not sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def why_not_shard(model: nn.Module, ways: int) -> str | None:
    """Why the model cannot be sharded; None if it can."""
    if ways == 1:
        return None
    for name, weight in model.named_parameters():
        if weight.ndim == 0:
            return f"{name} is a single number without a dimension to split"
    blocks = _separate_blocks(model, find_blocks(model))
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in inside]
    for weights in (*(list(block.parameters()) for block in blocks), rest):
        kinds = {str(weight.dtype) for weight in weights if weight.requires_grad}
        if len(kinds) > 1:
            return f"weights that are gathered together have different types: {', '.join(sorted(kinds))}"
    return None


class UsedWeights:
    """Distinguishes unused weights from those with a zero gradient, which FSDP2 does not.

    An optimiser skips a weight without a gradient, but decays one whose gradient is zero. Made after
    ``shard``; every worker calls ``clear_unused`` after the last backward pass of each step.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._is_used = [False] * len(self._weights)
        numbers = {id(weight): number for number, weight in enumerate(self._weights)}
        for module in _sharded_modules(model):
            owners = [
                (owner, name, numbers[id(weight)])
                for owner, name, weight in _own_weights(module)
                if id(weight) in numbers
            ]
            self._add_hooks(module, owners)

    def clear_unused(self) -> None:
        """Set gradients to None that no worker computed."""
        if not self._weights:
            return
        # Among the hosts, which know it already: no device is waited for.
        flags = torch.tensor(self._is_used, dtype=torch.float32)
        dist.all_reduce(flags, group=self._group)
        for number, users in enumerate(flags.tolist()):
            self._is_used[number] = False
            if not users:
                self._weights[number].grad = None

    def _add_hooks(self, module: nn.Module, owners: list[tuple[nn.Module, str, int]]) -> None:
        def find_gathered(*_: Any) -> None:
            # Gathered weights exist from the first forward pass on, and stay the same objects.
            handle.remove()
            for owner, name, number in owners:
                weight: Tensor = getattr(owner, name)
                weight.register_post_accumulate_grad_hook(partial(self._mark_used, number))

        handle = module.register_forward_pre_hook(find_gathered)

    def _mark_used(self, number: int, _weight: Tensor) -> None:
        self._is_used[number] = True


def _lists(model: nn.Module) -> list[list[nn.Module]]:
    """Lists of layers with weights, of one class, in each container."""
    lists: list[list[nn.Module]] = []
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        layers = [layer for layer in container if any(True for _ in layer.parameters())]
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1:
            lists.append(layers)
    return lists


def _separate_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Blocks that share no weight with the rest: FSDP2 would duplicate a shared weight."""
    uses = Counter(id(weight) for _, _, weight in _all_weights(model))
    separate: list[nn.Module] = []
    block_ids = {id(block) for block in blocks if block is not model}
    for module in model.modules():
        if id(module) in block_ids:
            inside = Counter(id(weight) for _, _, weight in _all_weights(module))
            if inside and all(uses[weight] == count for weight, count in inside.items()):
                separate.append(module)
    return separate


def _all_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, weight


def _own_weights(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Weights gathered with this module, not with an inner one."""
    for name, weight in module.named_parameters(recurse=False):
        yield module, name, weight
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_weights(child)


def _sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
