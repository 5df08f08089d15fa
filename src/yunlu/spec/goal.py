"""``goal`` of a job: budget, deadline, hardware."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from yunlu.core.value import Value
from yunlu.spec.fields import Count, Positive

Objective = Literal["cost", "time", "balanced"]

_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SPAN = r"\d+(?:\.\d+)?\s*(?:s|min|m|h|d|w)"
_DEADLINE = rf"^\s*{_SPAN}(?:\s+{_SPAN})*\s*$"


def _listed(value: object) -> object:
    """``gpu: H100`` is a list of one."""
    return [value] if isinstance(value, str) else value


def read_span_s(text: str) -> float | None:
    """Seconds of ``90min``, ``36h``, ``1d 12h``; None where it is not such a time, or no time at all."""
    if not re.fullmatch(_DEADLINE, text):
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text)
    span_s = math.fsum(float(number) * _UNITS[unit] for number, unit in parts)
    return span_s if span_s > 0 else None


def _takes_time(text: str) -> str:
    if read_span_s(text) is None:
        raise PydanticCustomError("not_a_time", "expected a time")
    return text


_Name = Annotated[str, Field(min_length=1)]
Names = Annotated[list[_Name], BeforeValidator(_listed, json_schema_input_type=_Name | list[_Name])]
"""One name or several."""

Deadline = Annotated[
    str,
    Field(
        pattern=_DEADLINE,
        json_schema_extra={"patternErrorMessage": "a time such as '90min', '36h' or '1d 12h'"},
    ),
    AfterValidator(_takes_time),
]


class GoalSpec(Value):
    """What ``yunlu plan`` chooses hardware and layout by."""

    objective: Objective = "balanced"
    """What to make small: ``cost``, ``time``, or both (``balanced``)."""
    budget: Positive | None = None
    """The most it may cost, in dollars."""
    deadline: Deadline | None = None
    """The longest it may take: ``90min``, ``36h``, ``2d``."""
    gpu: Names | None = None
    """Devices to choose from, such as ``H100``; all that the catalog has when not set."""
    cloud: Names | None = None
    """Clouds to choose from; all that the catalog has when not set, and this machine (``here``)."""
    region: Names | None = None
    """Regions to choose from."""
    spot: bool = False
    """Whether machines may be taken that the cloud can take back at any time, for less."""
    max_devices: Count | None = None
    """The most devices; 64 when not set, more where fewer cannot hold the model."""
    max_batch: Count | None = None
    """The largest batch where ``train.batch`` is ``auto``."""
