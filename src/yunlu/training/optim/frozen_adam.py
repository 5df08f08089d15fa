"""Adam that stops to learn how large each weight's gradient is, for gradients of one bit.

After compression every number of a block has the same size, and the second moment would forget what it
knew: one bit with Adam as it is does not learn as well. Held still, what remains is momentum with a rate
for each weight, which is linear in the gradient: what one step left out the next one makes good (Tang et
al. 2021, 1-bit Adam).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from yunlu.training.optim.fused_adam import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_LEAST = 0.1
"""The least size that a weight's gradients are taken to have, relative to those of its tensor.

One bit gives a number that is always zero the size of the others in its block: divided by its own size,
that would be a step without end.
"""
_each: Any = cast("Any", torch)


class FrozenAdam(FusedAdam):
    """``FusedAdam`` until ``freeze()``; afterwards the second moment stays as it is, until ``thaw()``."""

    @property
    def is_frozen(self) -> bool:
        """Whether the second moment is held still; a checkpoint knows."""
        return any(group.get("frozen", False) for group in self.param_groups)

    @torch.no_grad()
    def freeze(self) -> None:
        """Hold the second moment; when it has settled: after a tenth to a fifth of all steps."""
        self._correct(torch.Tensor.div_, frozen=True)
        for state in self.state.values():
            square = state["exp_avg_sq"]
            square.clamp_(min=float(square.mean()) * _LEAST**2)

    @torch.no_grad()
    def thaw(self) -> None:
        """Let it learn again."""
        self._correct(torch.Tensor.mul_, frozen=False)

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient."""
        if not self.is_frozen:
            super().step()
            return
        for group in self.param_groups:
            # A weight that had no gradient until now has no second moment to go by.
            present = [
                weight
                for weight in group["params"]
                if weight.grad is not None and weight in self.state
            ]
            if present:
                self._step(group, present)

    def _step(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        states = [self.state[weight] for weight in weights]
        means = [state["exp_avg"] for state in states]
        steps = [state["step"] for state in states]
        _each._foreach_add_(steps, 1)
        gradients = [weight.grad for weight in weights]
        lr, decay, beta1 = group["lr"], group["weight_decay"], group["betas"][0]
        if decay and group["decoupled_weight_decay"]:
            _each._foreach_mul_(weights, 1 - lr * decay)
        elif decay:
            gradients = _each._foreach_add(gradients, weights, alpha=decay)
        _each._foreach_lerp_(means, gradients, 1 - beta1)
        sizes = _each._foreach_sqrt([state["exp_avg_sq"] for state in states])
        _each._foreach_add_(sizes, group["eps"])
        rates = [-lr / (1 - beta1 ** float(step)) for step in steps]
        _each._foreach_addcdiv_(weights, means, sizes, rates)

    def _correct(self, change: Callable[[Tensor, float], Tensor], *, frozen: bool) -> None:
        """Put the correction for a start at nothing into the second moment, or take it out."""
        for group in self.param_groups:
            if group.get("frozen", False) == frozen:
                continue
            group["frozen"] = frozen
            for weight in group["params"]:
                if weight in self.state:
                    state = self.state[weight]
                    correction = 1 - group["betas"][1] ** float(state["step"])
                    change(state["exp_avg_sq"], correction)


def hold_moments(optimizer: object, *, held: bool) -> None:
    """Freeze the second moment of an optimiser that can, or let it learn again."""
    if isinstance(optimizer, FrozenAdam):
        optimizer.freeze() if held else optimizer.thaw()
