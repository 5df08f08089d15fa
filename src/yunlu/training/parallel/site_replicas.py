"""A whole model whose gradients are summed with some of the other workers: those of one site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.training.parallel.gradient_allreduce import GradientAllReduce
from yunlu.training.parallel.single_model import SingleModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from yunlu.training.communication.allreducer import AllReducer
    from yunlu.training.tasks.task import Batch


class SiteReplicas(SingleModel):
    """The model as it is, and the gradients of all who make this step."""

    def __init__(self, model: nn.Module, allreducer: AllReducer, *, bucket_bytes: int) -> None:
        super().__init__(model)
        self._sum = GradientAllReduce(self.weights, allreducer, bucket_bytes=bucket_bytes)

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: Callable[[nn.Module, Batch], Tensor],
        backward: Callable[[Tensor], None],
        *,
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """As alone; gradients travel while the last backward pass runs."""
        *before, last = micros
        total = None
        if before:
            total = super().accumulate(before, loss_of, backward, forward=forward)
        self._sum.arm()
        loss = super().accumulate([last], loss_of, backward, forward=forward)
        return loss if total is None else total + loss

    def finish(self) -> None:
        """Wait until the gradients are those of all mates."""
        self._sum.finish()
        self.exchange_s = self._sum.exchange_s

    def close(self) -> None:
        """Leave the weights without hooks."""
        self._sum.close()
