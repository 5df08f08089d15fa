"""The crew of a run with several workers: its journal on disk, and how to talk to its supervisor.

Everything on the wire is a frame: four bytes of length, then one JSON object. No pickle.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import Field

from yunlu.core.errors import StoreError
from yunlu.core.value import Value
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.runs.run_store import RunStore

MAX_FRAME_BYTES = 4 << 20
"""No message comes near this; a peer that announces more is not one of ours."""
_LENGTH_BYTES = 4
WRONG_TOKEN = "wrong token"  # noqa: S105 (an answer)
LOCAL = "local"
"""The node that the supervisor started itself."""


class CrewMember(Value):
    """One worker of the crew, known by pid and start time."""

    member: int
    """Its number in this run: given once, never again."""
    node: str
    host: str
    pid: int
    process_started_at: float
    rank: int | None = None
    """None for one that stands by."""


class Crew(Value):
    """The supervisor's journal: enough for the next supervisor, and for whoever has a request."""

    host: str
    port: int
    token: str
    pid: int
    """The supervisor's own process."""
    process_started_at: float
    node_module: str
    """The program of a node, by name: it loads the data once and forks workers."""
    generation: int = 0
    target: int
    """Workers wanted."""
    wanted: dict[str, int] = Field(default_factory=dict)
    """Of these, how many on each node."""
    spares: int = 1
    next_member: int = 0
    layouts: dict[int, dict[str, Any]] = Field(default_factory=dict)
    """By number of workers: how the work would be split among them."""
    history: dict[int, dict[str, Any]] = Field(default_factory=dict)
    """By generation: how the work was split."""
    members: tuple[CrewMember, ...] = ()


def read_crew(run: RunStore) -> Crew | None:
    """The journal; none where the run has no crew."""
    try:
        content = run.read(Document.WORKER_GROUP)
        return None if content is None else Crew.model_validate_json(content)
    except (OSError, ValueError):
        return None


def count_workers(crew: Crew) -> int:
    """Those that train now; of asynchronous ones, which have no ranks, those that are wanted."""
    if crew.members or not crew.generation:
        return sum(member.rank is not None for member in crew.members)
    return crew.target


def write_crew(run: RunStore, crew: Crew) -> None:
    """Publish the journal, readable by its owner alone: it holds the token.

    Not flushed to the disk: it outlives a process, and no process outlives a power cut.
    """
    run.write(Document.WORKER_GROUP, crew.model_dump_json(), durable=False, private=True)


class FrameError(StoreError):
    """What came over the wire is not a frame of ours."""


def pack(message: dict[str, Any]) -> bytes:
    """One frame."""
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(data)} bytes is longer than {MAX_FRAME_BYTES}")
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Unpacker:
    """Bytes in, whole messages out."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Each message that is now whole."""
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
                message = json.loads(body)
            except ValueError as error:
                raise FrameError("a frame does not hold JSON") from error
            if not isinstance(message, dict):
                raise FrameError("a frame does not hold a JSON object")
            yield message


def reachable(bound: str) -> str:
    """The address others are to use for what listens on this one."""
    if bound != "0.0.0.0":  # noqa: S104 (asked for by the user)
        return bound
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # no packet is sent: it only chooses a way out
        return probe.getsockname()[0]
    return "127.0.0.1"  # no way out: nobody else can come


def ask(crew: Crew, request: dict[str, Any], *, timeout_s: float = 10) -> dict[str, Any]:
    """Put one request to the supervisor and return its answer."""
    hello = {"kind": "hello_client", "token": crew.token}
    unpacker = Unpacker()
    try:
        with socket.create_connection((crew.host, crew.port), timeout=timeout_s) as connection:
            connection.sendall(pack(hello) + pack(request))
            while data := connection.recv(65536):
                for answer in unpacker.feed(data):
                    if answer.get("text") == WRONG_TOKEN:
                        raise StoreError(
                            f"the supervisor at {crew.host}:{crew.port} says: {WRONG_TOKEN}",
                            hint=f"the {Document.WORKER_GROUP} of the run holds the right one",
                        )
                    return answer
    except OSError as error:
        raise StoreError(
            f"the supervisor at {crew.host}:{crew.port} does not answer: {error}",
            hint="it may just be restarting; try again in a few seconds",
        ) from error
    raise StoreError(f"the supervisor at {crew.host}:{crew.port} hung up without an answer")
