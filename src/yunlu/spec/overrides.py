"""``--set a.b=c``: change one value of a job before it is validated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from yunlu.spec.explain import show_value
from yunlu.spec.job import SHORTHANDS, SPELLINGS
from yunlu.spec.problems import InvalidJobError, Path, Problem, show_path
from yunlu.spec.source import Document, Place, parse

if TYPE_CHECKING:
    from collections.abc import Sequence


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with each ``key=value`` put in place, in order; the value is read as YAML."""
    for override in overrides:
        document = _apply(document, override)
    return document


def _apply(document: Document, override: str) -> Document:
    key, equals, text = override.partition("=")
    key = key.strip()
    path = tuple(key.split("."))
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
    place = Place(override=key)
    # Sections that the override had to create are its own too: a misspelt one is its mistake.
    created = {path[:n]: place for n in range(1, len(path)) if path[:n] not in document.keys}
    below = {(*path, *rest): place for rest in value.values}
    changed = replace(
        document,
        data=data,
        keys={**_without(document.keys, path), **created, **below},
        values={**_without(document.values, path), **created, **below},
    )
    return _with_problems(changed, key, *(problem.message for problem in value.problems))


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
    elif above in SPELLINGS and isinstance(data, str):
        spelt = SPELLINGS[above](data)
        data = data if spelt is None else spelt
    if not isinstance(data, dict):
        raise _NoRoom(f"{show_path(above)} is {show_value(data)}, which has no keys; set it whole")
    section = cast("dict[str, Any]", data)
    key, rest = path[0], path[1:]
    return {**section, key: _put(section.get(key), rest, value, (*above, key))}


def _without(places: dict[Path, Place], path: Path) -> dict[Path, Place]:
    return {at: place for at, place in places.items() if at[: len(path)] != path}


def _with_problems(document: Document, key: str, *messages: str) -> Document:
    found = tuple(Problem(key=key, message=message, override=key) for message in messages)
    return replace(document, problems=(*document.problems, *found))
