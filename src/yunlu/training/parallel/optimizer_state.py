"""What an optimiser remembers, as boxes named after the weights: it fits any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yunlu.core.errors import CheckpointError
from yunlu.training.parallel.tensor_slices import (
    TensorShard,
    TensorSlice,
    TensorSpec,
    fill,
    full_slice,
    shard_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from yunlu.training.parallel.tensor_slices import ShardReader

_KINDS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Plain numbers are kept as scalars whose name ends in ``:<type>``: JSON is written by one worker only,
which does not have the weights of the others."""
_NAMES = {kind.__name__: kind for kind in _KINDS}
_OWN = ("params", "param_names")


def parameter_shards(
    parts: Iterable[nn.Module],
    weights: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
) -> dict[int, TensorShard]:
    """By ``id`` of each leaf, the weight whose local part it is.

    Args:
        parts: The modules that hold the weights, with whole-model names.
        weights: As the modules have them.
        leaves: What the optimiser changes: the same, or plain tensors over their memory.
        aliases: See ``weights_of``.
    """
    names: dict[int, str] = {}
    for part in parts:
        for name, weight in part.named_parameters():
            names.setdefault(id(weight), (aliases or {}).get(name, name))
    return {
        id(leaf): replace(shard_of(names[id(weight)], weight), tensor=leaf.detach())
        for weight, leaf in zip(weights, leaves, strict=True)
    }


def optimizer_shards(
    optimizer: Any, names: Mapping[int, TensorShard]
) -> tuple[dict[str, TensorShard], dict[str, Any]]:
    """The state as pieces named ``<weight>/<key>``, and the hyper-parameters by weight as JSON.

    Args:
        optimizer: torch's, or one with the same ``state`` and ``param_groups``, over plain tensors.
        names: By ``id`` of such a tensor, the weight whose piece it is.
    """
    shards: dict[str, TensorShard] = {}
    for leaf, kept in optimizer.state.items():
        weight = names[id(leaf)]
        for key, value in kept.items():
            shard = _state_piece(weight, key, value)
            if shard is not None:
                shards[shard.name] = shard
    return shards, {"groups": _describe_groups(optimizer, names)}


def wanted_optimizer(
    optimizer: Any, names: Mapping[int, TensorShard], specs: Mapping[str, TensorSpec]
) -> dict[str, TensorShard]:
    """New tensors for the state that exists elsewhere, of the sizes that this worker holds."""
    by_weight: dict[str, list[str]] = {}
    for name in specs:
        by_weight.setdefault(name.rpartition("/")[0], []).append(name)
    wanted: dict[str, TensorShard] = {}
    for group in optimizer.param_groups:
        for leaf in group["params"]:
            weight = names[id(leaf)]
            for name in by_weight.get(weight.name, ()):
                spec = specs[name]
                region = weight.region if spec.shape == weight.shape else full_slice(spec.shape)
                tensor = torch.empty(region.size, dtype=spec.dtype, device=_device(name, leaf, group))
                wanted[name] = TensorShard(name, spec.shape, region, tensor)
    return wanted


def install_optimizer(
    optimizer: Any,
    names: Mapping[int, TensorShard],
    filled: Mapping[str, TensorShard],
    packed: Mapping[str, Any],
) -> None:
    """Continue with the state in these tensors."""
    by_weight: dict[str, dict[str, Any]] = {}
    for name, shard in filled.items():
        weight, _, key = name.rpartition("/")
        key, _, kind = key.partition(":")
        value = _NAMES[kind](shard.tensor.item()) if kind else shard.tensor
        by_weight.setdefault(weight, {})[key] = value
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    position = 0
    for group in optimizer.param_groups:
        places = range(position, position + len(group["params"]))
        position += len(group["params"])
        weights = [names[id(leaf)].name for leaf in group["params"]]
        kept = {key: value for key, value in group.items() if key not in _OWN}
        groups.append(kept | _find_group(packed, weights) | {"params": list(places)})
        state |= {
            place: by_weight[name]
            for place, name in zip(places, weights, strict=True)
            if name in by_weight
        }
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"The state does not fit the optimiser: {error}") from error


def fill_optimizer(
    optimizer: Any, names: Mapping[int, TensorShard], reader: ShardReader, packed: Mapping[str, Any]
) -> None:
    """Continue with the state that a reader has, cut as this worker's weights are."""
    wanted = wanted_optimizer(optimizer, names, reader.specs())
    fill(wanted.values(), reader)
    install_optimizer(optimizer, names, wanted, packed)


def _state_piece(weight: TensorShard, key: str, value: Any) -> TensorShard | None:
    if value is None:  # as SGD before its first momentum
        return None
    name = f"{weight.name}/{key}"
    if not isinstance(value, Tensor):
        kind = type(value)
        if kind not in _KINDS:
            raise CheckpointError(
                f"The optimiser keeps {key} ({kind.__name__}) for {weight.name}, which is no tensor or number.",
                hint="Use an optimiser whose state is tensors and numbers.",
            )
        value, name = torch.tensor(value, dtype=_KINDS[kind]), f"{name}:{kind.__name__}"
    shape = tuple(value.shape)
    if shape == weight.region.size:
        return TensorShard(name, weight.shape, weight.region, value.detach())
    # Blocks of an 8-bit state, or rows and columns of a factored one, are of this cut and no other.
    if value.numel() > 1 and weight.region != full_slice(weight.shape):
        raise CheckpointError(
            f"The optimiser's {key} of {weight.name} is {list(shape)}, which cannot be cut as the weight "
            f"is ({list(weight.region.size)} of {list(weight.shape)}).",
            hint="Use an optimiser with full states (adamw, momentum), or a layout with dp only.",
        )
    return TensorShard(name, shape, TensorSlice((0,) * len(shape), shape), value.detach())


def _describe_groups(optimizer: Any, names: Mapping[int, TensorShard]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        numbers = {
            key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key not in _OWN
        }
        weights = [names[id(leaf)].name for leaf in group["params"]]
        found.append({"weights": weights, "values": numbers})
    return found


def _find_group(packed: Mapping[str, Any], weights: list[str]) -> dict[str, Any]:
    """The values of the group that a weight of this one was in; else of any, where all agree."""
    groups: list[dict[str, Any]] = packed["groups"]
    mine = set(weights)
    for group in groups:
        if not mine.isdisjoint(group["weights"]):
            values = group["values"]
            break
    else:
        # Another stage's weights: what all groups have in common holds for these too.
        values = {
            key: value
            for key, value in (groups[0]["values"] if groups else {}).items()
            if all(group["values"].get(key) == value for group in groups)
        }
    # JSON knows no tuples; optimisers compare and unpack them.
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }


def _device(name: str, leaf: Tensor, group: Mapping[str, Any]) -> torch.device:
    # As torch has it: the count of steps stays on the CPU but for kernels that run on the device.
    is_step = name.rpartition("/")[2].partition(":")[0] == "step"
    on_device = not is_step or group.get("capturable") or group.get("fused")
    return leaf.device if on_device else torch.device("cpu")
