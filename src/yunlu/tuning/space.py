"""The space of a search: from a job's ``search`` to dimensions, and from a setting back to a job.

A setting holds scalars. A choice that is a list or a mapping is stored as its JSON text
(``"[128, 64]"``); ``apply_params`` puts the list itself into the job.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from yunlu.core.errors import JobError
from yunlu.spec.load import field_value, find_faults, lay_fields, parents_first, wanted_values
from yunlu.spec.schema import explain
from yunlu.spec.search import UnclearConstraintError, decode_value, encode_value, read_constraint
from yunlu.spec.source import InvalidJobError, Problem, show_path
from yunlu.tuning.values import Dimension

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.spec.job import Job
    from yunlu.spec.search import DimensionSpec, SearchSpec
    from yunlu.tuning.values import Params, ParamValue

_DRAWS = 2000
"""Settings drawn to test whether any is allowed."""
_DRAWS_PER_VALUE = 50


def find_dimensions(job: Job) -> tuple[Dimension, ...]:
    """Dimensions, each after those it depends on; refuses a search that does not fit the job."""
    if job.search is None:
        raise JobError(
            "The job has no search section: nothing in it varies.",
            hint="add one, such as: search: {space: {train.optimizer.lr: 1e-4 .. 1e-1 log}}",
        )
    if faults := find_faults(job):
        problems = [Problem(key=show_path(f.path), message=f.message) for f in faults]
        raise InvalidJobError(job.name or "job", problems)
    dimensions = make_dimensions(job.search)
    _check_possible(job, dimensions)
    return dimensions


def make_dimensions(search: SearchSpec) -> tuple[Dimension, ...]:
    """Dimensions as the methods see them, each after those it depends on."""
    return tuple(_make_dimension(name, search.space[name]) for name in parents_first(search))


def apply_params(job: Job, params: Params) -> Job:
    """The job with the setting applied, and without its search."""
    space = job.search.space if job.search else {}
    values = {
        name: decode_value(space[name], value) if name in space else value
        for name, value in params.items()
    }
    try:
        return lay_fields(job, values)
    except ValidationError as error:
        raise JobError(f"{_show(params)}: {_words(error)}.") from None


def drop_absent(params: Params, dimensions: Sequence[Dimension]) -> Params:
    """The setting without the dimensions that do not exist beside its other values."""
    known = {dimension.name: dimension for dimension in dimensions}

    def exists(name: str) -> bool:
        return name in params and all(
            exists(parent) and _is_among(params[parent], values)
            for parent, values in known[name].when.items()
        )

    return {name: value for name, value in params.items() if name not in known or exists(name)}


class SettingCheck:
    """Whether a setting may be tried: its constraints hold, and the job with it is valid."""

    def __init__(self, job: Job) -> None:
        """Of this job's search."""
        self._job = job
        search = job.search
        self._constraints = [
            read_constraint(text) for text in (search.constraints if search else ())
        ]
        space = search.space if search else {}
        names = {name for constraint in self._constraints for name in constraint.names}
        self._own = {name: field_value(job, name) for name in names if name not in space}
        self._space = space

    def __call__(self, params: Params) -> bool:
        """Whether this setting is allowed."""
        return not self.failing(params) and self.refusal(params) is None

    def failing(self, params: Params) -> list[str]:
        """The constraints that do not hold."""
        values = dict(self._own)
        for name, value in params.items():
            spec = self._space.get(name)
            values[name] = decode_value(spec, value) if spec else value
        try:
            return [
                constraint.text for constraint in self._constraints if not constraint.holds(values)
            ]
        except UnclearConstraintError as error:
            raise JobError(f"A constraint of the search cannot be computed: {error}.") from None

    def refusal(self, params: Params) -> str | None:
        """Error of the job with the setting; empty if it is valid."""
        try:
            apply_params(self._job, params)
        except JobError as error:
            return error.message
        return None


def key_of(params: Params) -> tuple[tuple[str, str], ...]:
    """A setting as something to compare: true is not 1."""
    return tuple(sorted((name, repr(value)) for name, value in params.items()))


def count_settings(dimensions: Sequence[Dimension]) -> float:
    """Most settings of the space; infinite for a continuous dimension."""
    return math.prod(len(values) if (values := list_values(d)) else math.inf for d in dimensions)


def list_values(dimension: Dimension, *, points: int | None = None) -> list[ParamValue]:
    """All values of a dimension, or ``points`` of a range without a step; empty where infinite."""
    if dimension.choices:
        return list(dimension.choices)
    low, high = dimension.low, dimension.high
    step = dimension.step or (1.0 if dimension.is_int and points is None else None)
    if step:
        count = math.floor((high - low) / step + 1e-9) + 1
        return [_as_value(dimension, low + index * step) for index in range(count)]
    if points is None:
        return [_as_value(dimension, low)] if low == high else []
    shares = [index / (points - 1) for index in range(points)] if points > 1 else [0.5]
    numbers = [
        low * (high / low) ** share if dimension.log else low + share * (high - low)
        for share in shares
    ]
    return list(dict.fromkeys(_as_value(dimension, min(max(n, low), high)) for n in numbers))


def _make_dimension(name: str, spec: DimensionSpec) -> Dimension:
    when = {parent: tuple(wanted_values(spec, parent)) for parent in spec.when}
    if spec.choice is not None:
        choices = tuple(encode_value(value) for value in spec.choice)
        return Dimension(name=name, choices=choices, when=when)
    assert spec.low is not None
    assert spec.high is not None
    return Dimension(
        name=name,
        low=float(spec.low),
        high=float(spec.high),
        log=spec.log,
        is_int=spec.is_int,
        step=spec.step,
        when=when,
        likely=spec.belief,
    )


def _as_value(dimension: Dimension, number: float) -> ParamValue:
    return round(number) if dimension.is_int else float(number)


def _is_among(value: ParamValue, values: Sequence[ParamValue]) -> bool:
    return any(v == value and isinstance(v, bool) == isinstance(value, bool) for v in values)


def _check_possible(job: Job, dimensions: tuple[Dimension, ...]) -> None:
    """Some setting must be allowed, and every value in some setting."""
    import numpy as np  # noqa: PLC0415 (arrays are slow to import)

    from yunlu.tuning.encoding import Encoder  # noqa: PLC0415

    allowed = SettingCheck(job)
    encoder, rng = Encoder(dimensions), np.random.default_rng(0)
    drawn = encoder.sample(rng, _DRAWS_PER_VALUE)
    if not any(allowed(params) for params in drawn):
        drawn += encoder.sample(rng, _DRAWS - len(drawn))
        if not any(allowed(params) for params in drawn[_DRAWS_PER_VALUE:]):
            _refuse_all(drawn, allowed)
    for dimension in dimensions:
        values = dimension.choices or (
            _as_value(dimension, dimension.low),
            _as_value(dimension, dimension.high),
        )
        for value in values:
            _check_value(drawn[:_DRAWS_PER_VALUE], dimension, value, dimensions, allowed.refusal)


def _refuse_all(drawn: list[Params], allowed: SettingCheck) -> None:
    failures = [set(allowed.failing(params)) for params in drawn]
    never = set.intersection(*failures)
    if never:
        text = min(never)
        raise JobError(
            f"search.constraints: no setting fulfils {text!r} ({len(drawn):,} were drawn).",
            hint="widen the space, or mend the constraint",
        )
    if all(failures):
        raise JobError(
            f"search.constraints: no setting fulfils all of them ({len(drawn):,} were drawn).",
            hint="widen the space, or remove a constraint",
        )
    refused = next(params for params, failed in zip(drawn, failures, strict=True) if not failed)
    raise JobError(
        f"search.space: the job refuses every setting, such as {allowed.refusal(refused)}",
        hint="change the job's own values, or the space",
    )


def _check_value(
    drawn: list[Params],
    dimension: Dimension,
    value: ParamValue,
    dimensions: tuple[Dimension, ...],
    refuse: Callable[[Params], str | None],
) -> None:
    """A value that contradicts the job for all other values is a mistake."""
    refusal: str | None = None
    for params in drawn:
        tried = {**params, dimension.name: value}
        for parent, wanted in dimension.when.items():
            tried[parent] = wanted[0]
        tried = drop_absent(tried, dimensions)
        if dimension.name not in tried:
            continue
        refusal = refuse(tried)
        if refusal is None:
            return
    if refusal is not None:
        raise JobError(
            f"search.space.{dimension.name}: the job refuses every setting with {value!r}, such as "
            f"{refusal}",
            hint="change the job's own values, or leave this value out",
        )


def _words(error: ValidationError) -> str:
    result = explain(error)[0]
    return f"{show_path(result.path)}: {result.message}"


def _show(params: Params) -> str:
    return ", ".join(f"{name}={cast('object', value)}" for name, value in params.items())
