"""Worker group of a run: the record of its supervisor, and requests to it.

Messages on the wire are frames: four bytes of length, then one JSON object. No pickle.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import Field

from yunlu.core.errors import StoreError
from yunlu.core.json_decode import decode_json
from yunlu.core.secure_link import LinkRefusedError, connect_link, derive_secret
from yunlu.core.value import Value
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.runs.run_store import RunStore

MAX_FRAME_BYTES = 4 << 20
"""Far above every message; a peer that announces more is none of ours."""
_LENGTH_BYTES = 4
LOCAL = "local"
"""Name of the node that the supervisor starts itself."""


class GroupWorker(Value):
    """One worker of the group, identified by pid and start time."""

    number: int
    """Unique in this run: never given again."""
    node: str
    host: str
    pid: int
    process_started_at: float
    rank: int | None = None
    """None for a spare."""


class WorkerGroup(Value):
    """Record of the supervisor: what its successor needs, and whoever sends it a request."""

    host: str
    port: int
    token: str
    pid: int
    """Process of the supervisor."""
    process_started_at: float
    node_module: str
    """Module of the node agent: it loads the data once and forks workers."""
    generation: int = 0
    target: int
    """Target number of workers."""
    wanted: dict[str, int] = Field(default_factory=dict)
    """Target number of workers per node."""
    spares: int = 1
    next_worker: int = 0
    """Number of the next worker."""
    layouts: dict[int, dict[str, Any]] = Field(default_factory=dict)
    """Parallel layout by number of workers."""
    history: dict[int, dict[str, Any]] = Field(default_factory=dict)
    """Parallel layout by generation."""
    workers: tuple[GroupWorker, ...] = ()


def read_worker_group(run: RunStore) -> WorkerGroup | None:
    """The record; None where the run has no worker group."""
    try:
        content = run.read(Document.WORKER_GROUP)
        return None if content is None else WorkerGroup.model_validate_json(content)
    except (OSError, ValueError):
        return None


def count_workers(group: WorkerGroup) -> int:
    """Number of workers that train; of asynchronous ones, which have no ranks, the target."""
    if group.workers or not group.generation:
        return sum(worker.rank is not None for worker in group.workers)
    return group.target


def write_worker_group(run: RunStore, group: WorkerGroup) -> None:
    """Store the record, readable by its owner alone: it holds the token.

    Not flushed to disk: it must survive a process, and no process survives a power cut.
    """
    run.write(Document.WORKER_GROUP, group.model_dump_json(), durable=False)


class FrameError(StoreError):
    """Received bytes are no valid frame."""


def control_secret(token: str) -> bytes:
    """Secret of the control connections: both ends prove it, nobody sends it."""
    return derive_secret(token.encode(errors="surrogatepass"), "control")


def encode_frame(message: dict[str, Any]) -> bytes:
    """Encode a message as one frame."""
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(data)} bytes is longer than {MAX_FRAME_BYTES}")
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class FrameDecoder:
    """Decodes received bytes into whole messages."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Add bytes; yields each message that is complete."""
        self._pending += data
        while len(self._pending) >= _LENGTH_BYTES:
            length = int.from_bytes(self._pending[:_LENGTH_BYTES], "big")
            if length > self.limit_bytes:
                raise FrameError(f"a frame of {length} bytes is longer than {self.limit_bytes}")
            if len(self._pending) < _LENGTH_BYTES + length:
                return
            body = bytes(self._pending[_LENGTH_BYTES : _LENGTH_BYTES + length])
            del self._pending[: _LENGTH_BYTES + length]
            try:
                message = decode_json(body)
            except ValueError as error:
                raise FrameError("a frame does not hold JSON") from error
            if not isinstance(message, dict):
                raise FrameError("a frame does not hold a JSON object")
            yield message


def send_request(
    group: WorkerGroup, request: dict[str, Any], *, timeout_s: float = 10
) -> dict[str, Any]:
    """Send one request to the supervisor and return its answer."""
    hello = {"kind": "hello_client"}
    unpacker = FrameDecoder()
    where = f"the supervisor at {group.host}:{group.port}"
    try:
        with connect_link(
            (group.host, group.port), control_secret(group.token), timeout_s=timeout_s
        ) as connection:
            connection.sendall(encode_frame(hello) + encode_frame(request))
            while data := connection.recv(65536):
                for answer in unpacker.feed(data):
                    return answer
    except LinkRefusedError as error:
        raise StoreError(
            f"{where} has another token, or is no supervisor: {error}",
            hint=f"the {Document.WORKER_GROUP} of the run holds the right token",
        ) from error
    except OSError as error:
        raise StoreError(
            f"{where} does not answer: {error}",
            hint="it may just be restarting; try again in a few seconds",
        ) from error
    raise StoreError(
        f"{where} closed the connection without an answer",
        hint="it may just be restarting; try again in a few seconds",
    )
