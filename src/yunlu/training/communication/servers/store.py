"""Durable state of one server: its part of the weights, and on the first one the tickets."""

from __future__ import annotations

import secrets
import shutil
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import StoreError
from yunlu.core.files import append_lines, sync_directory
from yunlu.training.communication.codecs.registry import make_codec
from yunlu.training.communication.servers.dispatcher import Dispatcher
from yunlu.training.communication.servers.journal import ShardJournal, write_state
from yunlu.training.communication.servers.messages import ClaimTicket, CompleteTicket, Push
from yunlu.training.communication.servers.rules import ServerRules, shard_ranges
from yunlu.training.communication.servers.weights import HeldWeights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from typing_extensions import Buffer

    from yunlu.core.framing import Frame
    from yunlu.training.communication.servers.messages import Outcome
    from yunlu.training.communication.servers.rules import Ticket

_STATE_GROWTH = 4
"""Maximum log size, as a multiple of the state, before the state is written again."""


def prepare(directory: Path, rules: ServerRules, flat: Tensor, decayed: int) -> None:
    """Write the initial state of the servers: the directory appears complete, or not at all.

    Servers always continue from their directory; this is what they start from.

    Args:
        directory: Of all servers; private, since it contains the token.
        rules: Rules of the servers.
        flat: All weights, as ``FlatWeights`` reads them.
        decayed: Number of leading weights that decay.
    """
    aside = directory.with_name(f".{directory.name}.part")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(mode=0o700, parents=True)
    token = secrets.token_hex(32)
    for index, part in enumerate(shard_ranges(len(flat), rules.shards)):
        shard_path = shard_directory(aside, index)
        shard_path.mkdir(mode=0o700)
        ours = flat[part.start : part.stop].detach().float().cpu().contiguous()
        below = min(max(decayed - part.start, 0), len(part))
        description, tensors = HeldWeights(rules, ours, below).state()
        control: dict[str, Any] = {
            "rules": rules.model_dump(mode="json"),
            "token": token,
            "index": index,
            "length": len(flat),
            "weights": description,
            "log": "log-0",
        }
        write_state(shard_path, control, *[tensor.numpy().data for tensor in tensors])
    sync_directory(aside)
    aside.rename(directory)
    sync_directory(directory.parent)


def shard_directory(directory: Path, index: int) -> Path:
    """Directory of one server."""
    return directory / f"shard-{index}"


class Shard:
    """State of one server; every change is on disk before its method returns."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._journal = ShardJournal(directory)
        try:
            self._restore()
        except BaseException:
            self._journal.close()
            raise

    def _restore(self) -> None:
        frame = self._journal.read_state()
        self._fixed = {name: frame.control[name] for name in ("rules", "token", "index", "length")}
        self.rules = ServerRules.model_validate(self._fixed["rules"])
        self.index, self.length = int(self._fixed["index"]), int(self._fixed["length"])
        self.token = str(self._fixed["token"])
        self._journal.waits_for_disk = self.rules.sync
        self.dispatcher = Dispatcher(self.rules) if self.index == 0 else None
        ours = shard_ranges(self.length, self.rules.shards)[self.index]
        flat = torch.empty(len(ours))
        if len(flat):
            flat.numpy().data.cast("B")[:] = frame.body[: flat.nbytes]
        self._state_bytes = len(frame.body)
        self.weights = HeldWeights(self.rules, flat, frame.control["weights"]["decayed"])
        self.weights.restore(frame.control["weights"], frame.body)
        if self.dispatcher is not None and "tickets" in frame.control:
            self.dispatcher.restore(frame.control["tickets"])
        self._published: tuple[int, Tensor] | None = None
        self._before: tuple[int, Tensor] | None = None
        self._packed: tuple[int, Tensor] | None = None
        self._pull_codec = make_codec(self.rules.pull_codec, share=self.rules.codec_share)
        for change in self._journal.read_changes():
            self._repeat(change)

    def _repeat(self, change: Frame) -> None:
        match change.control["kind"]:
            case "push":
                push = Push.model_validate(change.control)
                self._take(push, self._gradient_of(push, change.body))
            case "claim":
                self._tickets().claim(ClaimTicket.model_validate(change.control).ticket)
            case "complete":
                self._tickets().complete("", CompleteTicket.model_validate(change.control).ticket)
            case kind:
                raise StoreError(f"{self.directory} holds a change of an unknown kind: {kind}")

    def _gradient_of(self, push: Push, body: memoryview) -> Tensor | None:
        if self.rules.correction == "delay" and push.items:
            return torch.frombuffer(body, dtype=torch.float32)  # already compensated
        return self.weights.unpack(push, body)

    def publish(self, version: int | None = None) -> tuple[int, Tensor]:
        """The current weights, or those before the last update, in a tensor that does not change.

        A step that one server completed and another did not, because a worker was lost between them, is
        repeated from the weights it started with.
        """
        if self._before is not None and self._before[0] == version:
            return self._before
        if self._published is None or self._published[0] != self.weights.version:
            self._published = (self.weights.version, self.weights.flat.clone())
        return self._published

    def pack(self, version: int, weights: Tensor) -> Tensor:
        """Published weights, encoded."""
        if self._packed is None or self._packed[0] != version:
            packed = torch.empty(self._pull_codec.size_bytes(len(weights)), dtype=torch.uint8)
            self._pull_codec.encode(weights, packed, seed=version)
            self._packed = (version, packed)
        return self._packed[1]

    def push(self, push: Push, body: Buffer, before: Tensor | None = None) -> Outcome:
        """Apply a gradient; ``before`` are the weights it was computed with, if known."""
        outcome = self.weights.check_ticket(push.ticket)
        if outcome != "taken":
            return outcome
        gradient = self.weights.unpack(push, body)
        payload = memoryview(body) if gradient is not None else memoryview(b"")
        if self.rules.correction == "delay" and gradient is not None:
            if before is not None:
                self.weights.compensate(gradient, before)
            payload = gradient.numpy().data
        self._compact()  # before, not after: all servers have completed the previous step
        self._journal.append(push.model_dump(mode="json"), payload)
        self._take(push, gradient)
        return outcome

    def _take(self, push: Push, gradient: Tensor | None) -> None:
        before = self.publish() if self.rules.mode == "bsp" else None
        self.weights.apply(push, gradient)
        if before is not None and before[0] != self.weights.version:
            self._before = before

    def claim(self, ticket: Ticket) -> bool:
        """Whether this ticket's gradient counts; if so, it is claimed."""
        if not self._tickets().may_claim(ticket):
            return False
        self._journal.append(ClaimTicket(ticket=ticket).model_dump(mode="json"))
        self._tickets().claim(ticket)
        return True

    def complete(self, worker: str, done: CompleteTicket) -> None:
        """All servers have the gradient of a ticket."""
        dispatcher = self._tickets()
        if done.ticket.number(self.rules) not in dispatcher.done:
            # Logged before it is durable: rather twice than never; readers deduplicate by ticket.
            description = {"step": done.ticket.step, "share": done.ticket.share, "worker": worker}
            append_lines(self.directory / "done.jsonl", [description | done.metrics])
            self._journal.append(CompleteTicket(ticket=done.ticket).model_dump(mode="json"))
        dispatcher.complete(worker, done.ticket)

    def save(self) -> None:
        """Write the state again."""
        description, tensors = self.weights.state()
        tickets = {} if self.dispatcher is None else {"tickets": self.dispatcher.state()}
        control = {**self._fixed, **tickets, "weights": description}
        self._journal.write_state(control, *[tensor.numpy().data for tensor in tensors])
        self._state_bytes = sum(tensor.nbytes for tensor in tensors)

    def close(self) -> None:
        """Close the files."""
        self._journal.close()

    def _compact(self) -> None:
        if not self.weights.is_between_steps:
            return
        enough = max(self.rules.log_bytes, _STATE_GROWTH * self._state_bytes)
        if self._journal.log_bytes > enough:
            self.save()

    def _tickets(self) -> Dispatcher:
        assert self.dispatcher is not None
        return self.dispatcher
