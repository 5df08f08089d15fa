"""Split constraints of a model: over which axes it can be split, and how far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from yunlu.core.errors import ModelError
from yunlu.planning.split_constraints import SplitConstraints
from yunlu.training.parallel.fsdp import why_not_shard
from yunlu.training.parallel.pipeline_stages import check, split, why_not_split
from yunlu.training.parallel.tensor_parallel import why_not_tensor

if TYPE_CHECKING:
    from torch import nn

    from yunlu.planning.split_constraints import Axis
    from yunlu.training.tasks.task import Batch

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
