"""Types and rules that the parts of a job share: numbers, names, times."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, NoReturn, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from yunlu.core.value import Value  # noqa: TC001 - read at run time by pydantic


def _not_a_switch(value: Any) -> Any:
    """``batch: true`` is a slip, not a batch of one."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_switch", "expected a number")
    return value


# The check on switches comes last, so that the bounds stay part of the number's own schema.
Checked = BeforeValidator(_not_a_switch)

Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), Checked]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), Checked]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Checked]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), Checked]
Count = Annotated[int, Field(gt=0), Checked]
CountOrZero = Annotated[int, Field(ge=0), Checked]


def shorthand(spec: type[Value], key: str) -> BeforeValidator:
    """A bare string or number (or null, where it means "none") stands for the field most people set."""
    field = spec.model_fields[key]
    bare: Any = field.annotation
    nullable = type(None) in get_args(bare)
    for rule in field.metadata:
        bare = Annotated[bare, rule]

    def widen(value: Any) -> Any:
        is_bare = isinstance(value, (str, int, float)) or (value is None and nullable)
        return {key: value} if is_bare else value

    # Editors read the schema: both forms must stand in it.
    return BeforeValidator(widen, json_schema_input_type=bare | spec)


def conflict(key: str, message: str) -> NoReturn:
    """Refuse two fields that contradict each other, pointing at one of them."""
    raise PydanticCustomError("conflict", "{message}", {"key": key, "message": message})


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
