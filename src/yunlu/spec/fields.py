"""Types and rules that the parts of a job share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, get_args

from pydantic import BeforeValidator, Field
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
