"""Which gradients travel together, and where in their bucket each lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.training.communication.powersgd import MatrixSlice, as_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor, nn

_ALIGNED_BYTES = 64


def _itself(weight: Tensor) -> Tensor:
    return weight


def split(
    weights: Sequence[nn.Parameter],
    bucket_bytes: int,
    *,
    local: Callable[[Tensor], Tensor] = _itself,
) -> list[list[nn.Parameter]]:
    """Weights of one kind together, the last ones first: their gradients come first.

    Args:
        weights: In the order in which the model uses them.
        bucket_bytes: Sent at a time; larger ones go alone.
        local: What lies here of a weight.
    """
    whole: list[tuple[int, list[nn.Parameter]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, list[nn.Parameter]]] = {}
    for position, weight in enumerate(reversed(weights)):
        here = local(weight)
        kind = (here.dtype, here.device)
        size, group = filling.pop(kind, (0, []))
        if group and size + here.nbytes > bucket_bytes:
            whole.append((position, group))
            size, group = 0, []
        filling[kind] = (size + here.nbytes, [*group, weight])
    rest = [(len(weights), group) for _, group in filling.values()]
    return [group for _, group in sorted([*whole, *rest], key=lambda item: item[0])]


def starts_of(
    group: Sequence[nn.Parameter], *, local: Callable[[Tensor], Tensor] = _itself
) -> tuple[list[int], int]:
    """Where each weight's gradient lies in its bucket, and where they end."""
    starts: list[int] = []
    end = 0
    for weight in group:
        starts.append(end)
        aligned = max(1, _ALIGNED_BYTES // weight.element_size())
        end += -(-local(weight).numel() // aligned) * aligned
    return starts, end


def matrices_of(weights: Sequence[nn.Parameter], bucket_bytes: int) -> dict[int, list[MatrixSlice]]:
    """Where in the buckets of these weights matrices lie."""
    found: dict[int, list[MatrixSlice]] = {}
    for number, group in enumerate(split(weights, bucket_bytes)):
        starts, _ = starts_of(group)
        every = [as_matrix(start, weight) for weight, start in zip(group, starts, strict=True)]
        found[number] = [matrix for matrix in every if matrix is not None]
    return found
