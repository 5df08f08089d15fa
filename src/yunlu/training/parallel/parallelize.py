"""Partitioning of a model: tensor parallelism, then pipeline stages, then FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.training.parallel.fsdp import UsedWeights, find_blocks, reshard, set_sync, shard
from yunlu.training.parallel.pipeline import Pipeline
from yunlu.training.parallel.pipeline_stages import shared_names, split
from yunlu.training.parallel.tensor_parallel import apply_tensor_parallel, sharded_loss

if TYPE_CHECKING:
    from torch import nn

    from yunlu.training.parallel.world import World

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
    if layout.fsdp > 1:
        mesh = world.axis("dp", "fsdp")
        assert mesh is not None
        for stage in stages.values():
            shard(stage, mesh, blocks=find_blocks(stage))
    return stages, shared
