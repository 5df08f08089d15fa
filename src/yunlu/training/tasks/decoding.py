"""Answers that a scorer can ask the model to continue.

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
    """The scores of a batch, and a way to let the model write on its own."""

    logits: Tensor
    write: Callable[..., Tensor]


@torch.no_grad()
def extend(
    scores_of: Callable[[Tensor], Tensor],
    prompts_BP: Tensor,
    *,
    count: int,
    length: int,
    fill: int,
) -> Tensor:
    """The likeliest next token, ``count`` times: ``(B, count)``.

    The window keeps its full ``length`` (later positions cannot be seen by earlier ones), so that
    a compiled model meets one shape.
    """
    start = prompts_BP.shape[1]
    window_BL = prompts_BP.new_full((len(prompts_BP), length), fill)
    window_BL[:, :start] = prompts_BP
    end = min(start + count, length)
    for place in range(start, end):
        window_BL[:, place] = scores_of(window_BL)[:, place - 1].argmax(dim=-1)
    return window_BL[:, start:end]


def unwrapped(model: nn.Module) -> Any:
    """The module inside a data-parallel wrapper."""
    return getattr(model, "module", model)
