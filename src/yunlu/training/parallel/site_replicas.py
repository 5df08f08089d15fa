"""A replicated model whose gradients are reduced over the workers of one site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.training.parallel.gradient_allreduce import GradientAllReduce
from yunlu.training.single_worker import SingleModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from yunlu.training.communication.allreducer import AllReducer
    from yunlu.training.tasks.task import Batch


class SiteReplicas(SingleModel):
    """A full model per worker; gradients are summed over the workers of a site."""

    def __init__(self, model: nn.Module, allreducer: AllReducer, *, bucket_bytes: int) -> None:
        super().__init__(model)
        self._allreduce = GradientAllReduce(self.weights, allreducer, bucket_bytes=bucket_bytes)

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: Callable[[nn.Module, Batch], Tensor],
        backward: Callable[[Tensor], None],
        *,
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Forward and backward; the reduction overlaps the last backward pass."""
        *before, last = micros
        total = None
        if before:
            total = super().accumulate(before, loss_of, backward, forward=forward)
        self._allreduce.arm()
        loss = super().accumulate([last], loss_of, backward, forward=forward)
        return loss if total is None else total + loss

    def finish(self) -> None:
        """Wait for the gradient reduction over the site."""
        self._allreduce.finish()
        self.exchange_s = self._allreduce.exchange_s

    def close(self) -> None:
        """Remove the hooks from the weights."""
        self._allreduce.close()
