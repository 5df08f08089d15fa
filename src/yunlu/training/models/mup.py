"""One learning rate for all widths: the maximal-update parametrisation (µP) of our transformers.

In a wider model each step of Adam moves what a matrix answers by more, as more inputs move together. µP
makes up for it (Yang et al. 2022, arXiv 2203.03466, table 8): matrices between hidden layers learn at a
rate that falls with the width, the head's scores are divided by it, and attention divides by the width of
a head instead of its root. What was best for a narrow model then is so for a wide one.

Here the rate stays one for all weights. Adam does not feel the size of a weight's gradient, so a matrix
that is kept ``ratio`` times too large and whose input is divided by ``ratio`` moves as one with a
``ratio`` times smaller rate would (ibid., lemma J.1). Schedules, sharding, servers and checkpoints need
to know nothing of it, and AdamW's decay takes the same share of a weight at each width, as it should
(Wang and Aitchison 2024, arXiv 2405.13698). It holds for Adam and AdamW only.
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
    """What a model does other than one of its base width; nothing, by default."""

    ratio: float = 1.0
    """Its width, over the base's."""
    attention_scale: float | None = None
    """What attention multiplies its scores with; none: one over the root of a head's width."""

    @property
    def gain(self) -> float:
        """What the input of each matrix is multiplied with."""
        return 1 / self.ratio


STANDARD = WidthRule()


def find_width_rule(
    width: int, heads: int, *, mup_base: int | None, mup_heads: int | None
) -> WidthRule:
    """The rule for a model whose rate is meant for ``mup_base`` wide ones with ``mup_heads`` heads.

    Without heads of its own the base has as many as the model, and narrower ones.
    """
    if mup_base is None:
        if mup_heads is not None:
            raise ModelError(
                "model.args.mup_heads says how many heads the base has, but there is no base.",
                hint="set model.args.mup_base to its width, or remove mup_heads",
            )
        return STANDARD
    if mup_base < 1 or (mup_heads is not None and mup_heads < 1):
        raise ModelError(
            f"model.args: mup_base {mup_base} and mup_heads {mup_heads} must be at least 1."
        )
    head_width, base_head_width = width / heads, mup_base / (mup_heads or heads)
    # At the base's own sizes nothing is different, to the last bit.
    scale = None if head_width == base_head_width else base_head_width**0.5 / head_width
    return WidthRule(ratio=width / mup_base, attention_scale=scale)


class DampedNorm(nn.LayerNorm):
    """A norm with a gain, for all the matrices that read from it."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__(width)
        self.gain = gain

    def forward(self, input: Tensor) -> Tensor:
        """As a norm, times the gain."""
        return super().forward(input) * self.gain


def make_norm(width: int, rule: WidthRule) -> nn.LayerNorm:
    """The norm before matrices: torch's own where there is no gain."""
    return nn.LayerNorm(width) if rule.ratio == 1 else DampedNorm(width, rule.gain)


def damp(x: Tensor, rule: WidthRule) -> Tensor:
    """What a matrix reads that stands behind no norm."""
    return x if rule.ratio == 1 else x * rule.gain
