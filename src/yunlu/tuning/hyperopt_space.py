"""Hyperopt spaces (``hp.uniform``, ``hp.choice``, ...) as dimensions of a search.

Hyperopt itself is not imported: whoever has such a space has it installed, and its expressions are
plain graphs to walk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from yunlu.core.errors import JobError
from yunlu.spec.schema import explain
from yunlu.spec.search import DimensionSpec

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDE = 3.0
"""Standard deviations covered on either side; a search has bounds."""


def from_hyperopt(space: Any) -> dict[str, DimensionSpec]:
    """The dimensions of a Hyperopt space whose keys are fields of the job.

    Nested mappings are read as dotted fields. An ``hp.choice`` between mappings becomes conditional
    dimensions, told apart by a key whose value is another in each. Of ``hp.pchoice`` the chances
    are left out, of ``hp.qloguniform`` and ``hp.qlognormal`` any step but whole numbers; normal
    distributions become ranges of three deviations to either side, believed likely in the middle.
    """
    result: dict[str, DimensionSpec] = {}
    _read(space, "", {}, result)
    if not result:
        raise JobError(
            "The Hyperopt space is empty.", hint="give it such as {'train.l2': hp.uniform(...)}"
        )
    return result


def _read(node: Any, name: str, when: dict[str, Any], dimensions: dict[str, DimensionSpec]) -> None:
    """Add every dimension at or below a node."""
    entries = _entries(node)
    if entries is not None:
        for key, part in entries.items():
            _read(part, f"{name}.{key}" if name else str(key), when, dimensions)
        return
    kind = getattr(node, "name", None) if _is_node(node) else None
    if kind == "switch":
        _read_choice(node, name, when, dimensions)
    elif kind in {"float", "int", "hyperopt_param"}:
        _note(name, _read_number(node, name), when, dimensions)
    else:
        _note(name, {"choice": [_plain(node, name)]}, when, dimensions)


def _read_choice(
    node: Any, name: str, when: dict[str, Any], dimensions: dict[str, DimensionSpec]
) -> None:
    options: list[Any] = list(node.pos_args[1:])
    mappings = [entries for option in options if (entries := _entries(option)) is not None]
    if not any(_varies(option) for option in options) and name:
        _note(name, {"choice": [_plain(option, name) for option in options]}, when, dimensions)
        return
    if len(mappings) < len(options):
        raise _refused(name, "an hp.choice with hp expressions in it must be between mappings")
    key = _discriminating_key(mappings, name)
    field = f"{name}.{key}" if name else key
    values = [_plain(mapping[key], field) for mapping in mappings]
    _note(field, {"choice": values}, when, dimensions)
    for value, mapping in zip(values, mappings, strict=True):
        inner = {**when, field: [value]}
        for other, part in mapping.items():
            if other != key:
                _read(part, f"{name}.{other}" if name else str(other), inner, dimensions)


def _discriminating_key(mappings: list[dict[str, Any]], name: str) -> str:
    for key in mappings[0]:
        parts = [mapping[key] for mapping in mappings if key in mapping]
        if len(parts) < len(mappings) or any(_varies(part) for part in parts):
            continue
        values = [_plain(part, name) for part in parts]
        if all(value not in values[:index] for index, value in enumerate(values)):
            return str(key)
    raise _refused(name, "the mappings of an hp.choice need a key whose value is another in each")


def _note(
    name: str, form: dict[str, Any], when: dict[str, Any], dimensions: dict[str, DimensionSpec]
) -> None:
    if not name:
        raise _refused(name, "expected a mapping from fields of the job to hp expressions")
    try:
        spec = DimensionSpec.model_validate({**form, "when": when})
    except ValidationError as error:
        wrong = explain(error)[0]
        raise _refused(name, f"{wrong.path[-1]}: {wrong.message}") from None
    before = dimensions.get(name)
    if before is None:
        dimensions[name] = spec
    elif before.model_copy(update={"when": {}}) == spec.model_copy(update={"when": {}}):
        dimensions[name] = spec.model_copy(update={"when": _either(before.when, spec.when, name)})
    else:
        raise _refused(name, "it has other values in another option; give it the same in all")


def _either(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The condition that holds where one of two does; they differ in one field."""
    differing = [field for field in one if one[field] != other.get(field)]
    if one.keys() != other.keys() or len(differing) > 1:
        raise _refused(
            name, "it occurs in options of several choices, which one condition cannot express"
        )
    return {
        field: [*one[field], *other[field]] if field in differing else one[field] for field in one
    }


def _read_number(node: Any, name: str) -> dict[str, Any]:
    is_int = False
    while node.name in {"float", "int"}:
        is_int = is_int or node.name == "int"
        node = node.pos_args[0]
    if node.name != "hyperopt_param":
        raise _refused(name, f"{node.name} is not an hp expression that can be read")
    drawn = node.pos_args[1]
    named = {key: _plain(part, name) for key, part in drawn.named_args}
    numbers = [_plain(part, name) for part in drawn.pos_args]
    has_steps = drawn.name[:1] == "q"
    step = named.pop("q", None) or (numbers.pop() if has_steps else None)
    read = _FORMS.get(drawn.name.removeprefix("q"))
    if read is None:
        raise _refused(name, f"hp.{drawn.name} is not known; known: {', '.join(sorted(_FORMS))}")
    form = _in_steps(read(*numbers, **named), step) if step else read(*numbers, **named)
    if is_int:
        form = {key: round(v) if key in {"low", "high"} else v for key, v in form.items()}
    if repr((form["low"], form["high"])) == "(0, 1)":
        return {"choice": [0, 1]}
    return form


def _uniform(low: float, high: float) -> dict[str, Any]:
    return {"low": float(low), "high": float(high)}


def _log_uniform(low: float, high: float) -> dict[str, Any]:
    return {"low": _clean(math.exp(low)), "high": _clean(math.exp(high)), "log": True}


def _normal(mu: float, sigma: float) -> dict[str, Any]:
    return {
        "low": _clean(mu - _WIDE * sigma),
        "high": _clean(mu + _WIDE * sigma),
        "likely": {"at": float(mu), "within": float(sigma)},
    }


def _log_normal(mu: float, sigma: float) -> dict[str, Any]:
    return {
        "low": _clean(math.exp(mu - _WIDE * sigma)),
        "high": _clean(math.exp(mu + _WIDE * sigma)),
        "log": True,
        "likely": {"at": _clean(math.exp(mu)), "within": _clean(math.exp(sigma))},
    }


def _integers(low: int, high: int | None = None) -> dict[str, Any]:
    first, end = (0, low) if high is None else (low, high)
    return {"low": int(first), "high": int(end) - 1}


def _in_steps(form: dict[str, Any], q: float) -> dict[str, Any]:
    """Hyperopt's steps are multiples of q, independent of the bounds."""
    is_whole = float(q).is_integer()
    if form.get("log"):
        ends = (max(round(form["low"]), 1), max(round(form["high"]), 1))
        return {**form, "low": ends[0], "high": ends[1]} if is_whole else form
    low, high = (_clean(round(form[key] / q) * q) for key in ("low", "high"))
    if is_whole:
        return {**form, "low": round(low), "high": round(high), "step": q}
    return {**form, "low": low, "high": high, "step": q}


_FORMS: dict[str, Callable[..., dict[str, Any]]] = {
    "uniform": _uniform,
    "loguniform": _log_uniform,
    "normal": _normal,
    "lognormal": _log_normal,
    "randint": _integers,
}


def _is_node(node: Any) -> bool:
    return hasattr(node, "pos_args") and hasattr(node, "named_args")


def _entries(node: Any) -> dict[str, Any] | None:
    """The parts of a mapping, be it plain or an expression."""
    if isinstance(node, Mapping):
        return {str(key): part for key, part in cast("Mapping[Any, Any]", node).items()}
    if _is_node(node) and node.name == "dict":
        return dict(node.named_args)
    return None


def _varies(node: Any) -> bool:
    """Whether there is an hp expression in it."""
    if _is_node(node):
        if node.name in {"switch", "hyperopt_param", "float", "int"}:
            return True
        parts = [*node.pos_args, *(part for _, part in node.named_args)]
        return any(_varies(part) for part in parts)
    if isinstance(node, Mapping):
        return any(_varies(part) for part in cast("Mapping[Any, Any]", node).values())
    return isinstance(node, list | tuple) and any(_varies(part) for part in cast("list[Any]", node))


def _plain(node: Any, name: str) -> Any:
    """The value of an expression without hp in it."""
    if not _is_node(node):
        return list(cast("Any", node)) if isinstance(node, tuple) else node
    match node.name:
        case "literal":
            return node.obj
        case "pos_args":
            return [_plain(part, name) for part in node.pos_args]
        case "dict":
            return {key: _plain(part, name) for key, part in node.named_args}
        case _:
            raise _refused(name, f"{node.name} is not an hp expression that can be read")


def _clean(number: float) -> float:
    """Without the last digits that logarithms bring in."""
    return float(f"{number:.12g}")


def _refused(name: str, message: str) -> JobError:
    return JobError(f"The Hyperopt space at {name or 'its top'}: {message}.")
