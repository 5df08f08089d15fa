"""``Value``: frozen pydantic base of everything that crosses a file, process or network border."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen record that refuses unknown keys; attribute docstrings become its JSON Schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        # Commands define hundreds of values and use few: a validator is built on first use.
        defer_build=True,
        # Non-finite numbers (a diverged loss) must survive a trip through JSON.
        ser_json_inf_nan="strings",
    )
