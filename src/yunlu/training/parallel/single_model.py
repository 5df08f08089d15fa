"""The interface of a distributed model, and its implementation for one worker."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from yunlu.training.tasks.task import Batch


class WrappedModel(Protocol):
    """A worker's part of a model, and how a step runs on it."""

    parts: list[nn.Module]
    """Local modules, with parameter names of the full model."""
    weights: list[nn.Parameter]
    """Trainable weights of the local modules."""
    leaves: list[Tensor]
    """Tensors that the optimiser updates: the weights, or their local shards."""
    optimized: list[Tensor]
    """Leaves that this worker's optimiser updates."""
    copies: list[int]
    """Number of workers that hold the same shard of each weight."""
    is_watched: bool
    """Whether to measure each replica's gradient in the next step: see ``gradient_squares``."""

    @property
    def is_partitioned(self) -> bool:
        """Whether each worker holds only a part of the model."""
        ...

    @property
    def view(self) -> nn.Module:
        """The model to evaluate: all workers of a replica call it with the same inputs."""
        ...

    def step_context(self) -> AbstractContextManager[Any]:
        """Context of forward and backward of a step."""
        ...

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: Callable[[nn.Module, Batch], Tensor],
        backward: Callable[[Tensor], None],
        *,
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Forward and backward over the micro-batches; the sum of this worker's losses.

        ``forward``: context of every forward pass.
        """
        ...

    def finish(self) -> None:
        """Wait for the gradient reduction over all replicas, and assign the gradients to the leaves."""
        ...

    def gradient_squares(self) -> tuple[Tensor, ...]:
        """Three numbers to be summed over all workers; empty if replicas cannot be compared.

        After ``finish``: the square of this worker's gradient, its share of the square of the sum,
        and of its squared number of samples; zeros if the step was not watched.
        """
        ...

    @property
    def exchange_s(self) -> float:
        """Seconds of the gradient reduction in the last step, overlapped or not."""
        ...

    def release_gathered(self) -> None:
        """Drop gathered weights, before weights are replaced."""
        ...

    def publish(self) -> None:
        """After an update: receive the weights that other workers updated."""
        ...

    def drop_gradients(self) -> None:
        """Clear all gradients, also of weights that other workers update."""
        ...

    def close(self) -> None:
        """Remove the hooks from the weights."""
        ...


_NOTHING = nullcontext()


class SingleModel:
    """The unchanged model on a single worker."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = [model]
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.leaves: list[Tensor] = list(self.weights)
        self.optimized = self.leaves
        self.copies = [1] * len(self.weights)
        self.is_partitioned = self.is_watched = False
        self.exchange_s = 0.0
        self.view = model

    def step_context(self) -> AbstractContextManager[Any]:
        """No context needed."""
        return _NOTHING

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: Callable[[nn.Module, Batch], Tensor],
        backward: Callable[[Tensor], None],
        *,
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Forward and backward over the micro-batches; the sum of their losses."""
        total: Tensor | None = None
        for micro in micros:
            with forward():
                loss = loss_of(self.view, micro)
            backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def finish(self) -> None:
        """No reduction needed."""

    def gradient_squares(self) -> tuple[Tensor, ...]:
        """Empty: there are no other workers."""
        return ()

    def release_gathered(self) -> None:
        """Nothing was gathered."""

    def publish(self) -> None:
        """All weights were updated here."""

    def drop_gradients(self) -> None:
        """The optimiser clears all gradients."""

    def close(self) -> None:
        """Nothing was changed."""
