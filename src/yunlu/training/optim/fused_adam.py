"""Adam and AdamW with torch's fused kernel, called without torch's optimiser around it.

Same kernel, same results, bit for bit. Torch's wrapper takes up to a tenth of a small model's step, and
imports the compiler, which costs a second and 70 MB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_not
from typing import TYPE_CHECKING, Any, cast

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
