"""Adam and AdamW with torch's fused kernel, called without torch's optimiser around it.

Same kernel, same results, bit for bit. Torch's wrapper takes up to a tenth of a small model's step, and
imports the compiler, which costs a second and 70 MB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_not
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


_kernels: Any = cast("Any", torch)
# Further keys of torch.optim.AdamW's groups: checkpoints are interchangeable.
_AS_TORCH: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
}


@dataclass(slots=True)
class _Lists:
    """The tensors of a group, as the kernel takes them."""

    weights: list[Tensor] = field(default_factory=list[Tensor])
    means: list[Tensor] = field(default_factory=list[Tensor])
    squares: list[Tensor] = field(default_factory=list[Tensor])
    steps: list[Tensor] = field(default_factory=list[Tensor])


class FusedAdam:
    """Adam with the interface of torch's optimisers; ``decoupled`` weight decay makes it AdamW."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,
    ) -> None:
        shared: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "decoupled_weight_decay": decoupled,
        }
        self.param_groups: list[dict[str, Any]] = [
            {**shared, **_AS_TORCH, **group} for group in groups
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._kernel: Callable[..., None] = (
            _kernels._fused_adamw_ if decoupled else _kernels._fused_adam_
        )
        self._lists = [_Lists() for _ in groups]

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient."""
        for number, group in enumerate(self.param_groups):
            present = [weight for weight in group["params"] if weight.grad is not None]
            if not present:
                continue
            lists = self._lists[number]
            # The set of weights with gradients hardly ever changes.
            if len(lists.weights) != len(present) or any(map(is_not, lists.weights, present)):
                lists = self._lists[number] = self._collect(present)
            _kernels._foreach_add_(lists.steps, 1)
            beta1, beta2 = group["betas"]
            self._kernel(
                lists.weights,
                [weight.grad for weight in present],
                lists.means,
                lists.squares,
                [],
                lists.steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if set_to_none or weight.grad is None:
                    weight.grad = None
                else:
                    weight.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """State in the format of torch's optimisers."""
        numbers = {weight: number for number, weight in enumerate(self._weights())}
        groups = [
            group | {"params": [numbers[weight] for weight in group["params"]]}
            for group in self.param_groups
        ]
        state = {numbers[weight]: dict(state) for weight, state in self.state.items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, packed: dict[str, Any]) -> None:
        """Restore the state of this or of torch's own optimiser."""
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != [len(group["params"]) for group in packed["param_groups"]]:
            raise ValueError("the parameter groups differ from those of this optimiser")
        weights = self._weights()
        for group, saved in zip(self.param_groups, packed["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.state = {
            weights[number]: {
                key: value.to(weights[number].device, copy=True) for key, value in state.items()
            }
            for number, state in packed["state"].items()
        }
        self._lists = [_Lists() for _ in self.param_groups]

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def _collect(self, weights: list[Tensor]) -> _Lists:
        lists = _Lists()
        for weight in weights:
            state = self.state.get(weight)
            if state is None:
                state = self.state[weight] = {
                    "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                    "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
                }
            lists.weights.append(weight)
            lists.means.append(state["exp_avg"])
            lists.squares.append(state["exp_avg_sq"])
            lists.steps.append(state["step"])
        return lists


_LEAST = 0.1
"""Floor of a weight's second moment, relative to the mean of its tensor.

One bit gives a gradient that is always zero the magnitude of its block: divided by its own second
moment, the update would be unbounded.
"""
_foreach: Any = cast("Any", torch)


class FrozenAdam(FusedAdam):
    """``FusedAdam`` whose second moment is constant between ``freeze()`` and ``thaw()``.

    For gradients compressed to one bit (Tang et al. 2021, 1-bit Adam): after compression all values of a
    block have the same magnitude, which destroys the second moment, and plain Adam learns worse. With a
    frozen second moment the update is momentum with a rate per weight, linear in the gradient, so that
    error feedback works.
    """

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
