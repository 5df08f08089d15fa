"""Maximal-update parametrisation (µP) of the built-in transformers: one learning rate for all widths.

In a wider model each step of Adam changes the output of a matrix more, since more inputs change together.
µP compensates (Yang et al. 2022, arXiv 2203.03466, table 8): the learning rate of matrices between hidden
layers falls with the width, the logits are divided by it, and attention divides by the width of a head
instead of its root. Hyperparameters tuned on a narrow model then transfer to a wide one.

Here all weights keep one learning rate. Adam is invariant to the scale of a gradient, so a matrix that is
``ratio`` times larger and whose input is divided by ``ratio`` behaves as with a ``ratio`` times smaller
rate (ibid., lemma J.1). Schedules, sharding, servers and checkpoints are not affected, and AdamW's decay
takes the same share of a weight at each width (Wang and Aitchison 2024, arXiv 2405.13698). Valid for Adam
and AdamW only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from yunlu.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthRule:
    """Scaling relative to the base width; none by default."""

    ratio: float = 1.0
    """Width over the base width."""
    attention_scale: float | None = None
    """Scale of attention scores; None for one over the root of the head width."""

    @property
    def gain(self) -> float:
        """Factor on the input of each matrix."""
        return 1 / self.ratio


STANDARD = WidthRule()


def find_width_rule(
    width: int, heads: int, *, mup_base: int | None, mup_heads: int | None
) -> WidthRule:
    """The scaling of a model tuned at width ``mup_base`` with ``mup_heads`` heads.

    Without ``mup_heads`` the base has as many heads as the model.
    """
    if mup_base is None:
        if mup_heads is not None:
            raise ModelError(
                "model.args.mup_heads is the number of heads of the base, but there is no base.",
                hint="set model.args.mup_base to its width, or remove mup_heads",
            )
        return STANDARD
    if mup_base < 1 or (mup_heads is not None and mup_heads < 1):
        raise ModelError(
            f"model.args: mup_base {mup_base} and mup_heads {mup_heads} must be at least 1."
        )
    head_width, base_head_width = width / heads, mup_base / (mup_heads or heads)
    # At the base's own sizes the model is bit-equal.
    scale = None if head_width == base_head_width else base_head_width**0.5 / head_width
    return WidthRule(ratio=width / mup_base, attention_scale=scale)


class ScaledNorm(nn.LayerNorm):
    """A layer norm with a fixed gain."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__(width)
        self.gain = gain

    def forward(self, input: Tensor) -> Tensor:
        """Normalise, times the gain."""
        return super().forward(input) * self.gain


def make_norm(width: int, rule: WidthRule) -> nn.LayerNorm:
    """The norm before matrices: torch's own without a gain."""
    return nn.LayerNorm(width) if rule.ratio == 1 else ScaledNorm(width, rule.gain)


def scale_input(x: Tensor, rule: WidthRule) -> Tensor:
    """Scale the input of a matrix that has no norm before it."""
    return x if rule.ratio == 1 else x * rule.gain
