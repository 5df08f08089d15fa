"""Constraints of a search: ``train.batch * data.max_length <= 8192``.

A small language: numbers, words, dotted fields, arithmetic, comparisons, and/or/not. It is read
with Python's parser but never run as Python.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LONGEST = 500
"""Characters; a longer one is a mistake."""
_DEEPEST = 50
"""Expressions within each other; a deeper one would exhaust the stack."""


class UnclearConstraintError(ValueError):
    """The text is not a constraint, or cannot be computed from these values."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One condition on the fields of a job."""

    text: str
    names: tuple[str, ...]
    """The fields it speaks of, in order."""
    tree: ast.expr

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it holds of these values; of a field that is absent it demands nothing."""
        if any(name not in values for name in self.names):
            return True
        try:
            return bool(_evaluate(self.tree, values))
        except (ZeroDivisionError, OverflowError):
            return False
        except TypeError as error:
            raise UnclearConstraintError(str(error)) from None


@cache
def read_constraint(text: str) -> Constraint:
    """The constraint that a text stands for; raises ``UnclearConstraintError``."""
    if len(text) > _LONGEST:
        raise UnclearConstraintError(f"is longer than {_LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnclearConstraintError(
            "is not an expression such as train.batch * data.max_length <= 8192"
        ) from None
    names: dict[str, None] = {}
    _check(tree, names)
    if not names:
        raise UnclearConstraintError("names no field of the job")
    if not _is_truth(tree):
        raise UnclearConstraintError("compares nothing: expected such as A <= B")
    return Constraint(text, tuple(names), tree)


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    # Whole powers can be longer than memory; of floats they overflow at once.
    ast.Pow: lambda base, power: float(base) ** power,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, among: value in among,
    ast.NotIn: lambda value, among: value not in among,
}
# YAML's words for what Python writes with a capital.
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "len": len}


def _check(node: ast.expr, names: dict[str, None], depth: int = 0) -> None:
    """Refuse what is not of the language, and note the fields."""
    if depth > _DEEPEST:
        raise UnclearConstraintError("is nested too deeply")
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return
        case ast.Name() if node.id in _WORDS:
            return
        case ast.Name() | ast.Attribute():
            names[_dotted(node)] = None
            return
        case ast.Call(func=ast.Name(id=function), keywords=[]) if function in _FUNCTIONS:
            parts = node.args
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            parts = [node.left, node.right]
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd()):
            parts = [node.operand]
        case ast.BoolOp():
            parts = node.values
        case ast.Compare(ops=ops) if all(type(op) in _COMPARISONS for op in ops):
            parts = [node.left, *node.comparators]
        case ast.List() | ast.Tuple():
            parts = node.elts
        case _:
            raise _refused(node)
    for part in parts:
        _check(part, names, depth + 1)


def _is_truth(node: ast.expr) -> bool:
    match node:
        case ast.BoolOp():
            return all(_is_truth(part) for part in node.values)
        case ast.UnaryOp(op=ast.Not()):
            return _is_truth(node.operand)
        case _:
            # A bare field can be a switch.
            return isinstance(node, ast.Compare | ast.Name | ast.Attribute)


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_dotted(node.value)}.{node.attr}"
        case _:
            raise _refused(node)


def _refused(node: ast.expr) -> UnclearConstraintError:
    return UnclearConstraintError(
        f"may not contain {ast.unparse(node)!r}: only fields, numbers, words, arithmetic, "
        f"comparisons, and, or, not, {', '.join(_FUNCTIONS)}"
    )


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:  # noqa: PLR0911 - one for each form
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            name = _dotted(node)
            return _WORDS[name] if name in _WORDS else values[name]
        case ast.Call():
            parts = [_evaluate(part, values) for part in node.args]
            return _FUNCTIONS[cast("ast.Name", node.func).id](*parts)
        case ast.BinOp():
            left, right = _evaluate(node.left, values), _evaluate(node.right, values)
            return _ARITHMETIC[type(node.op)](_as_number(left, node), _as_number(right, node))
        case ast.UnaryOp(op=ast.Not()):
            return not _evaluate(node.operand, values)
        case ast.UnaryOp():
            value = _as_number(_evaluate(node.operand, values), node)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BoolOp(op=ast.And()):
            return all(_evaluate(part, values) for part in node.values)
        case ast.BoolOp():
            return any(_evaluate(part, values) for part in node.values)
        case ast.Compare():
            return _compare(node, values)
        case ast.List() | ast.Tuple():
            return [_evaluate(part, values) for part in node.elts]
        case _:
            raise AssertionError("checked when it was read")


def _compare(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _evaluate(node.left, values)
    for op, part in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(part, values)
        if not _COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True


def _as_number(value: Any, node: ast.expr) -> Any:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} in {ast.unparse(node)} is not a number")
    return value
