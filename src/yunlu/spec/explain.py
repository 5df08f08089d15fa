"""Error messages from validation findings: one per key, with the nearest valid name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import did_you_mean, nearest
from yunlu.spec.problems import Path, show_path
from yunlu.spec.schema import Schema, alternatives, home_of, homes_of, keys_of, schema_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


@dataclass(frozen=True, slots=True)
class ValidationFinding:
    """What is wrong at one path of the data."""

    path: Path
    message: str
    at_key: bool = False
    """Whether the key itself is wrong, rather than its value."""


def explain(error: ValidationError, data: Any = None) -> list[ValidationFinding]:
    """Every fault once: the branches of a union speak of the same key.

    ``data`` is what was validated; without it the validator's own record of each value serves.
    """
    # In Python a section can be built, and refused, on its own.
    home = home_of(error.title) or ()
    findings: dict[Path, ValidationFinding] = {}
    missing: defaultdict[Path, list[str]] = defaultdict(list)
    for fault in error.errors(include_url=False):
        location = (*home, *fault["loc"])
        if fault["type"] == "missing":
            missing[location[:-1]].append(str(location[-1]))
        else:
            finding = _find(fault, location, data)
            findings.setdefault(finding.path, finding)
    for path, keys in missing.items():
        guessed = {
            _guess(one_finding)
            for one_finding in findings.values()
            if one_finding.path[:-1] == path
        }
        # A key that was merely misspelt is not also missing.
        if left := [key for key in keys if key not in guessed]:
            findings[*path, left[0]] = _missing(path, left)
    return list(findings.values())


def describe_type(schema: Schema) -> str:
    """``a whole number above 0 or 'auto'``."""
    parts: list[str] = []
    for form in alternatives(schema):
        parts += _form_words(form)
    if len(parts) > 1 and all(word.startswith("'") for word in parts):
        return f"one of {_listing(parts)}"
    return _listing(parts) or "a value"


def show_value(value: Any) -> str:
    """A value as the user wrote it, cut short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """What to say of a task or tracker that nobody offers."""
    return f"unknown {kind} {name!r}; {did_you_mean(name, known)}; your own is written module:Class"


def _find(fault: ErrorDetails, location: Path, data: Any) -> ValidationFinding:
    if fault["type"] in {"extra_forbidden", "invalid_key"}:
        return _unknown_key((*_real_path(location[:-1]), str(location[-1])))
    path = _real_path(location)
    if fault["type"] == "conflict":
        context = fault.get("ctx", {})
        return ValidationFinding((*path, context["key"]), context["message"], at_key=True)
    written, value = (path, fault["input"]) if data is None else _as_written(path, data)
    schema = schema_at(path) or {}
    message = f"expected {describe_type(schema)}, got {show_value(value)}"
    guesses = get_close_matches(value, _choices(schema), n=2) if isinstance(value, str) else []
    if guesses:
        message += f"; did you mean {_listing([repr(guess) for guess in guesses])}?"
    return ValidationFinding(written, message)


def _unknown_key(path: Path) -> ValidationFinding:
    key, known = str(path[-1]), keys_of(schema_at(path[:-1]) or {})
    homes = homes_of(key)
    if nearest(key, known) is None and len(homes) == 1:
        return ValidationFinding(
            path, f"unknown key here; it belongs at {show_path(homes[0])}", at_key=True
        )
    return ValidationFinding(path, f"unknown key; {did_you_mean(key, known)}", at_key=True)


def _guess(finding: ValidationFinding) -> str | None:
    known = keys_of(schema_at(finding.path[:-1]) or {})
    return nearest(str(finding.path[-1]), known) if finding.at_key else None


def _missing(path: Path, keys: list[str]) -> ValidationFinding:
    names = _listing([repr(key) for key in keys], last="and")
    return ValidationFinding(path, f"missing required key{'s' if len(keys) > 1 else ''} {names}")


def _real_path(location: Path) -> Path:
    """The part of a validator's location that stands in the job: union branches do not."""
    path: Path = ()
    for part in location:
        if schema_at((*path, part)) is None:
            break
        path = (*path, part)
    return path


def _as_written(path: Path, data: Any) -> tuple[Path, Any]:
    """Where the value stands in the user's words: ``optimizer: adamm``, not ``optimizer.name``."""
    value = data
    for depth, part in enumerate(path):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):  # a shorthand: the rest of the path is implied
            return path[:depth], value
    return path, value


def _choices(schema: Schema) -> list[str]:
    result = [
        form.get("enum", [form["const"]] if "const" in form else [])
        for form in alternatives(schema)
    ]
    return [choice for choices in result for choice in choices]


def _form_words(form: Schema) -> list[str]:
    if "const" in form or "enum" in form:
        return [repr(choice) for choice in _choices(form)]
    match form.get("type"):
        case "null":
            parts: list[str] = []  # to leave a key out is better advice than to write null
        case "integer":
            parts = [f"a whole number{_bounds(form)}"]
        case "number":
            parts = [f"a number{_bounds(form)}"]
        case "boolean":
            parts = ["true", "false"]
        case "string":
            parts = [form.get("patternErrorMessage", "text")]
        case "array":
            parts = [_array_words(form)]
        case "object":
            parts = ["a mapping"]
        case _:
            parts = ["plain data (text, numbers, lists or mappings)"]
    return parts


def _array_words(form: Schema) -> str:
    if fixed := form.get("prefixItems"):
        return f"a list of {len(fixed)} values, each {describe_type(fixed[0])}"
    return f"a list of {describe_type(form['items'])}"


def _bounds(form: Schema) -> str:
    low, high = form.get("minimum"), form.get("maximum")
    above, below = form.get("exclusiveMinimum"), form.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    parts = [
        f"{word} {bound}"
        for word, bound in (
            ("above", above),
            ("of at least", low),
            ("below", below),
            ("of at most", high),
        )
        if bound is not None
    ]
    return f" {' and '.join(parts)}" if parts else ""


def _listing(items: list[str], *, last: str = "or") -> str:
    return f" {last} ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
