"""The one table of other tools' arguments, for the errors of a job file and for ``yunlu init --from``."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from yunlu.spec.counterparts.counterpart import Counterpart, NotTakenError, Settings
from yunlu.spec.counterparts.deepspeed import DEEPSPEED
from yunlu.spec.counterparts.keras import KERAS
from yunlu.spec.counterparts.lightning import LIGHTNING
from yunlu.spec.counterparts.torchtune import TORCHTUNE
from yunlu.spec.counterparts.transformers import TRANSFORMERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TABLE: tuple[Counterpart, ...] = (*TRANSFORMERS, *LIGHTNING, *KERAS, *DEEPSPEED, *TORCHTUNE)


@cache
def by_name(tool: str) -> Mapping[str, Counterpart]:
    """The arguments of one tool by their names."""
    return {row.name: row for row in TABLE if row.tool == tool}


def flatten(settings: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """Sections with a dot between their keys: ``optimizer.params.lr``."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(cast("dict[Any, Any]", value), f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def answer_key(key: str, value: Any, beside: Settings) -> str | None:
    """What to write for a key that another tool has, and we do not; None where no tool has it."""
    for row, given_value, settings in _candidates(key, value, beside):
        try:
            taken = row.convert(given_value, settings)
        except NotTakenError as reason:
            if row.keys:
                return f"{row.tool} has {row.name}; {reason}"
            theirs = f"{_of(row.tool)} {row.name}"
            return f"{theirs} has no counterpart here: {reason}"
        remark = row.remark or f"{_of(row.tool)} name for {' and '.join(taken or row.keys)}"
        if not taken:
            return f"{remark}; leave it out: that is the default here"
        return f"{remark}; write {' and '.join(show_pair(*pair) for pair in taken.items())}"
    return None


def answer_value(key: str, value: Any) -> str | None:
    """What to write for a word that another tool uses at one of our keys."""
    for row in TABLE:
        if key not in row.keys or not isinstance(value, str | int) or isinstance(value, bool):
            continue
        chosen = _chosen(row, key, value)
        if chosen is not None and chosen != value and chosen != _chosen(row, key, _NO_WORD):
            word = f"{_of(row.tool)} word"
            return f"{word}; write {show_pair(key, chosen)}"
    return None


_NO_WORD = "?"
"""A row that takes this, too, does not say what a word means."""


def _chosen(row: Counterpart, key: str, value: Any) -> Any:
    try:
        return row.convert(value, {row.name: value}).get(key)
    except NotTakenError:
        return None


def show_pair(key: str, value: Any) -> str:
    """``train.batch: 64``, as YAML reads it."""
    is_bare = isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum()
    return f"{key}: {value if is_bare else json.dumps(value, ensure_ascii=False)}"


def _of(tool: str) -> str:
    return f"{tool}'" if tool.endswith("s") else f"{tool}'s"


def _candidates(
    key: str, value: Any, beside: Settings
) -> Iterator[tuple[Counterpart, Any, Settings]]:
    """Rows for the key; of tools that share it, first the one that knows most of its neighbours."""
    tools = dict.fromkeys(row.tool for row in TABLE)
    flat = flatten(beside)
    for tool in sorted(tools, key=lambda tool: -sum(name in by_name(tool) for name in flat)):
        rows = by_name(tool)
        if key in rows and not isinstance(value, dict):
            yield rows[key], value, flat
        elif isinstance(value, dict):
            inside = flatten(cast("dict[Any, Any]", value), f"{key}.")
            yield from (
                (rows[name], nested, inside) for name, nested in inside.items() if name in rows
            )
            if key in rows:
                yield rows[key], value, flat
        else:
            ends = [row for name, row in rows.items() if name.rpartition(".")[2] == key]
            yield from ((row, value, flat) for row in ends if row.keys)
