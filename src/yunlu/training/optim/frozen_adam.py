"""Adam with a frozen second moment, for gradients compressed to one bit (Tang et al. 2021, 1-bit Adam).

After compression all values of a block have the same magnitude, which destroys the second moment: plain
Adam on one-bit gradients learns worse. With a frozen second moment the update is momentum with a rate per
weight, linear in the gradient, so that error feedback works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch

from yunlu.training.optim.fused_adam import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_LEAST = 0.1
"""Floor of a weight's second moment, relative to the mean of its tensor.

One bit gives a gradient that is always zero the magnitude of its block: divided by its own second
moment, the update would be unbounded.
"""
_foreach: Any = cast("Any", torch)


class FrozenAdam(FusedAdam):
    """``FusedAdam`` whose second moment is constant between ``freeze()`` and ``thaw()``."""

    @property
    def is_frozen(self) -> bool:
        """Whether the second moment is frozen; part of the state in a checkpoint."""
        return any(group.get("frozen", False) for group in self.param_groups)

    @torch.no_grad()
    def freeze(self) -> None:
        """Freeze the second moment; once it is stable, after a tenth to a fifth of all steps."""
        self._correct(torch.Tensor.div_, frozen=True)
        for state in self.state.values():
            square = state["exp_avg_sq"]
            square.clamp_(min=float(square.mean()) * _LEAST**2)

    @torch.no_grad()
    def thaw(self) -> None:
        """Unfreeze the second moment."""
        self._correct(torch.Tensor.mul_, frozen=False)

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient."""
        if not self.is_frozen:
            super().step()
            return
        for group in self.param_groups:
            # A weight without a gradient so far has no second moment.
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
        _foreach._foreach_add_(steps, 1)
        gradients = [weight.grad for weight in weights]
        lr, decay, beta1 = group["lr"], group["weight_decay"], group["betas"][0]
        if decay and group["decoupled_weight_decay"]:
            _foreach._foreach_mul_(weights, 1 - lr * decay)
        elif decay:
            gradients = _foreach._foreach_add(gradients, weights, alpha=decay)
        _foreach._foreach_lerp_(means, gradients, 1 - beta1)
        sizes = _foreach._foreach_sqrt([state["exp_avg_sq"] for state in states])
        _foreach._foreach_add_(sizes, group["eps"])
        rates = [-lr / (1 - beta1 ** float(step)) for step in steps]
        _foreach._foreach_addcdiv_(weights, means, sizes, rates)

    def _correct(self, change: Callable[[Tensor, float], Tensor], *, frozen: bool) -> None:
        """Apply the bias correction to the second moment, or remove it."""
        for group in self.param_groups:
            if group.get("frozen", False) == frozen:
                continue
            group["frozen"] = frozen
            for weight in group["params"]:
                if weight in self.state:
                    state = self.state[weight]
                    correction = 1 - group["betas"][1] ** float(state["step"])
                    change(state["exp_avg_sq"], correction)


@runtime_checkable
class FreezableMoments(Protocol):
    """What an optimiser has whose traits say ``can_freeze``."""

    def freeze(self) -> None:
        """Freeze the second moment; frozen already, it stays so."""
        ...

    def thaw(self) -> None:
        """Unfreeze the second moment."""
        ...


def hold_moments(optimizer: object, *, held: bool) -> None:
    """Freeze or unfreeze the second moment, if the optimiser supports it."""
    if isinstance(optimizer, FreezableMoments):
        optimizer.freeze() if held else optimizer.thaw()
