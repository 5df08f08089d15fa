"""Availability of spot: a hazard model of up and down spells, and the history of a zone.

Spot comes and goes in spells. How soon a spell ends depends on how long it has lasted (young spells
end soon, old ones last), on how much of the recent past spot was up, an average that forgets, and on
the place: how many spells ended there against how many the model expected (a Gamma prior around 1
that every spell updates). All of it is known to anyone who has watched; nothing else is used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.spot.values import HOUR_S

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

AGE_EDGES_S = tuple(HOUR_S * hours for hours in (0.2, 0.5, 1.0, 2.5, 6.0))
"""Where a spell passes from one age to the next; the last age has no end."""
SHARES = np.linspace(0.0, 1.0, 6)
"""Shares of the past in which spot was up that the plan tells apart."""
_AGES = len(AGE_EDGES_S) + 1
_STATES = 2 * _AGES * len(SHARES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotModel:
    """Rates at which spells end: ``exp(by_age[age] + of_share . (share, share^2))`` an hour."""

    memory_s: float
    """How fast the past is forgotten."""
    prior_share: float
    """How much spot is up in a place of which nothing is known."""
    up_by_age: tuple[float, ...]
    up_of_share: tuple[float, float]
    down_by_age: tuple[float, ...]
    down_of_share: tuple[float, float]
    place_weight: float
    """Number of spells of a zone that weigh as much as the prior."""
    place_memory_s: float
    """How fast spells of a zone are forgotten."""

    def scaled(self, *, up: float, down: float) -> SpotModel:
        """The model of a zone where spells end so many times as fast."""
        return replace(
            self,
            up_by_age=tuple(value + math.log(up) for value in self.up_by_age),
            down_by_age=tuple(value + math.log(down) for value in self.down_by_age),
        )

    def rate_per_s(self, is_up: bool, age_s: float, share: float) -> float:
        """Rate at which a spell ends."""
        by_age = self.up_by_age if is_up else self.down_by_age
        slope, bend = self.up_of_share if is_up else self.down_of_share
        level = by_age[bisect_right(AGE_EDGES_S, age_s)]
        return math.exp(level + slope * share + bend * share * share) / HOUR_S

    def rates_per_s(self, is_up: bool) -> NDArray[np.float64]:
        """Rate at which a spell ends, by age (rows) and share of the past (columns)."""
        by_age = self.up_by_age if is_up else self.down_by_age
        slope, bend = self.up_of_share if is_up else self.down_of_share
        logs = np.asarray(by_age)[:, None] + slope * SHARES[None, :] + bend * SHARES[None, :] ** 2
        return np.exp(logs) / HOUR_S

    def transitions(self, step_s: float) -> csr_array:
        """Chances of each state after one step; see ``state_of`` for their order."""
        from scipy.sparse import csr_array  # noqa: PLC0415 - a quarter of a second to import

        rows: list[int] = []
        columns: list[int] = []
        chances: list[float] = []
        retained = math.exp(-step_s / self.memory_s)
        widths = np.diff((0.0, *AGE_EDGES_S))
        for is_up in (False, True):
            ends = 1 - np.exp(-self.rates_per_s(is_up) * step_s)
            for age in range(_AGES):
                older = min(1.0, step_s / widths[age]) if age < len(widths) else 0.0
                for column, share in enumerate(SHARES):
                    end = float(ends[age, column])
                    for near, weight in _spread(share * retained + is_up * (1 - retained)):
                        here = _index(is_up, age, column)
                        nexts = (
                            (_index(not is_up, 0, near), end),
                            (_index(is_up, min(age + 1, _AGES - 1), near), (1 - end) * older),
                            (_index(is_up, age, near), (1 - end) * (1 - older)),
                        )
                        for column_to, chance in nexts:
                            rows.append(here)
                            columns.append(column_to)
                            chances.append(weight * chance)
        # Entries that meet (the oldest age) are added up.
        return csr_array((chances, (rows, columns)), shape=(_STATES, _STATES))


@dataclass(slots=True)
class SpotHistory:
    """History of a zone: updated at each tick with whether spot is up."""

    model: SpotModel
    share: float = field(init=False)
    age_s: float = field(default=AGE_EDGES_S[2], init=False)
    is_up: bool | None = field(default=None, init=False)
    ended: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)
    """Spells that ended, down and up, the older the less they count."""
    expected: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)
    """How many the model would have had end."""

    def __post_init__(self) -> None:
        self.share = self.model.prior_share

    def observe(self, is_up: bool, step_s: float) -> None:
        """One tick has begun in which spot is up, or not."""
        before = self.is_up
        if before is not None:
            model = self.model
            forgotten = math.exp(-step_s / model.place_memory_s)
            self.ended = [count * forgotten for count in self.ended]
            self.expected = [count * forgotten for count in self.expected]
            self.expected[before] += step_s * model.rate_per_s(before, self.age_s, self.share)
            self.ended[before] += is_up is not before
            retained = math.exp(-step_s / model.memory_s)
            self.share = self.share * retained + before * (1 - retained)
            self.age_s = self.age_s + step_s if is_up is before else 0.0
        self.is_up = is_up

    def factor(self, is_up: bool) -> float:
        """How many times as fast as in the model spells end here: posterior mean."""
        weight = self.model.place_weight
        return (weight + self.ended[is_up]) / (weight + self.expected[is_up])

    @property
    def state(self) -> int:
        """The state of ``transitions`` that is nearest."""
        return state_of(bool(self.is_up), self.age_s, self.share)


def state_of(is_up: bool, age_s: float, share: float) -> int:
    """Which state of the model this is."""
    age = bisect_right(AGE_EDGES_S, age_s)
    return _index(is_up, age, round(share * (len(SHARES) - 1)))


def up_states() -> NDArray[np.bool_]:
    """For each state, whether spot is up in it."""
    return np.arange(_STATES) >= _STATES // 2


def _index(is_up: bool, age: int, share: int) -> int:
    return (is_up * _AGES + age) * len(SHARES) + share


def _spread(share: float) -> tuple[tuple[int, float], ...]:
    """The grid points around a share, with their weights."""
    index = share * (len(SHARES) - 1)
    low = min(int(index), len(SHARES) - 2)
    return ((low, low + 1 - index), (low + 1, index - low))
