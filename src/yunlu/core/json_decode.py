"""JSON of others: bounded in size and nesting, and text that every writer can write."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import ModelError, YunluError
from yunlu.core.limits import over_limit
from yunlu.core.settings import read_limits

if TYPE_CHECKING:
    from pathlib import Path

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")


class JsonError(ValueError):
    """The text is no JSON, or none that is read here."""


def decode_json(data: bytes | str, *, replace_lone: bool = False) -> Any:
    r"""Parse JSON; every fault is a ``JsonError``.

    A lone surrogate (``"\ud800"``) is half a character, which no file can hold: refused, or with
    ``replace_lone`` replaced as a decoder of damaged text would.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also bytes that are not UTF-8, and numbers of 5,000 digits
        raise JsonError(str(error)) from error
    if text.count("[") + text.count("{") > read_limits().depth:
        _check_depth(value)
    if _SURROGATE_ESCAPE.search(text) or _LONE.search(text):
        return _without_lone(value, replace=replace_lone)
    return value


def read_json(path: Path, *, kind: type[YunluError] = ModelError) -> Any:
    """Parse a JSON file of at most ``limits.document`` bytes; a fault is a ``kind`` that names it."""
    most = read_limits().document
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise over_limit(
                f"{path} is larger than {most:,} bytes, the most that is read of a JSON document",
                "document",
                path.stat().st_size,
                kind=kind,
            )
        return decode_json(data)
    except (OSError, ValueError) as error:
        raise kind(f"{path} is not readable JSON: {error}") from error


def _check_depth(value: Any) -> None:
    """Level by level: what is too deep for the parser is too deep for recursion here."""
    level = [value]
    for _ in range(read_limits().depth):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise _too_deep()


def _children(item: Any) -> list[Any]:
    """Lists and mappings inside one; a text or number is no level."""
    values = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [value for value in values if isinstance(value, dict | list)]


def _without_lone(value: Any, *, replace: bool) -> Any:
    if isinstance(value, str):
        if not _LONE.search(value):
            return value
        if not replace:
            raise JsonError(f"{value[:40]!a} holds half a character (a lone surrogate)")
        return _LONE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [_without_lone(item, replace=replace) for item in value]
    if isinstance(value, dict):
        return {
            _without_lone(key, replace=replace): _without_lone(item, replace=replace)
            for key, item in value.items()
        }
    return value


def _too_deep() -> JsonError:
    return JsonError(f"nested too deeply: more than {read_limits().depth} levels")
