"""One worker that holds the whole model: the arrangement of a run without others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from yunlu.training.tasks.task import Batch


class WrappedModel(Protocol):
    """What a worker holds of a model, and how a step runs there."""

    parts: list[nn.Module]
    """What lies here, with the whole model's names."""
    weights: list[nn.Parameter]
    """Those of them that are trained."""
    leaves: list[Tensor]
    """What the optimiser changes: the weights, or the parts of them that lie here."""
    optimized: list[Tensor]
    """Those of them that this worker's own optimiser changes."""
    copies: list[int]
    """How many workers hold the same of each weight."""
    is_watched: bool
    """Whether to look at what each replica brings to the step to come: see ``looked``."""

    @property
    def is_partitioned(self) -> bool:
        """Whether a worker holds less than the whole model."""
        ...

    @property
    def view(self) -> nn.Module:
        """The model to evaluate: all workers of a replica call it with the same inputs."""
        ...

    def step_context(self) -> AbstractContextManager[Any]:
        """Around forward and backward of a step."""
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

        ``forward`` is what every forward pass runs in.
        """
        ...

    def finish(self) -> None:
        """Wait until the gradients are those of all replicas, and lay them beside the leaves."""
        ...

    def gradient_squares(self) -> tuple[Tensor, ...]:
        """Three numbers to be summed over all workers, or none where replicas cannot be compared.

        After ``finish``: the square of what this worker brought to the gradients, our share of the
        square of their sum, and of our samples squared; zeros where the step was not watched.
        """
        ...

    @property
    def exchange_s(self) -> float:
        """What adding up gradients took in the last step, hidden or not."""
        ...

    def release_gathered(self) -> None:
        """Before weights are replaced: keep none that were gathered from others."""
        ...

    def publish(self) -> None:
        """After an update: bring what others updated here."""
        ...

    def drop_gradients(self) -> None:
        """Forget the gradients, also of weights that the optimiser here does not know."""
        ...

    def close(self) -> None:
        """Leave the weights without hooks."""
        ...


_NOTHING = nullcontext()


class SingleModel:
    """The model as it is."""

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
        """Nothing to be set around a step."""
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
        """The gradients are what they are."""

    def gradient_squares(self) -> tuple[Tensor, ...]:
        """There are no others."""
        return ()

    def release_gathered(self) -> None:
        """Nothing was gathered."""

    def publish(self) -> None:
        """Everything was updated here."""

    def drop_gradients(self) -> None:
        """The optimiser's weights are the model's."""

    def close(self) -> None:
        """Nothing was changed."""
