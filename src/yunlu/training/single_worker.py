"""What one worker has in place of a worker group: its world, its communication, its model.

The interfaces of the three, too: with several workers the engine uses ``parallel/world.py``,
``communication/engine_communication.py`` and ``parallel/parallel_model.py`` instead, which one worker
does not even import.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from yunlu.planning.layouts import Layout, RankCoordinates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from yunlu.training.batch_schedule import BatchSchedule
    from yunlu.training.tasks.task import Batch

    LossOf = Callable[[nn.Module, Batch], Tensor]
    Backward = Callable[[Tensor], None]
    ForwardContext = Callable[[], AbstractContextManager[Any]]

StepRequest = Literal["", "relink", "pause", "finish", "stop", "serve"]
"""``relink``: measure the links again. ``finish``: a callback wants no further step. ``serve``: switch to
asynchronous training; every worker has chosen it, so it is never sent."""
BUCKET_BYTES = 25 << 20
DIGESTS = 1 << 64
"""Digests are summed modulo this."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals of one step over all workers."""

    items: int
    tokens: int
    padding: int
    samples: int = 0
    digest: int = 0
    """Order-independent digest of the samples used."""
    request: StepRequest = ""
    """Strongest request of any worker; all workers then stop before the same step."""


def total_of(micros: Sequence[Batch], request: StepRequest = "") -> StepTotals:
    """Totals of this worker's micro-batches."""
    items = tokens = padding = samples = digest = 0
    for micro in micros:
        items += micro.items
        tokens += micro.tokens
        padding += micro.padding
        samples += micro.samples
        digest += micro.digest
    return StepTotals(items, tokens, padding, samples, digest % DIGESTS, request)


@dataclass(kw_only=True)
class SingleWorld:
    """One worker; ``World`` adds others."""

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    device: torch.device

    @property
    def coordinates(self) -> RankCoordinates:
        """Coordinates of this worker in the layout."""
        return self.layout.place_of(self.rank)

    @property
    def replica(self) -> int:
        """Index of this worker's replica."""
        return self.layout.replica_of(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether this worker has rank 0."""
        return self.rank == 0

    def sum_over_all(self, numbers: Tensor) -> Tensor:
        """Sum over all workers, in place."""
        return numbers

    def check_connected(self) -> None:
        """There is nobody to be cut off from."""

    def broadcast_numbers(self, *numbers: float) -> list[float]:
        """Broadcast the leader's numbers; all workers pass the same count."""
        # On the host, whatever the device: nobody waits for what the device still computes.
        values = torch.tensor(numbers, dtype=torch.float64)
        return self.sum_over_all(values if self.is_leader else torch.zeros_like(values)).tolist()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average these tensors over all workers, in place."""


class SingleCommunication:
    """No communication: every step is made alone."""

    is_local_update = holds_moments = has_own_moments = is_excluded = False
    is_stepping_alone = True
    allreducer = None
    bucket_bytes = BUCKET_BYTES
    excluded = ()

    def __init__(self, schedule: BatchSchedule) -> None:
        self._schedule = schedule

    @property
    def communicator(self) -> SingleCommunication:
        """Itself: there is no method to choose."""
        return self

    def begin(self, step: int) -> None:
        """No state to initialise."""

    def sync_step(
        self,
        micros: Sequence[Batch],
        request: StepRequest,
        step: int,  # noqa: ARG002
    ) -> tuple[StepTotals, bool]:
        """Totals of this worker."""
        return total_of(micros, request), False

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Unchanged."""
        return loss

    def record_exchange(self, exchange_s: float) -> None:
        """Nothing is exchanged."""

    def end_compute(self, begun_at: float) -> None:
        """Nobody compares workers."""

    def record_compute(self, seconds: float) -> None:
        """Nobody compares workers."""

    def batch_of(self, step: int) -> int:
        """Number of samples in the gradient of this step, counted from 0."""
        return self._schedule.order.size_of(step)

    def after_update(self, step: int) -> None:
        """Nothing to exchange."""

    def after_discarded(self, step: int) -> None:
        """Nothing to undo."""

    def synchronize(self) -> bool:
        """The weights are always current."""
        return False

    def abandon(self) -> None:
        """The weights are those before the step."""

    def metrics(self) -> dict[str, float | None]:
        """Nothing was sent."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Residuals of previous workers are dropped: nothing is compressed any more."""

    def close(self) -> None:
        """Nothing is open."""


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
        loss_of: LossOf,
        backward: Backward,
        *,
        forward: ForwardContext,
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
        loss_of: LossOf,
        backward: Backward,
        *,
        forward: ForwardContext,
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
