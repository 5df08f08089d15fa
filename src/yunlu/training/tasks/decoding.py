"""Greedy decoding for scorers.

Shapes: B batch, P prompt, L length of the window.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GenerativeOutputs:
    """Logits of a batch, and a function that generates text."""

    logits: Tensor
    generate: Callable[..., Tensor]


@torch.no_grad()
def extend(
    logits_for: Callable[[Tensor], Tensor],
    prompts_BP: Tensor,
    *,
    count: int,
    length: int,
    fill: int,
) -> Tensor:
    """Greedy decoding of ``count`` tokens: ``(B, count)``.

    The window keeps its full ``length`` (causal models ignore later positions), so that
    a compiled model sees only one shape.
    """
    start = prompts_BP.shape[1]
    window_BL = prompts_BP.new_full((len(prompts_BP), length), fill)
    window_BL[:, :start] = prompts_BP
    end = min(start + count, length)
    for position in range(start, end):
        window_BL[:, position] = logits_for(window_BL)[:, position - 1].argmax(dim=-1)
    return window_BL[:, start:end]


def unwrapped(model: nn.Module) -> Any:
    """The module inside a data-parallel wrapper."""
    return getattr(model, "module", model)
