"""``--set a.b=c``: override values of a job before or after validation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from yunlu.core.errors import JobError
from yunlu.core.value import Value
from yunlu.spec.job import SHORTHANDS, SPELLINGS, Job
from yunlu.spec.schema import show_value
from yunlu.spec.search import spell_range
from yunlu.spec.source import (
    InvalidJobError,
    Path,
    Problem,
    SourceDocument,
    SourceLocation,
    parse,
    show_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def apply_overrides(document: SourceDocument, overrides: Sequence[str]) -> SourceDocument:
    """The document with each ``key=value`` put in place, in order; the value is read as YAML."""
    for override in overrides:
        document = _apply(document, override)
    return document


def lay_fields(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with these dotted fields set, and without its search.

    A bare value for a section that takes one (``train.optimizer``) leaves the section's other keys
    as they are. What does not fit raises pydantic's ``ValidationError``.
    """
    data: Any = job.model_dump(mode="json", exclude_unset=True, exclude={"search"})
    for name in sorted(values, key=lambda name: name.count(".")):  # sections before their keys
        path, value = tuple(name.split(".")), values[name]
        if path in SHORTHANDS and isinstance(value, (str, int, float)):
            path = (*path, SHORTHANDS[path])
        elif path[-1].isdecimal():
            path, value = path[:-1], _with_item(job, data, path, value)
        try:
            data = _put(data, path, value)
        except _NoRoom as error:
            raise JobError(f"{name}: {error}.") from None
    return Job.model_validate(data)


def field_value(job: Job, name: str) -> Any:
    """What the job itself says at a dotted field, as plain data; ``KeyError`` where nothing stands."""
    result: Any = job
    for part in name.split("."):
        try:
            if isinstance(result, Value):
                result = getattr(result, part)
            else:
                result = result[int(part) if isinstance(result, (list, tuple)) else part]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise KeyError(name) from None
    return result.model_dump(mode="json") if isinstance(result, Value) else result


def _with_item(job: Job, data: Any, path: tuple[str, ...], value: Any) -> list[Any]:
    """A list of the job with one of its items replaced: ``train.optimizer.betas.0``."""
    result: Any = data
    try:
        for part in path[:-1]:
            result = result[part]
    except (KeyError, TypeError):  # not said: the default
        result = field_value(job, ".".join(path[:-1]))
    items = list(result)
    items[int(path[-1])] = value
    return items


def _apply(document: SourceDocument, override: str) -> SourceDocument:
    key, equals, text = override.partition("=")
    key = key.strip()
    path = _path_of(key, document.data)
    if not equals or not all(path):
        return _with_problems(
            document, key or override, "expected KEY=VALUE, such as train.epochs=3"
        )
    try:
        value = parse(text, where=override)
        data = _put(document.data, path, value.data)
    except InvalidJobError as error:
        return _with_problems(document, key, *(problem.message for problem in error.problems))
    except _NoRoom as error:
        return _with_problems(document, key, str(error))
    index = SourceLocation(override=key)
    # Sections that the override had to create are its own too: a misspelt one is its mistake.
    created = {path[:n]: index for n in range(1, len(path)) if path[:n] not in document.keys}
    below = {(*path, *rest): index for rest in value.values}
    changed = replace(
        document,
        data=data,
        keys={**_without(document.keys, path), **created, **below},
        values={**_without(document.values, path), **created, **below},
    )
    return _with_problems(changed, key, *(problem.message for problem in value.problems))


def _path_of(key: str, data: Any) -> tuple[str, ...]:
    """The way to a key; what follows ``search.space`` is the dotted name of a field, one key."""
    path = tuple(key.split("."))
    if path[:2] != ("search", "space") or len(path) < 4 or not all(path):
        return path
    name = path[2:]
    search = cast("Any", data).get("search") if isinstance(data, dict) else None
    space = search.get("space") if isinstance(search, dict) else None
    for end in range(1, len(name)):
        if isinstance(space, dict) and ".".join(name[:end]) in space:
            return ("search", "space", ".".join(name[:end]), *name[end:])
    return ("search", "space", ".".join(name))


class _NoRoom(Exception):  # noqa: N818 (never leaves this file)
    """A value stands where the override needs a mapping."""


def _put(data: Any, path: tuple[str, ...], value: Any, above: tuple[str, ...] = ()) -> Any:
    """A copy of the data with the value at the path."""
    if not path:
        return value
    if data is None:
        data = {}
    if above in SHORTHANDS and isinstance(data, (str, int, float)):
        data = {SHORTHANDS[above]: data}
    elif spell := _spelling(above, data):
        spelt = spell(cast("str", data))
        data = data if spelt is None else spelt
    elif above[:2] == ("search", "space") and isinstance(data, list):
        data = {"choice": cast("list[Any]", data)}
    if not isinstance(data, dict):
        raise _NoRoom(f"{show_path(above)} is {show_value(data)}, which has no keys; set it whole")
    section = cast("dict[str, Any]", data)
    key, rest = path[0], path[1:]
    return {**section, key: _put(section.get(key), rest, value, (*above, key))}


def _spelling(above: tuple[str, ...], data: Any) -> Callable[[str], dict[str, Any] | None] | None:
    if not isinstance(data, str):
        return None
    is_dimension = above[:2] == ("search", "space") and len(above) == 3
    return spell_range if is_dimension else SPELLINGS.get(above)


def _without(places: dict[Path, SourceLocation], path: Path) -> dict[Path, SourceLocation]:
    return {at: index for at, index in places.items() if at[: len(path)] != path}


def _with_problems(document: SourceDocument, key: str, *messages: str) -> SourceDocument:
    result = tuple(Problem(key=key, message=message, override=key) for message in messages)
    return replace(document, problems=(*document.problems, *result))
