"""YAML with source locations, and the problems of a job that point to them.

Numbers and switches follow YAML 1.2: ``1e-3`` is a number, ``no`` and dates are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from yunlu.core.errors import JobError
from yunlu.core.limits import read_limits
from yunlu.core.secrets import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KeyPath = tuple[str | int, ...]
"""The way from the top of a job to one value: keys, and positions in lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to mend. Line and column count from 1; absent for overrides and Python callers."""

    key: str
    message: str
    line: int | None = None
    column: int | None = None
    override: str | None = None
    """The key of the ``--set`` that brought it in."""

    def __str__(self) -> str:
        if self.override is not None:
            index = f"--set {self.override}"
            parts = (index, "" if self.key == self.override else self.key, self.message)
        else:
            index = f"line {self.line}" if self.line else ""
            index += f", column {self.column}" if self.line and self.column else ""
            parts = (index, self.key, self.message)
        return ": ".join(part for part in parts if part)


class InvalidJobError(JobError):
    """A job with problems: all of them, in the order they stand in the file."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where = where
        # Whoever prints them: a message may quote what stands in the job.
        shown = [replace(problem, message=mask(problem.message)) for problem in problems]
        self.problems = tuple(sorted(shown, key=_position))
        count = len(self.problems)
        title = f"{where}: {count} problem{'s' if count > 1 else ''}"
        super().__init__("\n".join([title, *(f"  {problem}" for problem in self.problems)]))


def show_path(path: KeyPath) -> str:
    """``("train", "betas", 1)`` → ``train.betas[1]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _position(problem: Problem) -> tuple[int, int]:
    # What came by --set stands after what stands in the file.
    return (problem.line or 2**31, problem.column or 0)


_MOST_DIGITS = 400
"""Of a whole number: the largest float has 309."""
_MOST_VALUES = 100_000
"""Aliases can multiply a few lines into millions of values; no honest job is this long."""


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where something stands: in the file, or in a ``--set``."""

    line: int | None = None
    column: int | None = None
    override: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDocument:
    """Data as read, with the places of its keys and values and what was wrong on the way."""

    data: Any
    keys: dict[KeyPath, SourceLocation] = field(default_factory=dict[KeyPath, SourceLocation])
    values: dict[KeyPath, SourceLocation] = field(default_factory=dict[KeyPath, SourceLocation])
    problems: tuple[Problem, ...] = ()

    def problem(self, path: KeyPath, message: str, *, at_key: bool = False) -> Problem:
        """A problem with the value (or key) at the path, or with the nearest thing that stands."""
        index = self.keys.get(path) if at_key else None
        for length in range(len(path), -1, -1):
            index = index or self.values.get(path[:length])
        index = index or SourceLocation()
        return Problem(
            key=show_path(path),
            message=message,
            line=index.line,
            column=index.column,
            override=index.override,
        )


def parse(text: str, *, where: str) -> SourceDocument:
    """Read YAML (or JSON, which is YAML). Text that is not YAML at all raises at once."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        index = SourceLocation(mark.line + 1, mark.column + 1) if mark else SourceLocation()
        _refuse(where, _syntax_words(error), index)
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        parts = f"the character {chr(error.character)!r} is not allowed in YAML"
        _refuse(where, parts, SourceLocation(len(before), len(before[-1]) + 1))
    except RecursionError:
        levels = f"more than {read_limits().depth} levels"
        _refuse(where, f"nested too deeply: {levels}", SourceLocation())
    if node is None:
        return SourceDocument(data=None)
    reader = _Reader(where)
    data = reader.read(node, ())
    return SourceDocument(
        data=data, keys=reader.keys, values=reader.values, problems=tuple(reader.problems)
    )


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema: PyYAML's own is 1.1, where 1e-3 is text and ``no`` is false."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own name and form)


_DIGITS = list("0123456789")
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", ["-", "+", *_DIGITS]),
    ("float", _FLOAT, ["-", "+", ".", *_DIGITS]),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


class _Reader:
    """Turns nodes into plain data, noting places; goes on after a problem to find the next."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.keys: dict[KeyPath, SourceLocation] = {}
        self.values: dict[KeyPath, SourceLocation] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._count = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        """The plain value of a node."""
        self.values[path] = _place(node)
        self._spend(node, path)
        if len(path) > read_limits().depth:
            self._report(node, (), f"nested too deeply: more than {read_limits().depth} levels")
            raise InvalidJobError(self._where, self.problems)
        if id(node) in self._open:
            return self._report(node, path, "refers to itself")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._read_mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._read_scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node, is_merged in self._pairs(node, path):
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(key_node, path, "a key must be a word, not a list or mapping")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key not in result:
                self.keys[here] = _place(key_node)
                result[key] = self.read(value_node, here)
            elif not is_merged:
                first = self.keys[here].line
                self._report(key_node, here, f"duplicate key; first defined on line {first}")
        return result

    def _pairs(
        self, node: yaml.Node, path: KeyPath, inside: frozenset[int] = frozenset()
    ) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """A mapping's own pairs, then those of ``<<: *base``, which never replace an own key."""
        self._spend(node, path)
        if id(node) in inside:
            self._report(node, path, "refers to itself")
        elif isinstance(node, yaml.SequenceNode) and inside:
            for item in node.value:
                yield from self._pairs(item, path, inside | {id(node)})
        elif isinstance(node, yaml.MappingNode):
            merges = [value for key, value in node.value if key.tag == _MERGE]
            for key, value in node.value:
                if key.tag != _MERGE:
                    yield key, value, bool(inside)
            for base in merges:
                for key, value, _ in self._pairs(base, path, inside | {id(node)}):
                    yield key, value, True
        else:
            self._report(node, path, "'<<' takes a mapping, or a list of mappings")

    def _read_scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        read = _SCALARS.get(node.tag)
        if read is None:
            return self._report(node, path, f"the tag {node.tag!r} is not allowed here")
        try:
            return read(node.value)
        except ValueError:
            return self._report(node, path, f"{node.value[:20]!r} is not a number that can be read")

    def _spend(self, node: yaml.Node, path: KeyPath) -> None:
        self._count += 1
        if self._count > _MOST_VALUES:
            self._report(node, path, f"more than {_MOST_VALUES:,} values, counting aliases")
            raise InvalidJobError(self._where, self.problems)

    def _report(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        index = _place(node)
        self.problems.append(
            Problem(key=show_path(path), message=message, line=index.line, column=index.column)
        )


def _place(node: yaml.Node) -> SourceLocation:
    return SourceLocation(node.start_mark.line + 1, node.start_mark.column + 1)


def _join_surrogates(text: str) -> str:
    """JSON writes rare characters as two escapes, which YAML leaves as two halves."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:  # Python itself stops at 4,300, but only where they are decimal
        raise ValueError(text)
    return int(text, 0 if text[:2] in {"0x", "0o"} else 10)


_MERGE = "tag:yaml.org,2002:merge"
_SCALARS: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:null": lambda _: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:int": _whole,
    "tag:yaml.org,2002:float": lambda text: float(
        text.lower().replace(".inf", "inf").replace(".nan", "nan")
    ),
    "tag:yaml.org,2002:str": _join_surrogates,
}


def _syntax_words(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem or error.context)
    if "'\\t'" in problem:
        return "not valid YAML: a tab; indent with spaces"
    context = f" {error.context}" if error.context else ""
    return f"not valid YAML: {problem}{context}"


def _refuse(where: str, message: str, location: SourceLocation) -> NoReturn:
    problem = Problem(key="", message=message, line=location.line, column=location.column)
    raise InvalidJobError(where, [problem]) from None
