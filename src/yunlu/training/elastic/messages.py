"""Everything the supervisor, its workers and its nodes say to each other."""

from __future__ import annotations

import secrets
import traceback
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from yunlu.core.errors import YunluError
from yunlu.core.value import Value
from yunlu.planning.layout import Layout, RankCoordinates
from yunlu.runs.worker_group import FrameError, pack

HELLO_BYTES = 4096
"""Before the token is checked, nobody may say more than this."""

Ending = Literal["finished", "stopped", "changed"]
"""``changed``: others go on, as asynchronous workers."""


class HeldState(Value):
    """One part of the state, in somebody's memory."""

    step: int
    """Steps completed in it."""
    generation: int
    """In which it was cut: the layout of that generation says what the part is."""
    place: RankCoordinates
    """Where the worker whose state it is stood then."""


class RankAssignment(Value):
    """Who works at which rank."""

    worker: int
    host: str
    pid: int


class StateSource(Value):
    """Who has which part of the state to give."""

    handoff_rank: int
    held_state: HeldState
    is_replica: bool = False
    """A copy kept for somebody (or itself), not the giver's live state."""


class Restore(Value):
    """Where the state comes from."""

    kind: Literal["start", "live", "copies", "checkpoint"]
    """``start`` and ``checkpoint``: the newest good checkpoint on disk, else from the beginning."""
    step: int | None = None
    """Steps completed in it; none where the disk decides."""
    sources: tuple[StateSource, ...] = ()
    """Everyone who has a part of it. Empty where it comes from disk."""
    needs_transfer: bool = True
    """False where everyone holds already what it needs: nothing is to be passed on."""


class Assignment(Value):
    """One worker's part in one generation."""

    kind: Literal["assign"] = "assign"
    generation: int
    layout: Layout
    rank: int | None
    """None for a guest: it only gives its state, then leaves."""
    slot: int = 0
    """Which of its node's devices is its own."""
    workers: tuple[RankAssignment, ...]
    """By rank."""
    departing: tuple[int, ...] = ()
    """Members that only give; they follow the seats in the meeting."""
    handoff_rank: int
    """Its place in the meeting of seats and guests; equals ``rank`` for who stays."""
    before: Layout | None = None
    """The layout in which the givers hold the state."""
    restore: Restore
    reason: str = ""

    @property
    def is_departing(self) -> bool:
        """Whether this worker only gives."""
        return self.rank is None

    @property
    def handoff_size(self) -> int:
        """Workers in the exchange of state."""
        return len(self.workers) + len(self.departing)


# From a worker.
class WorkerHello(Value):
    """A worker comes, or comes back to a new supervisor."""

    kind: Literal["hello_member"] = "hello_member"
    token: str
    worker: int
    node: str
    host: str
    pid: int
    process_started_at: float
    generation: int = 0
    rank: int | None = None
    step: int = 0
    is_ready: bool = False
    """It waits for an assignment: nothing of a generation is under way."""
    ending: Ending | None = None
    live: HeldState | None = None
    """With ``is_ready``: what it holds."""
    replicas: tuple[HeldState, ...] = ()


class Ready(Value):
    """A worker waits for its first assignment."""

    kind: Literal["ready"] = "ready"


class StoreHosted(Value):
    """Rank 0 keeps the store of a generation here."""

    kind: Literal["hosting"] = "hosting"
    generation: int
    host: str
    port: int


class Heartbeat(Value):
    """A sign of life, five times a second, from a thread of its own."""

    kind: Literal["beat"] = "beat"
    generation: int = 0
    step: int = 0
    phase: str = "idle"
    progress: int = 0
    """Grows with every call of ``Member.beat``: the main thread moves."""
    steps: tuple[tuple[int, float, float], ...] = ()
    """Steps completed since the last one: step, its seconds, of which waiting for others."""
    memory_bytes: int = 0


class Paused(Value):
    """A worker is out of its generation and says what it holds."""

    kind: Literal["settled"] = "settled"
    generation: int
    step: int
    live: HeldState | None = None
    replicas: tuple[HeldState, ...] = ()
    detail: str = ""
    """Why, where nobody had asked it to."""


class Failed(Value):
    """A worker or node failed by its own fault; the run fails with it."""

    kind: Literal["failed"] = "failed"
    code: str
    message: str
    hint: str | None = None
    traceback: str


class LeaveNotice(Value):
    """A worker or node was told to go (SIGTERM): it leaves at the next step boundary."""

    kind: Literal["leaving"] = "leaving"
    is_excluded: bool = False
    """Nobody told it to: the others are faster without it, for now."""


class Done(Value):
    """A worker's part of the run is over; it waits until everyone's is."""

    kind: Literal["done"] = "done"
    generation: int
    ending: Ending
    step: int
    live: HeldState | None = None


class LayoutsPlanned(Value):
    """How the work is split, by number of workers."""

    kind: Literal["planned"] = "planned"
    layouts: dict[int, Layout]


# From a node.
class NodeHello(Value):
    """A node offers devices."""

    kind: Literal["hello_agent"] = "hello_agent"
    token: str
    node: str
    host: str
    pid: int
    process_started_at: float
    devices: int


class Prepared(Value):
    """The node can fork workers now."""

    kind: Literal["prepared"] = "prepared"


class Forked(Value):
    """A worker was started."""

    kind: Literal["forked"] = "forked"
    worker: int
    pid: int
    process_started_at: float


class Exited(Value):
    """A worker of this node ended; below zero: by that signal."""

    kind: Literal["exited"] = "exited"
    worker: int
    code: int
    detail: str = ""
    """Why, where the node knows."""


# From anybody with the token.
class ClientHello(Value):
    """Somebody has a request."""

    kind: Literal["hello_client"] = "hello_client"
    token: str


class Resize(Value):
    """Go on with so many workers."""

    kind: Literal["resize"] = "resize"
    devices: int


class LocateRun(Value):
    """Which directory is the run's, on the file system that all nodes share?"""

    kind: Literal["where"] = "where"


# From the supervisor.
class Ping(Value):
    """The supervisor is there, once a second."""

    kind: Literal["tick"] = "tick"


class StoreLocated(Value):
    """Where the store of a generation is."""

    kind: Literal["meet"] = "meet"
    generation: int
    host: str
    port: int


class Pause(Value):
    """Stop at the next step boundary, all at the same, and settle."""

    kind: Literal["pause"] = "pause"
    generation: int


class Stop(Value):
    """Stop at the next step boundary, save, and be done."""

    kind: Literal["stop"] = "stop"


class Halt(Value):
    """Get out of this generation at once: somebody in it is lost."""

    kind: Literal["halt"] = "halt"
    generation: int


class Leave(Value):
    """Exit: nobody needs this worker or node any more."""

    kind: Literal["leave"] = "leave"
    successor: str = ""
    """The program that a node is to become, where the run goes on in another way."""


class Fork(Value):
    """Start a worker, or one process that makes the plan."""

    kind: Literal["fork"] = "fork"
    worker: int
    is_planner: bool = False


class Kill(Value):
    """End a worker that does not answer."""

    kind: Literal["kill"] = "kill"
    worker: int


class Reply(Value):
    """What comes of a request."""

    kind: Literal["answer"] = "answer"
    is_accepted: bool
    text: str
    layout: str = ""


Message = Annotated[
    Assignment
    | WorkerHello
    | Ready
    | StoreHosted
    | Heartbeat
    | Paused
    | Failed
    | LeaveNotice
    | Done
    | LayoutsPlanned
    | NodeHello
    | Prepared
    | Forked
    | Exited
    | ClientHello
    | Resize
    | LocateRun
    | Ping
    | StoreLocated
    | Pause
    | Stop
    | Halt
    | Leave
    | Fork
    | Kill
    | Reply,
    Field(discriminator="kind"),
]

_adapter: TypeAdapter[Message] = TypeAdapter(Message)


def read_message(data: dict[str, Any]) -> Message:
    """The message in a frame; ``FrameError`` where it is none of ours."""
    try:
        return _adapter.validate_python(data)
    except ValidationError as error:
        raise FrameError(f"not a message of ours: {str(data)[:200]}") from error


def frame(message: Value) -> bytes:
    """A message as it goes over the wire."""
    return pack(message.model_dump(mode="json"))


def is_same_token(given: str, ours: str) -> bool:
    """Compared in constant time."""
    return secrets.compare_digest(given.encode(), ours.encode())


def as_failure(error: BaseException) -> Failed:
    """An error as the supervisor tells it."""
    is_ours = isinstance(error, YunluError)
    return Failed(
        code=error.code if is_ours else "internal",
        message=error.message if is_ours else f"{type(error).__name__}: {error}",
        hint=error.hint if is_ours else None,
        traceback="".join(traceback.format_exception(error))[-100_000:],
    )
