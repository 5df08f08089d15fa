"""Engine adapters for servers: an optimizer that pushes gradients, and batches by ticket."""

from __future__ import annotations

from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.training.data.batches import load
from yunlu.training.data.sample_order import sort_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from yunlu.training.communication.servers.client import ServerClient
    from yunlu.training.communication.servers.messages import Outcome
    from yunlu.training.communication.servers.rules import Ticket
    from yunlu.training.data.sample_order import SampleOrder
    from yunlu.training.tasks.task import Batch, Samples


class ServerOptimizer:
    """Optimizer whose step pushes the gradients to the servers.

    The servers hold the optimizer state; there is nothing to save here.
    """

    def __init__(self, client: ServerClient, weights: Sequence[Tensor]) -> None:
        self._client = client
        self.param_groups: list[dict[str, Any]] = [{"params": list(weights), "lr": 0.0}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.ticket: Ticket | None = None
        self.items = 0
        self.metrics: dict[str, float] = {}
        """Sent with the next gradient, then cleared."""
        self.outcome: Outcome = "taken"
        """Outcome of the last push."""
        self._began_at = 0.0

    def begin(self, ticket: Ticket, items: int, metrics: Mapping[str, float]) -> None:
        """The next gradients are the mean over these items."""
        self.ticket, self.items, self.metrics = ticket, items, dict(metrics)
        self._began_at = perf_counter()

    def step(self) -> None:
        """Push; the weights change at the next pull."""
        self._push(self.items)

    def skip_ticket(self) -> None:
        """End the ticket without a gradient."""
        self._push(0)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for weight in self.param_groups[0]["params"]:
            if set_to_none or weight.grad is None:
                weight.grad = None
            else:
                weight.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """In the format of torch's optimizers."""
        group = self.param_groups[0]
        numbers = list(range(len(group["params"])))
        return {"state": {}, "param_groups": [{**group, "params": numbers}]}

    def load_state_dict(self, packed: dict[str, Any]) -> None:
        """There is no state."""
        del packed

    def _push(self, items: int) -> None:
        assert self.ticket is not None, "a gradient without a ticket"
        lr = self.param_groups[0]["lr"]
        self.metrics |= {"compute_s": perf_counter() - self._began_at, "at": time()}
        self.outcome = self._client.push(self.ticket, lr=lr, items=items, metrics=self.metrics)
        self.ticket = None


def ticket_batches(
    client: ServerClient,
    samples: Samples,
    collate: Callable[[Sequence[Any]], Batch],
    order: SampleOrder,
    *,
    micro_batch: int,
    begin: Callable[[Ticket, int, Mapping[str, float]], None],
    held: Ticket | None = None,
    lengths: NDArray[np.integer] | None = None,
    digests: bool = False,
) -> Iterator[list[Batch]]:
    """Micro-batches of each ticket; the weights are pulled before.

    Args:
        client: Hands out the tickets.
        samples: See ``step_batches``, as for all others not described here.
        collate: See there.
        order: See there.
        micro_batch: See there.
        begin: Called with each ticket, its items and its metrics before its batches.
        held: A ticket taken before, to be done first.
        lengths: See there.
        digests: See there.
    """
    weights = None if lengths is None else sort_length(lengths)
    while True:
        started_at = perf_counter()
        ticket, held = held or client.take_ticket(), None
        if ticket is None:
            return
        taken_at = perf_counter()
        ticket_indices = _ticket_samples(order, ticket, client.rules.shares, weights)
        pieces = (
            ticket_indices[first : first + micro_batch]
            for first in range(0, len(ticket_indices), micro_batch)
        )
        micros = list(load(samples, collate, pieces, workers=0, digests=digests))
        items = sum(micro.items for micro in micros)
        if items == 0:  # more shares than samples, or no items
            client.push(ticket, lr=0.0, items=0, metrics=_count_batches(micros))
            continue
        fetched_at = perf_counter()
        client.pull()
        waited_s = taken_at - started_at + perf_counter() - fetched_at
        seconds = {"data_s": fetched_at - taken_at, "communication_s": waited_s}
        begin(ticket, items, _count_batches(micros) | seconds)
        yield micros


def _ticket_samples(
    order: SampleOrder, ticket: Ticket, shares: int, weights: NDArray[np.integer] | None
) -> NDArray[np.int64]:
    """Samples of a ticket, independent of the worker and of the micro-batch size."""
    indices = next(order.steps_from(ticket.step))
    if weights is not None:
        indices = indices[np.argsort(weights[indices], kind="stable")]
    return indices[ticket.share :: shares]  # shares of nearly equal length


def _count_batches(micros: Sequence[Batch]) -> dict[str, float]:
    # JSON numbers hold fewer than 64 bits in many readers.
    high, low = divmod(sum(micro.digest for micro in micros) % (1 << 64), 1 << 32)
    return {
        "items": sum(micro.items for micro in micros),
        "samples": sum(micro.samples for micro in micros),
        "tokens": sum(micro.tokens for micro in micros),
        "padding": sum(micro.padding for micro in micros),
        "digest_high": high,
        "digest_low": low,
    }
