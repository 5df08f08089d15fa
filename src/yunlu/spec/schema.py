"""The job as JSON Schema, and the error messages that are worded from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import did_you_mean, nearest
from yunlu.core.imports import CALLBACKS, OWN_CODE, OWN_FILE, SAMPLERS, TASKS, TRACKERS, known_names
from yunlu.spec.communication import codec_names, text_pattern
from yunlu.spec.counterparts.table import answer_key, answer_value
from yunlu.spec.job import Job
from yunlu.spec.source import KeyPath, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

Schema = dict[str, Any]


def job_schema() -> Schema:
    """The schema of a job file, naming what is installed here: tasks, trackers, samplers, codecs."""
    schema = deepcopy(_plain_schema())
    _tidy(schema)
    properties = schema["properties"]
    properties["task"] = _named(properties["task"], known_names(TASKS))
    for key, group in (("trackers", TRACKERS), ("callbacks", CALLBACKS)):
        for form in properties[key].get("anyOf", [properties[key]]):
            if "items" in form:
                form["items"] = _named(form["items"], known_names(group))
    for form in properties["metrics"]["anyOf"]:
        form.get("items", form)["pattern"] = f"{OWN_CODE}|{OWN_FILE}"
    for section, key, names in (
        ("SearchSpec", "method", known_names(SAMPLERS)),
        ("CommunicationSpec", "codec", codec_names()),
    ):
        values = schema["$defs"][section]["properties"]
        values[key] = _named(values[key], ("auto", *names))
    for form in properties["communication"]["anyOf"]:
        if "pattern" in form:
            form["pattern"] = text_pattern(codec_names())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Yunlu job",
        "description": "One training job: what is asked, never how.",
    }


def schema_at(path: KeyPath) -> Schema | None:
    """The part of the schema that a value at the path must meet; None where no such key exists."""
    schema: Schema | None = _plain_schema()
    for part in path:
        schema = _child(schema, part) if schema is not None else None
    return schema


def alternatives(schema: Schema) -> Iterator[Schema]:
    """The forms a value may take, with references followed."""
    if "$ref" in schema:
        yield _plain_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    elif "anyOf" in schema:
        for part in schema["anyOf"]:
            yield from alternatives(part)
    else:
        yield schema


def keys_of(schema: Schema) -> list[str]:
    """The keys a mapping may have here; none where any key may stand."""
    return [key for form in alternatives(schema) for key in form.get("properties", {})]


def homes_of(key: str) -> list[KeyPath]:
    """Every place in a job where this key may stand; in its search only where nowhere else."""
    matching_paths = [path for path in known_paths() if path[-1] == key]
    return [path for path in matching_paths if path[0] != "search"] or matching_paths


def known_paths() -> list[KeyPath]:
    """Every key of a job, with the way to it."""
    return list(_all_paths(_plain_schema(), ()))


def home_of(spec: str) -> KeyPath | None:
    """Where the section built by a class such as ``TrainSpec`` stands in a job."""
    if spec == Job.__name__:
        return ()
    for path in _all_paths(_plain_schema(), ()):
        if any(form.get("title") == spec for form in alternatives(schema_at(path) or {})):
            return path
    return None


@cache
def _plain_schema() -> Schema:
    return Job.model_json_schema()


def _child(schema: Schema, part: str | int) -> Schema | None:
    for form in alternatives(schema):
        if isinstance(part, int):
            fixed = form.get("prefixItems", [])
            if fixed or "items" in form:
                return fixed[part] if part < len(fixed) else form.get("items", {})
        elif part in form.get("properties", {}):
            return form["properties"][part]
        elif isinstance(form.get("additionalProperties"), (dict, bool)) and _is_open(form):
            values = form["additionalProperties"]
            return values if isinstance(values, dict) else {}
    return None


def _is_open(form: Schema) -> bool:
    return form["additionalProperties"] is not False


def _all_paths(schema: Schema, path: KeyPath) -> Iterator[KeyPath]:
    for form in alternatives(schema):
        for key, child in form.get("properties", {}).items():
            yield (*path, key)
            yield from _all_paths(child, (*path, key))


def _named(schema: Schema, names: tuple[str, ...]) -> Schema:
    """A name on offer, or the user's own ``module:Class``."""
    about = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    own = {
        "type": "string",
        "pattern": f"{OWN_CODE}|{OWN_FILE}",
        "patternErrorMessage": "a known name, or your own module:Class",
    }
    return {**about, "anyOf": [{"type": "string", "enum": list(names)}, own]}


def _tidy(schema: Any) -> None:
    """Drop what clutters an editor: generated titles, defaults of whole sections, doubled ticks."""
    if isinstance(schema, list):
        for item in schema:
            _tidy(item)
    if not isinstance(schema, dict):
        return
    for key, part in list(schema.items()):
        if key in {"properties", "$defs"}:
            for child in part.values():
                _tidy(child)
        elif (key == "title" and isinstance(part, str)) or (
            key == "default" and isinstance(part, dict)
        ):
            del schema[key]
        elif key == "description":
            schema[key] = part.replace("``", "`")
        else:
            _tidy(part)


@dataclass(frozen=True, slots=True)
class ValidationFinding:
    """What is wrong at one path of the data."""

    path: KeyPath
    message: str
    at_key: bool = False
    """Whether the key itself is wrong, rather than its value."""


def explain(error: ValidationError, data: Any = None) -> list[ValidationFinding]:
    """Every fault once: the branches of a union speak of the same key.

    ``data`` is what was validated; without it the validator's own record of each value serves.
    """
    # In Python a section can be built, and refused, on its own.
    home = home_of(error.title) or ()
    findings: dict[KeyPath, ValidationFinding] = {}
    missing: defaultdict[KeyPath, list[str]] = defaultdict(list)
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


def _find(fault: ErrorDetails, location: KeyPath, data: Any) -> ValidationFinding:
    if fault["type"] in {"extra_forbidden", "invalid_key"}:
        at = (*_real_path(location[:-1]), str(location[-1]))
        return _unknown_key(at, fault["input"], data)
    path = _real_path(location)
    if fault["type"] == "conflict":
        context = fault.get("ctx", {})
        return ValidationFinding((*path, context["key"]), context["message"], at_key=True)
    written, value = (path, fault["input"]) if data is None else _as_written(path, data)
    schema = schema_at(path) or {}
    message = f"expected {describe_type(schema)}, got {show_value(value)}"
    guesses = get_close_matches(value, _choices(schema), n=2) if isinstance(value, str) else []
    if answer := answer_value(".".join(str(part) for part in path), value):
        message += f"; {answer}"
    elif guesses:
        message += f"; did you mean {_listing([repr(guess) for guess in guesses])}?"
    return ValidationFinding(written, message)


def _unknown_key(path: KeyPath, value: Any = None, data: Any = None) -> ValidationFinding:
    key, known = str(path[-1]), keys_of(schema_at(path[:-1]) or {})
    homes = homes_of(key)
    if not homes and (answer := answer_key(key, value, _beside(path, value, data))):
        return ValidationFinding(path, answer, at_key=True)
    if nearest(key, known) is None and len(homes) == 1:
        return ValidationFinding(
            path, f"unknown key here; it belongs at {show_path(homes[0])}", at_key=True
        )
    return ValidationFinding(path, f"unknown key; {did_you_mean(key, known)}", at_key=True)


def _beside(path: KeyPath, value: Any, data: Any) -> dict[Any, Any]:
    """The section that holds the key; of what cannot be looked up, the key alone."""
    section: Any = data
    for part in path[:-1]:
        section = section.get(part) if isinstance(section, dict) else None
    beside = section if isinstance(section, dict) else {path[-1]: value}
    # Elsewhere a batch is said per device: the job's number of them is part of the answer.
    devices = data.get("devices") if isinstance(data, dict) else None
    return beside if devices is None else {"devices": devices, **beside}


def _guess(finding: ValidationFinding) -> str | None:
    known = keys_of(schema_at(finding.path[:-1]) or {})
    return nearest(str(finding.path[-1]), known) if finding.at_key else None


def _missing(path: KeyPath, keys: list[str]) -> ValidationFinding:
    names = _listing([repr(key) for key in keys], last="and")
    return ValidationFinding(path, f"missing required key{'s' if len(keys) > 1 else ''} {names}")


def _real_path(location: KeyPath) -> KeyPath:
    """The part of a validator's location that stands in the job: union branches do not."""
    path: KeyPath = ()
    for part in location:
        if schema_at((*path, part)) is None:
            break
        path = (*path, part)
    return path


def _as_written(path: KeyPath, data: Any) -> tuple[KeyPath, Any]:
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
