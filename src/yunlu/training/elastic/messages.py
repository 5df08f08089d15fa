"""Messages between the supervisor, its workers and its nodes."""

from __future__ import annotations

import traceback
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from yunlu.core.errors import YunluError
from yunlu.core.framing import FrameError, encode_frame
from yunlu.core.value import Value
from yunlu.planning.layouts import Layout, RankCoordinates

Ending = Literal["finished", "stopped", "async"]
"""``async``: the run continues with asynchronous workers."""


class HeldState(Value):
    """A part of the training state, in a worker's memory."""

    step: int
    """Completed steps."""
    generation: int
    """Generation whose layout defines the part."""
    coordinates: RankCoordinates
    """Coordinates of the worker whose state it is."""


class RankAssignment(Value):
    """The worker that has a rank."""

    worker: int
    host: str
    pid: int


class StateSource(Value):
    """A worker that holds a part of the state."""

    handoff_rank: int
    held_state: HeldState
    is_replica: bool = False
    """A replica in memory, not the worker's live state."""


class Restore(Value):
    """Source of the state of a generation."""

    kind: Literal["start", "live", "replicas", "checkpoint"]
    """``start`` and ``checkpoint``: the newest valid checkpoint, or else a new start."""
    step: int | None = None
    """Completed steps; None if the checkpoint decides."""
    sources: tuple[StateSource, ...] = ()
    """All holders of a part; empty if the state is read from disk."""
    needs_transfer: bool = True
    """False if every worker already holds what it needs."""


class Assignment(Value):
    """Rank, layout and state source of one worker in one generation."""

    kind: Literal["assign"] = "assign"
    generation: int
    layout: Layout
    rank: int | None
    """None for a departing worker: it only hands off its state."""
    slot: int = 0
    """Device index on its node."""
    workers: tuple[RankAssignment, ...]
    """By rank."""
    departing: tuple[int, ...] = ()
    """Workers that only hand off state; their handoff ranks follow the others'."""
    handoff_rank: int
    """Rank in the handoff group; equals ``rank`` for workers that stay."""
    source_layout: Layout | None = None
    """Layout in which the sources hold the state."""
    restore: Restore
    reason: str = ""

    @property
    def is_departing(self) -> bool:
        """Whether this worker only hands off its state."""
        return self.rank is None

    @property
    def handoff_size(self) -> int:
        """Size of the handoff group."""
        return len(self.workers) + len(self.departing)


# From a worker.
class WorkerHello(Value):
    """Registers a worker, also with a new supervisor."""

    kind: Literal["hello_worker"] = "hello_worker"
    worker: int
    node: str
    host: str
    pid: int
    process_started_at: float
    generation: int = 0
    rank: int | None = None
    step: int = 0
    is_ready: bool = False
    """It waits for an assignment and is in no generation."""
    ending: Ending | None = None
    live: HeldState | None = None
    """With ``is_ready``: the state it holds."""
    replicas: tuple[HeldState, ...] = ()


class Ready(Value):
    """The worker waits for its first assignment."""

    kind: Literal["ready"] = "ready"


class StoreHosted(Value):
    """Rank 0 hosts the store of a generation at this address."""

    kind: Literal["store_hosted"] = "store_hosted"
    generation: int
    host: str
    port: int


class Heartbeat(Value):
    """Sent five times a second by the control thread."""

    kind: Literal["heartbeat"] = "heartbeat"
    generation: int = 0
    step: int = 0
    phase: str = "idle"
    progress: int = 0
    """Incremented by every ``WorkerAgent.report_progress``: the main thread makes progress."""
    steps: tuple[tuple[int, float, float], ...] = ()
    """Steps completed since the last heartbeat: step, its seconds, seconds waiting for others."""
    memory_bytes: int = 0


class Paused(Value):
    """The worker left its generation; the state it holds."""

    kind: Literal["paused"] = "paused"
    generation: int
    step: int
    live: HeldState | None = None
    replicas: tuple[HeldState, ...] = ()
    detail: str = ""
    """Cause, if it was not asked to pause."""


class Failed(Value):
    """A worker or node failed by its own fault; the run fails."""

    kind: Literal["failed"] = "failed"
    code: str
    message: str
    hint: str | None = None
    traceback: str


class LeaveNotice(Value):
    """The worker or node leaves at the next step boundary, usually after SIGTERM."""

    kind: Literal["leave_notice"] = "leave_notice"
    is_excluded: bool = False
    """It was not asked to: it is excluded as a straggler for now."""


class Done(Value):
    """The worker has ended and saved; it waits for the others."""

    kind: Literal["done"] = "done"
    generation: int
    ending: Ending
    step: int
    live: HeldState | None = None


class LayoutsPlanned(Value):
    """Layout for each number of workers."""

    kind: Literal["layouts_planned"] = "layouts_planned"
    layouts: dict[int, Layout]


# From a node.
class NodeHello(Value):
    """Registers a node and its devices."""

    kind: Literal["hello_node"] = "hello_node"
    node: str
    host: str
    pid: int
    process_started_at: float
    devices: int


class Prepared(Value):
    """The node is ready to fork workers."""

    kind: Literal["prepared"] = "prepared"


class Forked(Value):
    """A worker was forked."""

    kind: Literal["forked"] = "forked"
    worker: int
    pid: int
    process_started_at: float


class Exited(Value):
    """A worker of this node exited; a negative code is a signal."""

    kind: Literal["exited"] = "exited"
    worker: int
    code: int
    detail: str = ""
    """Cause, if known."""


# From any client that knows the token.
class ClientHello(Value):
    """Registers a client."""

    kind: Literal["hello_client"] = "hello_client"


class Resize(Value):
    """Change the number of workers."""

    kind: Literal["resize"] = "resize"
    devices: int


class LocateRun(Value):
    """Ask for the run's directory on the shared file system."""

    kind: Literal["locate_run"] = "locate_run"


# From the supervisor.
class Ping(Value):
    """Keep-alive, once a second."""

    kind: Literal["ping"] = "ping"


class StoreLocated(Value):
    """Address of the store of a generation."""

    kind: Literal["store_located"] = "store_located"
    generation: int
    host: str
    port: int


class Pause(Value):
    """Pause all workers at the same step boundary."""

    kind: Literal["pause"] = "pause"
    generation: int


class Stop(Value):
    """Save and stop at the next step boundary."""

    kind: Literal["stop"] = "stop"


class Halt(Value):
    """Leave this generation at once: a worker in it was lost."""

    kind: Literal["halt"] = "halt"
    generation: int


class Leave(Value):
    """Exit: this worker or node is no longer needed."""

    kind: Literal["leave"] = "leave"
    successor: str = ""
    """Main module that the node execs, if the run becomes asynchronous."""


class Fork(Value):
    """Fork a worker, or the planner."""

    kind: Literal["fork"] = "fork"
    worker: int
    is_planner: bool = False


class Kill(Value):
    """Kill a worker that does not respond."""

    kind: Literal["kill"] = "kill"
    worker: int


class Reply(Value):
    """Result of a request."""

    kind: Literal["reply"] = "reply"
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
    """Parse a message; ``FrameError`` if it is invalid."""
    try:
        return _adapter.validate_python(data)
    except ValidationError as error:
        raise FrameError(f"invalid message: {str(data)[:200]}") from error


def frame(message: Value) -> bytes:
    """Serialize a message as one frame."""
    return bytes(encode_frame(message.model_dump(mode="json"))[0])


def as_failure(error: BaseException) -> Failed:
    """Convert an error to a message."""
    is_ours = isinstance(error, YunluError)
    return Failed(
        code=error.code if is_ours else "internal",
        message=error.message if is_ours else f"{type(error).__name__}: {error}",
        hint=error.hint if is_ours else None,
        traceback="".join(traceback.format_exception(error))[-100_000:],
    )
