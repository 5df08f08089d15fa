"""Tensor slices: every tensor has a global name and shape, and a worker holds one rectangular slice.

The same arithmetic serves checkpoints (slices in files) and redistribution between live workers (slices
in memory): state sharded under one layout is assembled under another by intersecting slices.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from yunlu.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed.tensor import DTensor, Shard
    from typing_extensions import TypeIs


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rectangular region of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements; a scalar's slice has one."""
        return 0 in self.size

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def intersect(self, other: TensorSlice) -> TensorSlice:
        """The intersection; may be empty."""
        low = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        return TensorSlice(
            low, tuple(max(0, end - start) for start, end in zip(low, ends, strict=True))
        )

    def subtract(self, other: TensorSlice) -> Iterator[TensorSlice]:
        """The difference, as disjoint slices."""
        common = self.intersect(other)
        if common.is_empty:
            if not self.is_empty:
                yield self
            return
        offset, size = list(self.offset), list(self.size)
        for dim, (low, length) in enumerate(zip(common.offset, common.size, strict=True)):
            before, after = low - offset[dim], offset[dim] + size[dim] - low - length
            for start, extent in ((offset[dim], before), (low + length, after)):
                if extent:
                    yield TensorSlice(_with(offset, dim, start), _with(size, dim, extent))
            offset[dim], size[dim] = low, length

    def within(self, outer: TensorSlice) -> tuple[slice, ...]:
        """Index of this slice in a tensor that holds the outer slice."""
        return tuple(
            slice(start - base, start - base + length)
            for start, base, length in zip(self.offset, outer.offset, self.size, strict=True)
        )

    def _ends(self) -> Iterator[int]:
        return (start + length for start, length in zip(self.offset, self.size, strict=True))


def full_slice(shape: Sequence[int]) -> TensorSlice:
    """The slice of a full tensor."""
    return TensorSlice((0,) * len(shape), tuple(shape))


def missing_elements(target: TensorSlice, regions: Iterable[TensorSlice]) -> list[TensorSlice]:
    """The parts of the target that no region covers."""
    left = [] if target.is_empty else [target]
    for region in regions:
        left = [rest for part in left for rest in part.subtract(region)]
    return left


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Global shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One worker's shard of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    region: TensorSlice
    tensor: Tensor
    """Local plain tensor, of the region's size."""

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.region.size:
            raise ValueError(f"{self.name}: {tuple(self.tensor.shape)} is not {self.region.size}")

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor."""
        return self.tensor.numel() * self.tensor.element_size()


class ShardReader(Protocol):
    """Source of state."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors that can be read, by name."""
        ...

    def read(self, name: str, region: TensorSlice) -> Tensor:
        """Read a region of a tensor, on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class ShardGroupReader:
    """The tensors of one group of a reader, by their names within the group."""

    reader: ShardReader
    group: str

    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of the group."""
        prefix = f"{self.group}/"
        specs = self.reader.specs().items()
        return {name.removeprefix(prefix): spec for name, spec in specs if name.startswith(prefix)}

    def read(self, name: str, region: TensorSlice) -> Tensor:
        """Read a region of a tensor of the group."""
        return self.reader.read(f"{self.group}/{name}", region)


def join_groups(groups: Mapping[str, Mapping[str, TensorShard]]) -> list[TensorShard]:
    """The shards of all groups, named ``<group>/<name>``."""
    return [
        replace(shard, name=f"{group}/{name}")
        for group, shards in groups.items()
        for name, shard in shards.items()
    ]


def shard_of(name: str, tensor: Tensor) -> TensorShard:
    """This worker's shard of a tensor; all of a plain tensor."""
    shape = tuple(tensor.shape)
    if not is_distributed(tensor):
        return TensorShard(name, shape, full_slice(shape), tensor.detach())
    local = local_of(tensor)
    region = _region_of(name, shape, tensor)
    if region.size != tuple(local.shape):
        raise CheckpointError(
            f"The shard of {name} is {tuple(local.shape)}, where {tensor.placements} of {shape} "
            f"means {region.size}.",
            hint="This is a fault of Yunlu or of a model that shards its own weights; please report it.",
        )
    return TensorShard(name, shape, region, local.detach())


def local_of(tensor: Tensor) -> Tensor:
    """The local memory of a distributed tensor; a plain tensor itself."""
    return cast("Any", tensor)._local_tensor if is_distributed(tensor) else tensor


def is_distributed(tensor: Tensor | None) -> TypeIs[DTensor]:
    """Whether this is one of torch's distributed tensors.

    Replicas never import that module, which takes most of a second.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _region_of(name: str, shape: tuple[int, ...], tensor: DTensor) -> TensorSlice:
    # torch's own computation is wrong where FSDP is applied to an uneven split of the same dimension.
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return TensorSlice((0,) * len(shape), (0,) * len(shape))
    offset, size = [0] * len(shape), list(shape)
    for axis in _sharding_order(name, tensor):
        dim, ways = _sharded_dim(tensor, axis), tensor.device_mesh.size(axis)
        chunk = -(-size[dim] // ways)
        start = min(chunk * coordinate[axis], size[dim])
        offset[dim], size[dim] = offset[dim] + start, min(chunk, size[dim] - start)
    return TensorSlice(tuple(offset), tuple(size))


def _sharding_order(name: str, tensor: DTensor) -> list[int]:
    """Mesh axes in order of sharding: a strided shard was applied after plain ones to its right."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - see is_distributed
    from torch.distributed.tensor.placement_types import (  # noqa: PLC0415
        _StridedShard,  # pyright: ignore[reportPrivateUsage]
    )

    plain: list[int] = []
    strided: list[int] = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            strided.append(axis)
        elif isinstance(placement, Shard):
            plain.append(axis)
        elif not isinstance(placement, Replicate):
            raise CheckpointError(
                f"{name} is placed as {placement}: no worker holds its value.",
                hint="State must be sharded or replicated; keep sums out of weights and buffers.",
            )
    for axis in strided:
        dim = _sharded_dim(tensor, axis)
        after = [other for other in plain if other > axis and _sharded_dim(tensor, other) == dim]
        ways = prod(tensor.device_mesh.size(other) for other in after)
        if ways != cast("Any", tensor.placements[axis]).split_factor or len(strided) > 1:
            raise CheckpointError(
                f"{name} is sharded as {tensor.placements}, which is not one rectangular slice."
            )
    return [*plain, *strided]


def _sharded_dim(tensor: DTensor, axis: int) -> int:
    return cast("Shard", tensor.placements[axis]).dim


def find_aliases(model: nn.Module) -> dict[str, str]:
    """Alias → name of tied weights, for the full model."""
    return _tied(model.state_dict())[1]


def weights_of(
    modules: Iterable[nn.Module], *, aliases: Mapping[str, str] | None = None
) -> dict[str, TensorShard]:
    """Weights and persistent buffers of one or several stages, under names of the full model.

    Tied weights appear once. ``aliases`` of the full model give both copies of a tied weight that a
    pipeline keeps on two workers the same name.
    """
    shards: dict[str, TensorShard] = {}
    for module in modules:
        for name, value in _tied(module.state_dict())[0].items():
            known = (aliases or {}).get(name, name)
            shards.setdefault(known, shard_of(known, value))
    return shards


def _tied(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"The model keeps {name} ({type(value).__name__}) in its state, which is not a tensor.",
                hint="Keep such values as buffers, or outside the state dict.",
            )
        local = local_of(value)
        key = (local.data_ptr(), local.dtype, tuple(local.shape), local.stride())
        if local.numel() and key in names:
            aliases[name] = names[key]
            continue
        names[key] = name
        tensors[name] = value
    return tensors, aliases


def fill(shards: Iterable[TensorShard], reader: ShardReader) -> None:
    """Copy into the live tensors; changes nothing if the state does not fit."""
    targets = list(shards)
    check_fit(targets, reader.specs())
    with torch.no_grad():
        for shard in targets:
            if not shard.region.is_empty:
                shard.tensor.copy_(reader.read(shard.name, shard.region))


def check_fit(targets: Iterable[TensorShard], specs: Mapping[str, TensorSpec]) -> None:
    """Refuse state with a missing tensor, or another shape."""
    for shard in targets:
        spec = specs.get(shard.name)
        if spec is None or spec.shape != shard.shape:
            has = "does not have it" if spec is None else f"has {list(spec.shape)}"
            raise CheckpointError(
                f"The state does not fit the model: {shard.name} is {list(shard.shape)} here, "
                f"and the state {has}.",
                hint="Resume with the model and the data the run was started with.",
            )


def _with(values: list[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def copy_weights(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Copies of all weights on the CPU; tied weights appear once, with aliases for other names."""
    tensors: dict[str, Tensor] = {}
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


def _copy(value: Tensor) -> Tensor:
    # A clone, even on the CPU: training goes on while the copy is written.
    return value.detach().to("cpu", copy=True).contiguous()
