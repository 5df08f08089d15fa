"""The job as JSON Schema: what editors complete from, and what error messages are worded from."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from yunlu.spec.entry_points import OWN_CODE, TASKS, TRACKERS, known_names
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.spec.problems import Path

Schema = dict[str, Any]


def job_schema() -> Schema:
    """The schema of a job file, naming the tasks and trackers that are installed here."""
    schema = deepcopy(_plain_schema())
    _tidy(schema)
    properties = schema["properties"]
    properties["task"] = _named(properties["task"], known_names(TASKS))
    trackers = properties["trackers"]
    trackers["items"] = _named(trackers["items"], known_names(TRACKERS))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Yunlu job",
        "description": "One training job: what is asked, never how.",
    }


def schema_at(path: Path) -> Schema | None:
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


def homes_of(key: str) -> list[Path]:
    """Every place in a job where this key may stand; in its search only where nowhere else."""
    matching_paths = [path for path in known_paths() if path[-1] == key]
    return [path for path in matching_paths if path[0] != "search"] or matching_paths


def known_paths() -> list[Path]:
    """Every key of a job, with the way to it."""
    return list(_all_paths(_plain_schema(), ()))


def home_of(spec: str) -> Path | None:
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


def _all_paths(schema: Schema, path: Path) -> Iterator[Path]:
    for form in alternatives(schema):
        for key, child in form.get("properties", {}).items():
            yield (*path, key)
            yield from _all_paths(child, (*path, key))


def _named(schema: Schema, names: tuple[str, ...]) -> Schema:
    """A name on offer, or the user's own ``module:Class``."""
    about = {key: schema[key] for key in ("title", "description") if key in schema}
    own = {
        "type": "string",
        "pattern": OWN_CODE,
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
