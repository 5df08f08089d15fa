"""Client of the servers: take a ticket, pull the weights, push the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yunlu.core.errors import ModelError, TrainingError
from yunlu.training.communication.codecs.codec import IdentityCodec, make_codec
from yunlu.training.communication.error_feedback import ErrorFeedback
from yunlu.training.communication.servers.messages import (
    ClaimTicket,
    CompleteTicket,
    PauseServer,
    Pull,
    Push,
    ResumeServer,
    StopServer,
    TakeTicket,
    finite,
)
from yunlu.training.communication.servers.rules import shard_ranges
from yunlu.training.communication.servers.server_link import ServerLink
from yunlu.training.communication.servers.weights import FlatWeights, is_finite
from yunlu.training.communication.transport import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from yunlu.training.communication.servers.messages import Outcome
    from yunlu.training.communication.servers.rules import ServerRules, Ticket

_PATIENCE_S = 120.0
_MARGIN_BYTES = 1 << 16
"""An encoding of a few values may be longer than the values."""


class ServerClient:
    """Connections of one worker to all servers; used by one thread, except for ``abort``.

    Args:
        directory: Of all servers, with their addresses.
        weights: Trained weights, in the same order on all workers.
        worker: Unique name of this worker.
        patience_s: Time that a server may be down.
    """

    def __init__(
        self,
        directory: Path,
        weights: Sequence[Tensor],
        *,
        worker: str,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.traffic = Traffic()
        self._flat = FlatWeights(weights)
        self._held: list[Ticket] = []
        self._feedback = ErrorFeedback()

        def connect(index: int) -> ServerLink:
            return ServerLink(
                directory, index, worker, lambda: self._held, self.traffic, patience_s=patience_s
            )

        first = connect(0)
        welcome = first.welcome()
        if welcome.rules is None:
            first.close()
            raise TrainingError("A parameter server sent no rules in its welcome.")
        self.rules: ServerRules = welcome.rules
        if welcome.length != self._flat.length:
            first.close()
            raise ModelError(
                f"The servers hold {welcome.length} weights, the model has {self._flat.length}.",
                hint="All workers of a run train the same model.",
            )
        self._shard_ranges = shard_ranges(welcome.length, self.rules.shards)
        self._links = [first, *(connect(index) for index in range(1, self.rules.shards))]
        for link, part in zip(self._links, self._shard_ranges, strict=True):
            link.expect(4 * len(part) + _MARGIN_BYTES)
        self._codec = make_codec(self.rules.codec, share=self.rules.codec_share)
        self._pull_codec = make_codec(self.rules.pull_codec, share=self.rules.codec_share)
        self.versions = [0] * self.rules.shards
        """Updates in each server's weights at the last pull."""
        self.staleness = 0
        """Updates by other workers that the last gradient missed; maximum over the servers."""
        self._reported_bytes = 0

    def take_ticket(self) -> Ticket | None:
        """Next ticket, when there is one; None when training is over."""
        ticket = self._links[0].call(TakeTicket(), waits=True).ticket
        if ticket is not None:
            self._held.append(ticket)
        return ticket

    def pull(self) -> None:
        """Set the weights to those for the last ticket.

        In mode ``bsp`` these are the weights at the start of its step. Otherwise they are the current
        ones; updates by others may be in one shard and not yet in another.
        """
        version = None
        if self.rules.mode == "bsp" and self._held:
            version = self._held[-1].step - self.rules.first_step
        self._flat.write(self._fetch(Pull(version=version)))

    def push(
        self,
        ticket: Ticket,
        *,
        lr: float,
        items: int,
        metrics: Mapping[str, float] | None = None,
    ) -> Outcome:
        """Push the gradients of the weights; they are durable when this returns.

        Args:
            ticket: The ticket of the gradients.
            lr: Learning rate of its step.
            items: Number of items the gradients are the mean of; 0 ends the ticket without a gradient.
            metrics: Written with the ticket to the first server's ``done.jsonl``.

        Returns:
            ``taken``; ``duplicate`` if another worker got the ticket meanwhile and was
            faster; ``late`` if the step ended without it.
        """
        first = self._links[0]
        if self.rules.backups:
            outcome = first.call(ClaimTicket(ticket=ticket)).outcome
            if outcome == "late":
                self._held.remove(ticket)
                return outcome
        outcome = self._push_parts(ticket, lr, items)
        sent_bytes = self.traffic.sent_bytes - self._reported_bytes
        self._reported_bytes += sent_bytes
        ours: dict[str, float] = {"staleness": self.staleness, "sent_bytes": sent_bytes}
        error = self.compression_error() if items else None
        if error is not None:
            ours["compression_error"] = error
        first.call(CompleteTicket(ticket=ticket, metrics=finite({**ours, **(metrics or {})})))
        self._held.remove(ticket)
        return outcome

    def snapshot(self, on_drained: Callable[[], object] | None = None) -> Tensor | None:
        """All weights with the same tickets applied in every shard: no ticket is handed out meanwhile.

        None if a ticket of a lost worker must be done first and no other worker is left: take it, and
        ask again. ``set_weights`` sets a model to the result. ``on_drained`` is called while nothing is
        in progress, perhaps more than once.
        """
        first = self._links[0]
        while True:
            is_drained = first.call(PauseServer(), waits=True).is_drained
            before = first.connections
            weights = self._fetch(Pull(is_packed=False)) if is_drained else None
            if is_drained and on_drained is not None:
                on_drained()
            first.call(ResumeServer())
            if weights is None or first.connections == before:
                return weights

    def set_weights(self, weights: Tensor) -> None:
        """Set the weights."""
        self._flat.write(weights)

    def stop(self) -> None:
        """End training after the tickets in progress."""
        self._links[0].call(StopServer())

    def compression_error(self) -> float | None:
        """Relative compression error of the last gradient; None without a codec."""
        return self._feedback.error()

    def abort(self) -> None:
        """Abort all current and later waits; from any thread."""
        for link in self._links:
            link.abort()

    def close(self) -> None:
        """Close the connections; tickets not pushed go to other workers."""
        for link in self._links:
            link.close()

    def _fetch(self, request: Pull) -> Tensor:
        pending_requests = [link.send(request) for link in self._links]
        flat = torch.empty(self._flat.length)
        for index, (link, part) in enumerate(zip(self._links, self._shard_ranges, strict=True)):
            received = link.receive(pending_requests[index])
            self.versions[index] = received.reply.version
            if len(part):
                data = torch.frombuffer(received.beside, dtype=torch.uint8)
                codec = self._pull_codec if request.is_packed else IdentityCodec()
                codec.decode(data, flat[part.start : part.stop])
        return flat

    def _push_parts(self, ticket: Ticket, lr: float, items: int) -> Outcome:
        flat = self._flat.read_gradients() if items else torch.empty(0)
        if not is_finite(flat):
            raise TrainingError(
                f"The gradient of step {ticket.step + 1} is not finite.",
                hint="Push it without items: the ticket then ends without a gradient.",
            )
        packed = [
            self._pack(flat, index, ticket) if items else None
            for index in range(len(self._shard_ranges))
        ]
        requests = [
            Push(ticket=ticket, lr=lr, items=items, version=version) for version in self.versions
        ]
        pending_requests = [
            link.send(request, b"" if data is None else data[0].numpy().data)
            for link, request, data in zip(self._links, requests, packed, strict=True)
        ]
        outcomes: list[Outcome] = []
        self.staleness = 0
        for index, link in enumerate(self._links):
            received = link.receive(pending_requests[index])
            outcomes.append(received.reply.outcome)
            if outcomes[-1] == "taken" and items and self.rules.mode != "bsp":
                missed_updates = received.reply.version - 1 - self.versions[index]
                self.staleness = max(self.staleness, missed_updates)
            data = packed[index]
            # A gradient replaced by another worker's was not sent: keep the previous residual.
            is_sent = received.reply.outcome == "taken" or received.is_repeated
            if is_sent and data is not None and data[1] is not None:
                self._feedback.store_residual(str(index), data[1])
        return "taken" if "taken" in outcomes else outcomes[0]

    def _pack(self, flat: Tensor, index: int, ticket: Ticket) -> tuple[Tensor, Tensor | None]:
        """Encoded gradient of one shard, and its residual."""
        part = self._shard_ranges[index]
        values = flat[part.start : part.stop]
        if self.rules.codec == "none":
            return values.view(torch.uint8), None
        packed = torch.empty(self._codec.size_bytes(len(part)), dtype=torch.uint8)
        self._feedback.add_to(str(index), values)
        self._codec.encode(values, packed, seed=ticket.number(self.rules))
        decoded = torch.empty(len(part))
        self._codec.decode(packed, decoded)
        return packed, torch.sub(values, decoded, out=decoded)
