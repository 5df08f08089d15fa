"""Gradient release: each weight is updated, and its gradient freed, inside the backward pass.

The full gradient never exists (Lv et al. 2023, section 3.1): memory holds the largest single gradient
instead of all. Accumulation, clipping by norm and skipping a bad step need all gradients together, and
are not available.
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
    """Update the model's weights inside the backward pass.

    Args:
        model: Hooks are added to its trainable weights, until ``close``.
        optimizer_factory: Builds the ordinary optimiser over them.
        l1: Weight of the sum of absolute weights in the objective.
        clip_value: Largest absolute value of a component of the gradient.
    """
    return ReleasingOptimizer(optimizer_factory(model), l1=l1, clip_value=clip_value)


class ReleasingOptimizer:
    """Optimiser that updates in the backward pass; ``step`` only ends the step.

    The learning rate must be set in ``param_groups`` before the backward pass. The state in a
    checkpoint is the ordinary optimiser's, so a run may switch between the two.
    """

    def __init__(
        self, optimizer: Optimizer, *, l1: float = 0.0, clip_value: float | None = None
    ) -> None:
        self._optimizer = optimizer
        self._l1, self._clip_value = l1, clip_value
        self._norms: dict[int, Tensor] = {}
        # Some optimisers count steps in the group: all weights of a step must see the same count.
        self._advanced: dict[int, dict[str, Any]] = {}
        self._last_norm = torch.zeros((), device=optimizer.param_groups[0]["params"][0].device)
        self._hooks: list[Any] = []
        index = 0
        for number, group in enumerate(optimizer.param_groups):
            for weight in group["params"]:
                update = partial(self._update, index, number)
                self._hooks.append(weight.register_post_accumulate_grad_hook(update))
                index += 1

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
        """Gradient norm of the current step, or of the last one."""
        if not self._norms:
            return self._last_norm
        return torch.linalg.vector_norm(
            torch.stack([self._norms[index] for index in sorted(self._norms)])
        )

    def step(self) -> None:
        """End the step: each weight may be updated again."""
        self._last_norm = self.norm
        for number, group in self._advanced.items():
            self.param_groups[number].update(group)
        self._advanced.clear()
        self._norms.clear()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clear gradients that remain."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State of the ordinary optimiser."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of this or the ordinary optimiser."""
        self._optimizer.load_state_dict(state)

    def close(self) -> None:
        """Remove the hooks from the weights."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def _update(self, index: int, number: int, weight: Tensor) -> None:
        gradient = weight.grad
        assert gradient is not None
        if index in self._norms:
            raise TrainingError(
                "A weight got a second gradient before the step ended, but the first was already applied.",
                hint="train.gradient_release needs the whole batch in one backward pass.",
            )
        if self._l1:
            gradient.add_(weight.sign(), alpha=self._l1)
        self._norms[index] = torch.linalg.vector_norm(gradient)
        if self._clip_value is not None:
            gradient.clamp_(-self._clip_value, self._clip_value)
        self._step_alone(number, weight)
        weight.grad = None

    def _step_alone(self, number: int, weight: Tensor) -> None:
        groups = self._optimizer.param_groups
        group = groups[number]
        alone = {**group, "params": [weight]}
        self._optimizer.param_groups = [alone]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        del alone["params"]
        self._advanced[number] = {
            key: value for key, value in alone.items() if value is not group.get(key)
        }
