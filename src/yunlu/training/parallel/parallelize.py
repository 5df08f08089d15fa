"""Partitioning of a model: how it can be split; then tensor parallelism, pipeline stages, FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from yunlu.core.errors import ModelError
from yunlu.planning.layouts import SplitConstraints
from yunlu.training.parallel.fsdp import (
    UsedWeights,
    find_blocks,
    reshard,
    set_sync,
    shard,
    why_not_shard,
)
from yunlu.training.parallel.pipeline import Pipeline
from yunlu.training.parallel.pipeline_stages import check, shared_names, split, why_not_split
from yunlu.training.parallel.tensor_parallel import (
    apply_tensor_parallel,
    sharded_loss,
    why_not_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.planning.layouts import Axis
    from yunlu.training.parallel.world import World
    from yunlu.training.tasks.task import Batch


__all__ = ["Pipeline", "UsedWeights", "parallelize", "reshard", "set_sync", "sharded_loss"]


def parallelize(
    model: nn.Module, world: World
) -> tuple[dict[int, nn.Module], dict[str, list[int]]]:
    """Reduce the model in place to this worker's part of it.

    Returns:
        Its stages by number, and the parameter names shared by several stages with their numbers.
    """
    layout = world.layout
    if layout.tp > 1:
        mesh = world.axis("tp")
        assert mesh is not None
        apply_tensor_parallel(model, mesh, sequence=layout.sequence, vocabulary=layout.vocabulary)
    stages: dict[int, nn.Module] = {0: model}
    shared: dict[str, list[int]] = {}
    if layout.pp > 1:
        every = split(model, layout.stages)
        shared = shared_names(every)
        stages = {
            number: stage
            for number, stage in enumerate(every)
            if number % layout.pp == world.coordinates.pp
        }
        _drop_other_stages(model, stages.values())
    if layout.fsdp > 1:
        mesh = world.axis("dp", "fsdp")
        assert mesh is not None
        for stage in stages.values():
            shard(stage, mesh, blocks=find_blocks(stage), device=world.device)
    return stages, shared


def _drop_other_stages(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Free the weights of other workers' stages, which the whole model would hold as long as it lives."""
    held = {id(weight) for stage in stages for weight in stage.parameters()}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in held:
                blank = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                module.register_parameter(name, nn.Parameter(blank, weight.requires_grad))


_MOST_WAYS = 64


def find_split_constraints(
    model: nn.Module, probe: Batch, *, state_bytes: float, activation_bytes_per_sample: float
) -> SplitConstraints:
    """Analyse a full model; ``probe`` checks that its stages together compute the same."""
    weights = list(model.parameters())
    why_not: dict[Axis, str] = {}
    ways = [size for size in range(2, _MOST_WAYS + 1) if why_not_tensor(model, size) is None]
    if not ways:
        why_not["tp"] = why_not_tensor(model, 2) or "it cannot be split"
    sharding = why_not_shard(model, 2)
    if sharding is not None:
        why_not["fsdp"] = sharding
    layers, pipelining = _count_layers(model, probe)
    if pipelining is not None:
        why_not["pp"] = pipelining
    return SplitConstraints(
        parameters=sum(weight.numel() for weight in weights),
        trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
        state_bytes=state_bytes,
        activation_bytes_per_sample=activation_bytes_per_sample,
        layers=layers,
        tensor_ways=(1, *ways),
        why_not=why_not,
        trained_tensors=sum(weight.requires_grad for weight in weights),
    )


def _count_layers(model: nn.Module, probe: Batch) -> tuple[int, str | None]:
    """Largest number of pipeline stages; 1 and the reason if it cannot be split."""
    reason = why_not_split(model, 2)
    if reason is None and any(isinstance(module, _BatchNorm) for module in model.modules()):
        reason = "batch normalisation needs the samples of all replicas at once"
    if reason is not None:
        return 1, reason
    most = 2
    while most < _MOST_WAYS and why_not_split(model, most + 1) is None:
        most += 1
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            check(model, split(model, most), probe.inputs)
    except ModelError as error:
        return 1, error.message
    finally:
        model.train(was_training)
    return most, None
