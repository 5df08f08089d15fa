"""What workers ask of servers, and what these answer; arrays travel beside it, as raw bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from yunlu.core.value import Value
from yunlu.training.communication.servers.frames import BadFrameError
from yunlu.training.communication.servers.rules import ServerRules, Ticket

if TYPE_CHECKING:
    from yunlu.training.communication.servers.frames import Frame

HELLO_BYTES = 16 << 10
"""Before the token is checked, nobody may say more than this."""
_NotNegative = Annotated[int, Field(ge=0, lt=1 << 62)]
_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Outcome = Literal["taken", "duplicate", "late"]
"""Of a gradient: it counts; its ticket's gradient came before; its step ended without it."""


class ServerHello(Value):
    """A worker comes, or comes back."""

    kind: Literal["hello"] = "hello"
    token: str
    index: _NotNegative = 0
    """The server it means: another one may listen where that one did."""
    worker: Annotated[str, Field(min_length=1, max_length=200)]
    held: tuple[Ticket, ...] = ()


class Pull(Value):
    """The weights, please."""

    kind: Literal["pull"] = "pull"
    version: _NotNegative | None = None
    """Those with so many updates, if the server still has them."""
    is_packed: bool = True
    """As the rules say; else as they are."""


class Push(Value):
    """A gradient: the mean over the items of a ticket; the body holds it, packed."""

    kind: Literal["push"] = "push"
    ticket: Ticket
    lr: _Finite
    items: _NotNegative
    """None of them where the ticket is over without a gradient."""
    version: _NotNegative
    """Of the weights it was computed with."""


class TakeTicket(Value):
    """Work, please; answered when there is some, or none is left."""

    kind: Literal["take"] = "take"


class ClaimTicket(Value):
    """Would a gradient of this ticket still count?"""

    kind: Literal["claim"] = "claim"
    ticket: Ticket


class CompleteTicket(Value):
    """All servers have a ticket's gradient."""

    kind: Literal["complete"] = "complete"
    ticket: Ticket
    metrics: dict[str, float] = Field(default_factory=dict, max_length=100)


class PauseServer(Value):
    """Hand out nothing new; answered when nothing is under way."""

    kind: Literal["pause"] = "pause"


class ResumeServer(Value):
    """Go on handing out."""

    kind: Literal["resume"] = "resume"


class StopServer(Value):
    """Let training end with what is under way."""

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
    """What comes of a request; the weights are beside it."""

    error: str = ""
    """What was wrong with it: asking again would not help."""
    version: int = 0
    """Updates in the weights of this server."""
    outcome: Outcome = "taken"
    ticket: Ticket | None = None
    """None at the end."""
    is_drained: bool = True
    rules: ServerRules | None = None
    length: int = 0
    """Of all weights."""


_requests: TypeAdapter[Request] = TypeAdapter(Request)


def read_request(frame: Frame) -> Request:
    """The request in a frame; ``BadFrameError`` where it is none."""
    try:
        return _requests.validate_python(frame.control)
    except ValidationError as error:
        # Its contents are not repeated: a token may be among them.
        raise BadFrameError(f"{error.error_count()} faults in a request") from None


def read_reply(frame: Frame) -> ServerReply:
    """The answer in a frame."""
    try:
        return ServerReply.model_validate(frame.control)
    except ValidationError as error:
        raise BadFrameError("not an answer") from error


def dump_message(message: Value) -> dict[str, Any]:
    """A message as JSON; what is as usual is left out."""
    return message.model_dump(mode="json", exclude_defaults=True) | (
        {"kind": kind} if (kind := getattr(message, "kind", None)) else {}
    )


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Only those that JSON can hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
