"""Requests of workers to servers and their replies; arrays follow as raw bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from yunlu.core.framing import FrameError
from yunlu.core.value import Value
from yunlu.training.communication.servers.rules import ServerRules, Ticket

if TYPE_CHECKING:
    from yunlu.core.framing import Frame

HELLO_BYTES = 16 << 10
"""Size limit of the first request."""
REQUEST_BYTES = 256 << 10
"""Size limit of a request or reply, without the array that follows it."""
_NonNegative = Annotated[int, Field(ge=0, lt=1 << 62)]
_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Outcome = Literal["taken", "duplicate", "late"]
"""Of a gradient: it counts; the ticket already has one; the step ended without it."""


class ServerHello(Value):
    """A worker connects or reconnects."""

    kind: Literal["hello"] = "hello"
    index: _NonNegative = 0
    """The server it means: another one may now use the address."""
    worker: Annotated[str, Field(min_length=1, max_length=200)]
    held: tuple[Ticket, ...] = ()


class Pull(Value):
    """Request the weights."""

    kind: Literal["pull"] = "pull"
    version: _NonNegative | None = None
    """The version with so many updates, if the server still has it."""
    is_packed: bool = True
    """Encoded by the rules' codec, or raw."""


class Push(Value):
    """Push a gradient, the mean over the items of a ticket; encoded in the body."""

    kind: Literal["push"] = "push"
    ticket: Ticket
    lr: _Finite
    items: _NonNegative
    """0 if the ticket ends without a gradient."""
    version: _NonNegative
    """Version of the weights it was computed with."""


class TakeTicket(Value):
    """Request a ticket; answered when there is one, or none is left."""

    kind: Literal["take"] = "take"


class ClaimTicket(Value):
    """Ask whether a gradient of this ticket still counts."""

    kind: Literal["claim"] = "claim"
    ticket: Ticket


class CompleteTicket(Value):
    """All servers have the gradient of this ticket."""

    kind: Literal["complete"] = "complete"
    ticket: Ticket
    metrics: dict[str, float] = Field(default_factory=dict, max_length=100)


class PauseServer(Value):
    """Hand out no more tickets; answered when none is in progress."""

    kind: Literal["pause"] = "pause"


class ResumeServer(Value):
    """Hand out tickets again."""

    kind: Literal["resume"] = "resume"


class StopServer(Value):
    """End training after the tickets in progress."""

    kind: Literal["stop"] = "stop"


Request = Annotated[
    ServerHello
    | Pull
    | Push
    | TakeTicket
    | ClaimTicket
    | CompleteTicket
    | PauseServer
    | ResumeServer
    | StopServer,
    Field(discriminator="kind"),
]


class ServerReply(Value):
    """Reply to a request; the weights follow it."""

    error: str = ""
    """Error; repeating the request would not help."""
    version: int = 0
    """Updates in this server's weights."""
    outcome: Outcome = "taken"
    ticket: Ticket | None = None
    """None at the end."""
    is_drained: bool = True
    rules: ServerRules | None = None
    length: int = 0
    """Number of all weights."""


_requests: TypeAdapter[Request] = TypeAdapter(Request)


def read_request(frame: Frame) -> Request:
    """Parse a request; ``FrameError`` if it is invalid."""
    try:
        return _requests.validate_python(frame.control)
    except ValidationError as error:
        # Its contents are not repeated: they may include a token.
        raise FrameError(f"invalid request ({error.error_count()} errors)") from None


def read_reply(frame: Frame) -> ServerReply:
    """Parse a reply."""
    try:
        return ServerReply.model_validate(frame.control)
    except ValidationError as error:
        raise FrameError("invalid reply") from error


def dump_message(message: Value) -> dict[str, Any]:
    """Dump a message as JSON, without default values."""
    return message.model_dump(mode="json", exclude_defaults=True) | (
        {"kind": kind} if (kind := getattr(message, "kind", None)) else {}
    )


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Only the finite metrics, which JSON can represent."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
