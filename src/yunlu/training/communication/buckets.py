"""Gradient buckets: which gradients are sent together, and their offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.training.communication.powersgd import MatrixSlice, as_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor, nn

_ALIGNED_BYTES = 64


def _identity(weight: Tensor) -> Tensor:
    return weight


def split_buckets(
    weights: Sequence[nn.Parameter],
    bucket_bytes: int,
    *,
    local: Callable[[Tensor], Tensor] = _identity,
) -> list[list[nn.Parameter]]:
    """Weights of one dtype and device together, in reverse order: their gradients are ready first.

    Args:
        weights: In the order in which the model uses them.
        bucket_bytes: Bytes per bucket; larger gradients have their own.
        local: The local part of a weight.
    """
    full: list[tuple[int, list[nn.Parameter]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, list[nn.Parameter]]] = {}
    for position, weight in enumerate(reversed(weights)):
        here = local(weight)
        kind = (here.dtype, here.device)
        size, group = filling.pop(kind, (0, []))
        if group and size + here.nbytes > bucket_bytes:
            full.append((position, group))
            size, group = 0, []
        filling[kind] = (size + here.nbytes, [*group, weight])
    partial = [(len(weights), group) for _, group in filling.values()]
    return [group for _, group in sorted([*full, *partial], key=lambda item: item[0])]


def starts_of(
    group: Sequence[nn.Parameter], *, local: Callable[[Tensor], Tensor] = _identity
) -> tuple[list[int], int]:
    """Offset of each weight's gradient in its bucket, and the end."""
    starts: list[int] = []
    end = 0
    for weight in group:
        starts.append(end)
        aligned = max(1, _ALIGNED_BYTES // weight.element_size())
        end += -(-local(weight).numel() // aligned) * aligned
    return starts, end


def matrices_of(weights: Sequence[nn.Parameter], bucket_bytes: int) -> dict[int, list[MatrixSlice]]:
    """Matrices in the buckets of these weights."""
    matrices: dict[int, list[MatrixSlice]] = {}
    for number, group in enumerate(split_buckets(weights, bucket_bytes)):
        starts, _ = starts_of(group)
        candidates = [as_matrix(start, weight) for weight, start in zip(group, starts, strict=True)]
        matrices[number] = [matrix for matrix in candidates if matrix is not None]
    return matrices
