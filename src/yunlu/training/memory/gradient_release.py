"""Each weight is updated as soon as its gradient is there, and the gradient freed at once.

The whole gradient never exists (Lv et al. 2023, section 3.1): memory holds the largest single one
instead of all. What needs them all together - accumulation, clipping by norm, skipping a bad step -
cannot be had with it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer


def release_gradients(
    model: nn.Module,
    optimizer_factory: Callable[[nn.Module], Optimizer],
    *,
    l1: float = 0.0,
    clip_value: float | None = None,
) -> ReleasingOptimizer:
    """Update the model's weights inside the backward pass, with the optimiser that is made for it.

    Args:
        model: Its trainable weights are watched from now on, until ``close``.
        optimizer_factory: Makes the ordinary optimiser over them.
        l1: Weight of the sum of absolute weights in the objective.
        clip_value: Largest absolute value of a component of the gradient.
    """
    return ReleasingOptimizer(optimizer_factory(model), l1=l1, clip_value=clip_value)


class ReleasingOptimizer:
    """An optimiser whose updates happen in the backward pass; ``step`` only ends the step.

    The rate of a step must stand in ``param_groups`` before its backward pass. What a checkpoint
    keeps is the ordinary optimiser's, so a run may change between the two.
    """

    def __init__(
        self, optimizer: Optimizer, *, l1: float = 0.0, clip_value: float | None = None
    ) -> None:
        self._optimizer = optimizer
        self._l1, self._clip_value = l1, clip_value
        self._norms: dict[int, Tensor] = {}
        # Some optimisers count steps in the group: all weights of a step must see the same count.
        self._advanced: dict[int, dict[str, Any]] = {}
        self._last_norm = torch.zeros(())
        self._hooks: list[Any] = []
        place = 0
        for number, group in enumerate(optimizer.param_groups):
            for weight in group["params"]:
                update = partial(self._update, place, number)
                self._hooks.append(weight.register_post_accumulate_grad_hook(update))
                place += 1

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The ordinary optimiser's."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:
        """The ordinary optimiser's."""
        return self._optimizer.state

    @property
    def norm(self) -> Tensor:
        """Norm of the gradient of the step under way, or of the one that ended last."""
        if not self._norms:
            return self._last_norm
        return torch.linalg.vector_norm(
            torch.stack([self._norms[place] for place in sorted(self._norms)])
        )

    def step(self) -> None:
        """End the step: each weight may be updated again."""
        self._last_norm = self.norm
        for number, group in self._advanced.items():
            self.param_groups[number].update(group)
        self._advanced.clear()
        self._norms.clear()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Gradients are gone already; those of weights it does not train are the caller's."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """What the ordinary optimiser would give."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what this or the ordinary optimiser gave."""
        self._optimizer.load_state_dict(state)

    def close(self) -> None:
        """Let go of the weights: gradients are kept again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def _update(self, place: int, number: int, weight: Tensor) -> None:
        gradient = weight.grad
        assert gradient is not None
        if place in self._norms:
            raise TrainingError(
                "A weight got a second gradient before the step ended, but the first is spent.",
                hint="train.gradient_release needs the whole batch in one backward pass.",
            )
        if self._l1:
            gradient.add_(weight.sign(), alpha=self._l1)
        self._norms[place] = torch.linalg.vector_norm(gradient)
        if self._clip_value is not None:
            gradient.clamp_(-self._clip_value, self._clip_value)
        self._step_alone(number, weight)
        weight.grad = None

    def _step_alone(self, number: int, weight: Tensor) -> None:
        groups = self._optimizer.param_groups
        whole = groups[number]
        alone = {**whole, "params": [weight]}
        self._optimizer.param_groups = [alone]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        del alone["params"]
        self._advanced[number] = {
            key: value for key, value in alone.items() if value is not whole.get(key)
        }
