"""Durable state of one server: its part of the weights, and on the first one the tickets.

A change is logged before it is acknowledged. From time to time the state is written
again and renamed into place; it names its log, so that state and log always match.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import CheckpointError, StoreError
from yunlu.core.files import append_lines, sync_directory
from yunlu.core.framing import FrameError, FrameReader, encode_frame
from yunlu.core.secure_link import drop_sent
from yunlu.core.value import Value
from yunlu.training.communication.codecs.codec import make_codec
from yunlu.training.communication.servers.dispatcher import Dispatcher
from yunlu.training.communication.servers.messages import ClaimTicket, CompleteTicket, Push
from yunlu.training.communication.servers.rules import ServerRules, shard_ranges
from yunlu.training.communication.servers.weights import HeldWeights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from typing_extensions import Buffer

    from yunlu.core.framing import Frame
    from yunlu.training.communication.servers.messages import Outcome
    from yunlu.training.communication.servers.rules import Ticket


_STATE = "state"
_ANY_BYTES = 1 << 62


class ShardJournal:
    """Files of one shard; open in one process at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log_bytes = 0
        self.waits_for_disk = False
        """Whether changes are synced to disk, to survive a power failure."""
        self._log = -1
        self._name = ""
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StoreError(
                f"another process serves {directory}",
                hint="end it first; it may be suspended",
            ) from error

    def read_state(self) -> Frame:
        """The last state written."""
        try:
            frame = next(self._frames(_STATE, is_complete=True))
        except (FileNotFoundError, StopIteration) as error:
            raise CheckpointError(
                f"{self.directory} contains no server state",
                hint="start a new run, or restore the directory",
            ) from error
        self._name = str(frame.control["log"])
        return frame

    def read_changes(self) -> Iterator[Frame]:
        """Changes since the last state; then the log is open for more. An incomplete record at its end is dropped."""
        path = self.directory / self._name
        path.touch(mode=0o600)
        yield from self._frames(self._name, is_complete=False)
        self._log = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._log, self.log_bytes)
        for other in self.directory.glob("log-*"):
            if other != path:
                other.unlink()  # belongs to a state that was replaced or never published

    def append(self, control: Mapping[str, Any], body: Buffer = b"") -> None:
        """Append a change; durable when this returns."""
        pieces = encode_frame(control, body)
        total = sum(len(piece) for piece in pieces)
        try:
            _write(self._log, pieces)
            if self.waits_for_disk:
                os.fdatasync(self._log)
        except OSError as error:
            os.ftruncate(self._log, self.log_bytes)
            raise StoreError(
                f"{self.directory / self._name} cannot be written: {error}",
                hint="free some space and restart the server; the workers wait for it",
            ) from error
        self.log_bytes += total

    def write_state(self, control: Mapping[str, Any], *bodies: Buffer) -> None:
        """Write the current state; changes go to a new log from now on."""
        name = f"log-{int(self._name.partition('-')[2]) + 1}"
        log = os.open(
            self.directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600
        )
        try:
            write_state(self.directory, {**control, "log": name}, *bodies)
        except BaseException:
            os.close(log)
            raise
        os.close(self._log)
        (self.directory / self._name).unlink()
        self._log, self._name, self.log_bytes = log, name, 0

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._log, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._log = self._lock = -1

    def _frames(self, name: str, *, is_complete: bool) -> Iterator[Frame]:
        reader = FrameReader(control_bytes=_ANY_BYTES, body_bytes=_ANY_BYTES)
        self.log_bytes = 0
        with (self.directory / name).open("rb", buffering=0) as file:
            while True:
                try:
                    frame = reader.read(lambda buffer: file.readinto(buffer) or 0)
                except EOFError:
                    if reader.is_between or not is_complete:
                        return
                    raise self._damage(name, "it ends too early") from None
                except FrameError as error:
                    raise self._damage(name, str(error)) from error
                if frame is not None:
                    self.log_bytes = file.tell()
                    yield frame

    def _damage(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.directory / name} is damaged: {reason}",
            hint="restore the directory, or start from a checkpoint of the run",
        )


def write_state(directory: Path, control: Mapping[str, Any], *bodies: Buffer) -> None:
    """Publish a state by an atomic rename."""
    temporary = directory / f".{_STATE}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write(descriptor, encode_frame(control, *bodies, limit_bytes=_ANY_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(directory / _STATE)
    sync_directory(directory)


def _write(descriptor: int, pieces: list[memoryview]) -> None:
    remaining = list(pieces)
    while remaining:
        drop_sent(remaining, os.writev(descriptor, remaining))


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


class ServerAddress(Value):
    """Address and token of a server."""

    host: str
    port: int
    token: str


def publish_address(directory: Path, address: ServerAddress) -> None:
    """Publish the address of this directory's server."""
    temporary = directory / f".address.{os.getpid()}.part"
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(address.model_dump_json())
    temporary.replace(directory / "address.json")


def read_address(directory: Path, index: int) -> ServerAddress:
    """Address of a server; ``OSError`` while it is down."""
    return ServerAddress.model_validate_json(
        (shard_directory(directory, index) / "address.json").read_text()
    )
