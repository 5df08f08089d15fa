"""``search`` of a job: the search space with its constraints, the method and early stopping.

Constraints of a search: ``train.batch * data.max_length <= 8192``.
A small language: numbers, words, dotted fields, arithmetic, comparisons, and/or/not. It is read
with Python's parser but never run as Python.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from yunlu.core.value import Value
from yunlu.spec.fields import (
    Auto,
    Checked,
    Count,
    Deadline,
    Names,
    NotNegative,
    Positive,
    conflict,
    shorthand,
)

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


StopName = Literal["none", "median", "asha", "hyperband", "patience", "pbt"]
Direction = Literal["minimize", "maximize"]

COSTS = ("cost", "seconds")
"""Objectives that every trial has besides its metrics: dollars, and seconds of its devices."""
SEVERAL = ("grid", "random", "sobol", "tpe", "gp", "nsga2")
"""Built-in methods for several objectives."""
_ONE = ("cmaes", "frontier")
_BLIND = ("grid", "random", "sobol")
"""Methods that do not learn from what was tried."""

Bound = Annotated[
    int | Annotated[float, Field(allow_inf_nan=False)], Checked, WithJsonSchema({"type": "number"})
]


class LikelySpec(Value):
    """Where good values are believed to be."""

    at: Bound
    """The value believed best."""
    within: Positive | None = None
    """How far the best may well be from it: a difference, or for a ``log`` range a factor; a quarter of the range when not set."""


class DimensionSpec(Value):
    """The values that one field may take."""

    choice: list[JsonValue] | None = None
    """One of these: numbers, words, switches, or whole lists and mappings."""
    low: Bound | None = None
    """The smallest value of a range; whole numbers only where ``low`` and ``high`` are whole."""
    high: Bound | None = None
    """The largest value of the range."""
    log: bool = False
    """Whether ratios count rather than differences: rates, sizes."""
    step: Positive | None = None
    """The range has only every so-manieth value, from ``low`` on."""
    count: Count | None = None
    """``grid``: how many values it takes of a range without a step."""
    when: dict[str, JsonValue] = Field(default_factory=dict)
    """It varies only where these fields have this value, or one of a list of values."""
    likely: Annotated[LikelySpec, shorthand(LikelySpec, "at")] | None = None
    """What you believe: a value, or a mapping ``{at: 3e-4, within: 3}``; it is tried more often near there."""

    @property
    def is_int(self) -> bool:
        """Whether it is a range of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def belief(self) -> tuple[float, float] | None:
        """Mean and deviation in the range's own unit (log10 where ``log``)."""
        if self.likely is None or self.low is None or self.high is None:
            return None
        unit = math.log10 if self.log else float
        low, high, at = unit(self.low), unit(self.high), unit(self.likely.at)
        within = self.likely.within
        own = None if within is None else math.log10(within) if self.log else within
        return at, own or (high - low) / 4 or 1.0

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.choice is not None:
            self._check_choice(self.choice)
            return self
        if self.low is None or self.high is None:
            conflict("high" if self.high is None else "low", "a range needs low and high")
        self._check_range(self.low, self.high)
        self._check_belief(self.low, self.high)
        return self

    def _check_choice(self, choice: list[JsonValue]) -> None:
        for key in ("low", "high", "step", "count", "likely"):
            if getattr(self, key) is not None:
                conflict(key, "is of a range, but choice lists the values; remove one of them")
        if self.log:
            conflict("log", "is of a range, but choice lists the values; remove one of them")
        if not choice:
            conflict("choice", "is empty: name at least one value")
        for index, value in enumerate(choice):
            if value in choice[:index]:
                conflict("choice", f"has {_show(value)} twice")
        texts = [encode_value(value) for value in choice]
        for index, text in enumerate(texts):
            if text in texts[:index]:
                conflict("choice", f"has {_show(choice[index])} as a text and as a value")

    def _check_range(self, low: float, high: float) -> None:
        if low > high:
            conflict("high", f"{_show(high)} is below low {_show(low)}")
        if self.log and low <= 0:
            conflict("low", f"is {_show(low)}, but a log range begins above 0")
        if self.log and self.step is not None:
            conflict("step", "goes by differences and log by ratios; remove one of them")
        if self.step is not None and self.step > high - low:
            conflict("step", f"{_show(self.step)} is wider than the range")
        if self.step is not None and self.is_int and not self.step.is_integer():
            conflict("step", f"{_show(self.step)} is not whole, but low and high are")
        if self.step is not None and self.count is not None:
            conflict("count", "says how many values, and step too; remove one of them")
        if self.is_int and (low, high) == (0, 1):
            conflict(
                "high", "whole numbers from 0 to 1: write [0, 1], or 0.0 .. 1.0 for all between"
            )

    def _check_belief(self, low: float, high: float) -> None:
        if self.likely is None:
            return
        if not low <= self.likely.at <= high:
            conflict("likely", f"{_show(self.likely.at)} lies outside of the range")
        if self.log and self.likely.within is not None and self.likely.within <= 1:
            conflict("likely", "within is a factor where the range is log: above 1, such as 3")


_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = (
    rf"^\s*(?P<low>{_NUMBER})\s*\.\.\s*(?P<high>{_NUMBER})"
    rf"(?:\s+(?P<log>log))?(?:\s+step\s+(?P<step>{_NUMBER}))?(?:\s+count\s+(?P<count>\d+))?\s*$"
)


def spell_range(text: str) -> dict[str, Any] | None:
    """The mapping that ``1e-4 .. 1e-1 log`` or ``1 .. 4`` stands for; None where it is no range."""
    match = re.match(_RANGE, text)
    if match is None:
        return None
    spelt: dict[str, Any] = {"low": _number(match["low"]), "high": _number(match["high"])}
    if match["log"]:
        spelt["log"] = True
    if match["step"]:
        spelt["step"] = _number(match["step"])
    if match["count"]:
        spelt["count"] = int(match["count"])
    return spelt


def encode_value(value: JsonValue) -> float | int | str | bool | None:
    """A choice as the methods see it: lists and mappings are JSON text."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def decode_value(spec: DimensionSpec, value: Any) -> Any:
    """The choice that an encoded value stands for."""
    for choice in spec.choice or ():
        if isinstance(choice, list | dict) and encode_value(choice) == value:
            return choice
    return value


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict | bool) else f"{value!r}"


def _widen(value: Any) -> Any:
    if isinstance(value, list):
        return {"choice": cast("list[Any]", value)}
    if isinstance(value, str):
        spelt = spell_range(value)
        if spelt is None:
            raise PydanticCustomError("not_a_range", "expected a range")
        return spelt
    return value


# Python's named groups are not a schema's.
_RangeText = Annotated[
    str,
    Field(
        pattern=re.sub(r"\?P<\w+>", "", _RANGE),
        json_schema_extra={"patternErrorMessage": "a range such as '1e-4 .. 1e-1 log' or '1 .. 4'"},
    ),
]
DimensionField = Annotated[
    DimensionSpec,
    BeforeValidator(_widen, json_schema_input_type=list[JsonValue] | _RangeText | DimensionSpec),
]
"""A list of choices, a range as text, or the full form."""


class StopSpec(Value):
    """When a trial is given up before its end."""

    name: StopName | Auto = "auto"
    """``auto`` leaves it to ``frontier``; it is ``asha`` for random, sobol and tpe, else ``none``."""
    eta: Annotated[int, Field(ge=2), Checked] = 3
    """``asha`` and ``hyperband``: one of so many goes on, and so many times as long."""
    first: Count = 1
    """``median``, ``asha`` and ``hyperband``: nobody is judged before this evaluation."""
    trials: Count = 5
    """``median``: nor before so many trials have come as far."""
    patience: Count = 5
    """``patience``: evaluations without improvement."""
    min_delta: NotNegative = 0.0
    """``patience``: a smaller change does not count as improvement."""
    population: Annotated[int, Field(ge=2), Checked] = 8
    """``pbt``: how many train side by side."""
    every: Count = 1
    """``pbt``: evaluations from one comparison to the next."""
    share: Annotated[float, Field(gt=0, le=0.5), Checked] = 0.25
    """``pbt``: the worst of this share, at least one, go on as copies of the best."""

    def __str__(self) -> str:
        """As it could be written."""
        return self.name

    @model_validator(mode="after")
    def _names_what_it_sets(self) -> Self:
        """A key that would do nothing is a mistake."""
        for key, names in _STOP_KEYS.items():
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.name not in names:
                conflict(key, f"is only for {' and '.join(names)}; ask for that, or leave it out")
        return self


_STOP_KEYS = {
    "eta": ("asha", "hyperband"),
    "first": ("median", "asha", "hyperband"),
    "trials": ("median",),
    "patience": ("patience",),
    "min_delta": ("patience",),
    "population": ("pbt",),
    "every": ("pbt",),
    "share": ("pbt",),
}


def _plain_metric(name: str) -> str:
    """Scores are of the validation data anyway: ``val_loss`` is ``loss``."""
    return re.sub(r"^(val|valid|validation)[_/]", "", name)


Metric = Annotated[str, Field(min_length=1), AfterValidator(_plain_metric)]


class SearchSpec(Value):
    """Which settings ``yunlu tune`` tries, how it finds them, and when it stops."""

    space: dict[str, DimensionField]
    """Fields of the job, such as ``train.optimizer.lr``, and for each a list, a range such as ``1e-4 .. 1e-1 log``, or a mapping."""
    metric: Metric = "auto"
    """What to make good: ``loss`` or a metric of the task, on the validation data; ``auto`` is the task's own."""
    direction: Direction | Auto = "auto"
    """Whether a small or a large metric is good; ``auto`` goes by its name."""
    objectives: list[Metric] | None = None
    """Several things to make good at once, such as ``[loss, cost]``, instead of ``metric``."""
    constraints: Annotated[
        list[str],
        BeforeValidator(
            lambda value: [value] if isinstance(value, str) else value,
            json_schema_input_type=str | list[str],
        ),
    ] = Field(default_factory=list)
    """What must hold of a setting, such as ``train.batch * data.max_length <= 8192``."""
    method: str = Field(default="auto", min_length=1)
    """How settings are found: a name (``yunlu schema`` lists them) or your own ``module:Class``; ``auto`` is ``frontier``; ``tpe`` for several objectives or where ``stop`` is said, ``random`` with asha, hyperband and pbt."""
    stop: Annotated[StopSpec, shorthand(StopSpec, "name")] = StopSpec()
    """When a trial is given up early: a name such as ``asha``, or a mapping with its details."""
    trials: Count | None = None
    """The most trials."""
    budget: Positive | None = None
    """The most that all trials may cost, in dollars."""
    deadline: Deadline | None = None
    """The longest that the study may take: ``90min``, ``36h``, ``2d``."""
    parallel: Count | Auto = "auto"
    """How many trials may train at once; ``auto`` is as many as there are devices."""
    devices: Count | Auto = "auto"
    """Devices that all trials share; ``auto`` is all there are."""
    seed: Annotated[int, Field(ge=0, lt=2**32), Checked] = 0
    """Decides which settings are tried."""
    first: list[dict[str, JsonValue]] = Field(default_factory=list)
    """Settings to try first; fields they leave out are drawn."""
    warm_start: Names = Field(default_factory=list)
    """Earlier studies to learn from: their names, or URLs of Optuna storages."""
    proxy: bool = False
    """Whether to search on a narrow copy of the model and carry the best over (µP)."""

    @property
    def aims(self) -> tuple[str, ...]:
        """The objectives, the one most often."""
        return tuple(self.objectives) if self.objectives else (self.metric,)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if not self.space:
            conflict("space", "is empty: name at least one field, such as train.optimizer.lr")
        if self.objectives is not None:
            self._check_objectives(self.objectives)
        self._check_stop()
        return self

    def _check_objectives(self, objectives: list[str]) -> None:
        if not objectives:
            conflict("objectives", "is empty: name at least one, or leave it out")
        if len(set(objectives)) < len(objectives):
            conflict("objectives", "names one twice")
        if self.metric != "auto":
            conflict("metric", "objectives names what to make good; remove one of them")
        if len(objectives) < 2:
            return
        if self.direction != "auto":
            conflict("direction", "is for one metric; several objectives go by their names")
        if self.method in _ONE:
            conflict(
                "method", f"{self.method} has one objective; several go with {', '.join(SEVERAL)}"
            )
        if self.stop.name not in {"auto", "none"}:
            conflict("stop", f"{self.stop} compares by one objective; take none")

    def _check_stop(self) -> None:
        method, stop = self.method, self.stop.name
        if method == "frontier" and stop != "auto":
            conflict("stop", "frontier judges itself how far each trial is trained: leave it out")
        if stop == "pbt" and method not in {"auto", "random", "sobol"}:
            conflict("method", f"pbt finds settings itself, not with {method}; take random")
        is_blind = method in _BLIND or (method == "auto" and stop in {"asha", "hyperband", "pbt"})
        if self.warm_start and is_blind:
            text = f"method {method}" if method != "auto" else f"with stop {stop} the method"
            conflict("warm_start", f"{text} learns from no trials; take frontier or tpe")


def direction_of(metric: str, direction: Direction | Auto = "auto") -> Direction:
    """Whether a small or a large value of the metric is good."""
    if direction != "auto":
        return direction
    return "minimize" if metric in COSTS or lower_is_better(metric) else "maximize"


_FALLING = ("loss", "error", "mse", "mae", "rmse", "wer", "cer", "perplexity", "bits")


def lower_is_better(metric: str) -> bool:
    """Losses and error rates fall when a model improves; the rest rises."""
    return any(word in metric.lower() for word in _FALLING)
