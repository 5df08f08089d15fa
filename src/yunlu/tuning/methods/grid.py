"""Every setting of a grid, each once."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError
from yunlu.tuning.space import drop_absent, key_of, list_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from yunlu.tuning.values import Dimension, Params, StudySnapshot

_MOST_SETTINGS = 100_000


def list_settings(
    dimensions: Sequence[Dimension], points: Mapping[str, int] | None = None
) -> Iterator[Params]:
    """Every setting once, the last dimension moving fastest.

    Args:
        dimensions: What varies.
        points: How many values are taken of ranges without a step.
    """
    values = [list_values(d, points=(points or {}).get(d.name)) for d in dimensions]
    came: set[Any] = set()
    has_conditions = any(dimension.when for dimension in dimensions)
    for row in itertools.product(*values):
        params: Params = {d.name: value for d, value in zip(dimensions, row, strict=True)}
        if has_conditions:
            params = drop_absent(params, dimensions)
            key = key_of(params)
            if key in came:
                continue
            came.add(key)
        yield params


class GridSampler:
    """A grid in random order: an early end has covered all of it evenly."""

    def __init__(
        self,
        dimensions: Sequence[Dimension],
        *,
        seed: int,
        points: Mapping[str, int] | None = None,
        allowed: Callable[[Params], bool] | None = None,
    ) -> None:
        """All combinations that are allowed."""
        _refuse_endless(dimensions, points or {})
        self._settings = list(list_settings(dimensions, points))
        random.Random(seed).shuffle(self._settings)  # noqa: S311 - an order, not a secret
        self._allowed = allowed
        self._verdicts: dict[int, bool] = {}

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        """The next one of the list that is allowed and that no trial has had."""
        tried = {key_of(trial.params) for trial in snapshot.trials}
        for index, params in enumerate(self._settings):
            if key_of(params) not in tried and self._may(index, params):
                return dict(params)
        return None

    def _may(self, index: int, params: Params) -> bool:
        if index not in self._verdicts:
            self._verdicts[index] = self._allowed is None or self._allowed(params)
        return self._verdicts[index]


def _refuse_endless(dimensions: Sequence[Dimension], points: Mapping[str, int]) -> None:
    values = {d.name: list_values(d, points=points.get(d.name)) for d in dimensions}
    if endless := [name for name, result in values.items() if not result]:
        raise JobError(
            f"search.method: grid tries every setting, but {', '.join(endless)} may be any number.",
            hint="say how many values to take ('1e-4 .. 1e-1 log count 4'), a step, or list them",
        )
    count = math.prod(len(value) for value in values.values())
    if count > _MOST_SETTINGS:
        raise JobError(
            f"search.method: a grid of {count:,} settings is more than {_MOST_SETTINGS:,}.",
            hint="take fewer values of each field, or another method, such as sobol",
        )
