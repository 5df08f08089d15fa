"""Spot nodes under a deadline: hazard model of a zone, cheapest plan to the deadline, safety nets. Pure.

Prior of the spot model, before a zone was observed.
Fitted by ``python -m benchmarks.fit_spot`` on 25 public traces (365 days in all) of SkyPilot's
spot-traces: AWS K80 and V100 of autumn 2022, clusters of 4 and 16 V100 of summer 2023, preemptions of
V100 and CPU machines on AWS and GCP of spring 2023. The nine V100 zones of February 2023, on which
the policy is judged, are not among them.

Availability of spot: a hazard model of up and down spells, and the history of a zone.
Spot comes and goes in spells. How soon a spell ends depends on how long it has lasted (young spells
end soon, old ones last), on how much of the recent past spot was up, an average that forgets, and on
the place: how many spells ended there against how many the model expected (a Gamma prior around 1
that every spell updates). All of it is known to anyone who has watched; nothing else is used.

The cheapest plan to the deadline under the spot model: exact dynamic programming.
A job that has ``left`` work and ``time`` to go has ``slack = time - left``. Running keeps the slack,
waiting spends it, and so does every start. The table holds, for every time to go, slack and state of
spot, what to do when idle and when on on-demand; on spot one stays (nothing is cheaper).

Two safety nets that hold whatever spot does next: in time, and at most one restart above on-demand.
Both are kept step by step. As long as a job is not on on-demand, enough time *and* enough money are
left to start on-demand now and finish there. A step that could break this is not taken, so nothing
about the future has to be guessed for the promise to hold (the idea of a safety net: Wu et al.,
"Can't Be Late", NSDI'24, section 3.3; theirs holds back two restarts, here the next step is checked).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

HOUR_S = 3600.0


class Mode(IntEnum):
    """What the job runs on."""

    IDLE = 0
    SPOT = 1
    ON_DEMAND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineJob:
    """Work that must be done in time; spans in seconds from its start."""

    work_s: float
    """Run time without interruption."""
    deadline_s: float
    restart_s: float
    """Cost of every start: getting a node, loading, and unsaved work."""

    @property
    def is_feasible(self) -> bool:
        """Whether on-demand alone, started at once, is in time."""
        return self.deadline_s >= self.work_s + self.restart_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotMarket:
    """Availability and price of spot, tick by tick."""

    name: str
    step_s: float
    is_up: NDArray[np.bool_]
    spot_dollars_per_hour: NDArray[np.float64]
    on_demand_dollars_per_hour: float

    def __len__(self) -> int:
        return len(self.is_up)

    def cut(self, ticks: int) -> SpotMarket:
        """Its first ticks."""
        return replace(
            self, is_up=self.is_up[:ticks], spot_dollars_per_hour=self.spot_dollars_per_hour[:ticks]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotObservation:
    """What a policy observes at one tick: its progress, and spot now."""

    elapsed_s: float
    left_s: float
    """Work still to be done."""
    mode: Mode
    """What it runs on; already idle if spot has just been taken away."""
    starting_s: float
    """Rest of the current start; no work is done until then."""
    is_spot_up: bool
    spot_dollars_per_hour: float
    on_demand_dollars_per_hour: float
    spent_dollars: float
    step_s: float
    """Seconds until the next call."""


class DeadlinePolicy(Protocol):
    """A policy that meets a deadline cheaply; one object per job, called every tick."""

    name: str

    def choose(self, observed: SpotObservation) -> Mode:
        """What to run on until asked again. ``SPOT`` only while spot is up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotOutcome:
    """Cost and time of one job."""

    cost_dollars: float
    on_demand_cost_dollars: float
    """What on-demand would have cost for the work alone."""
    finished_s: float | None
    """None where the trace ended first."""
    is_late: bool
    spot_s: float
    on_demand_s: float
    starts: int
    modes: NDArray[np.int8]
    """What it ran on in each tick."""
    work_done_s: NDArray[np.float64]
    """Work done at the end of each tick."""

    @property
    def ratio(self) -> float:
        """Cost against on-demand."""
        return self.cost_dollars / self.on_demand_cost_dollars


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


PRIOR = SpotModel(
    memory_s=21_600.0,
    prior_share=0.644,
    up_by_age=(0.847, 0.369, 0.146, -0.311, -0.814, -1.252),
    up_of_share=(0.201, -1.312),
    down_by_age=(0.221, -0.324, -0.509, -1.000, -1.557, -2.778),
    down_of_share=(0.789, 0.242),
    place_weight=8.0,
    place_memory_s=604_800.0,
)


LEVELS = 300
"""Steps to the deadline; a start may divide them further."""
_MOST_STARTING = 4
"""Most steps that a start is divided into."""
_NEVER = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPlan:
    """Action in every state, and the expected cost."""

    step_s: float
    actions: NDArray[np.uint8]
    """By steps to go, state of spot and steps of slack: 3 x (when idle) + (when on on-demand)."""
    expected_dollars: NDArray[np.float64]
    """By state of spot: from the start, idle, to the end."""

    def choose(self, mode: Mode, *, time_left_s: float, left_s: float, state: int) -> Mode:
        """What to run on now."""
        slack = (time_left_s - left_s) / self.step_s
        levels, _, slacks = self.actions.shape
        level = min(max(round(time_left_s / self.step_s), 0), levels - 1)
        column = min(max(int(slack + 1e-9), 0), slacks - 1)
        packed = int(self.actions[level, state, column])
        return Mode(packed // 3 if mode is Mode.IDLE else packed % 3)


@dataclass(slots=True)
class _Level:
    """Expected costs to go, for one time to go: states x slacks."""

    idle: NDArray[np.float64]
    spot: NDArray[np.float64]
    on_demand: NDArray[np.float64]
    spot_starting: list[NDArray[np.float64]]
    """With one, two, ... steps of its start to come."""
    on_demand_starting: list[NDArray[np.float64]]


def make_spot_plan(
    job: DeadlineJob,
    model: SpotModel,
    *,
    spot_dollars_per_hour: float,
    on_demand_dollars_per_hour: float,
    levels: int = LEVELS,
) -> SpotPlan:
    """Plan one job."""
    step_s, starting = _choose_step(job, levels)
    work, slacks = math.ceil(job.work_s / step_s), int((job.deadline_s - job.work_s) / step_s) + 2
    sweep = _Sweep(
        moves=model.transitions(step_s),
        is_up=up_states()[:, None],
        spot=spot_dollars_per_hour * step_s / HOUR_S,
        on_demand=on_demand_dollars_per_hour * step_s / HOUR_S,
        starting=starting,
        fraction=0.0 if starting else job.restart_s / step_s,
        slacks=slacks,
    )
    last = work + slacks - 1
    states = sweep.is_up.shape[0]
    actions = np.zeros((last + 1, states, slacks), dtype=np.uint8)
    level = sweep.last()
    for number in range(1, last + 1):
        level = sweep.before(level, number, actions[number])
    return SpotPlan(step_s=step_s, actions=actions, expected_dollars=level.idle[:, -1].copy())


def _choose_step(job: DeadlineJob, levels: int) -> tuple[float, int]:
    """The length of a step, and of how many whole steps a start consists; 0 if of less than one."""
    coarse_s = job.deadline_s / levels
    if job.restart_s < coarse_s:
        return coarse_s, 0
    starting = min(_MOST_STARTING, max(1, int(job.restart_s / coarse_s)))
    return job.restart_s / starting, starting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """One backward step of the dynamic programme."""

    moves: csr_array
    is_up: NDArray[np.bool_]
    spot: float
    on_demand: float
    """Cost of a step."""
    starting: int
    fraction: float
    """Share of a step that a start takes, where it takes less than one."""
    slacks: int

    def last(self) -> _Level:
        """At the deadline: no cost to go."""
        zero = np.zeros((self.is_up.shape[0], self.slacks))
        return _Level(zero, zero, zero, [zero] * self.starting, [zero] * self.starting)

    def before(self, after: _Level, number: int, actions: NDArray[np.uint8]) -> _Level:
        """One step earlier; records the actions."""
        held_on_spot = [after.spot, *after.spot_starting[:-1]]
        held_on_demand = [after.on_demand, *after.on_demand_starting[:-1]]
        expected = self._expect(
            [
                after.idle,
                *(np.where(self.is_up, value, after.idle) for value in held_on_spot),
                *held_on_demand,
            ]
        )
        lost = [_spend(value) for value in expected]
        wait = self._safe(lost[0], 1)
        count = len(held_on_spot)
        spot = self.spot + expected[1]
        on_demand = self.on_demand + expected[1 + count]
        spot_starting = [self.spot + value for value in lost[1 : 1 + self.starting]]
        on_demand_starting = [
            self.on_demand + value for value in lost[1 + count : 1 + count + self.starting]
        ]
        if self.starting:
            start_spot, start_on_demand = spot_starting[-1], on_demand_starting[-1]
        else:
            part = self.fraction
            start_spot = part * self.spot + (1 - part) * spot + part * _spend(after.spot)
            start_on_demand = (
                part * self.on_demand + (1 - part) * on_demand + part * _spend(after.on_demand)
            )
        need = self.starting or self.fraction
        start_spot = np.where(self.is_up, self._safe(start_spot, need), _NEVER)
        choices_idle = np.stack([wait, start_spot, start_on_demand])
        # Leaving on-demand to wait never paid in replays, and near a tie it would oscillate.
        never = np.full_like(wait, _NEVER)
        choices_on_demand = np.stack([never, start_spot, on_demand])
        actions[:] = 3 * choices_idle.argmin(0) + choices_on_demand.argmin(0)
        level = _Level(
            choices_idle.min(0), spot, choices_on_demand.min(0), spot_starting, on_demand_starting
        )
        self._finish(level, number)
        return level

    def _expect(self, values: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        return np.split(self.moves @ np.hstack(values), len(values), axis=1)

    def _safe(self, value: NDArray[np.float64], spent: float) -> NDArray[np.float64]:
        """Forbidden where too little slack would be left to start on-demand afterwards."""
        need = (self.starting or self.fraction) + spent
        value = value.copy()
        value[:, : math.ceil(need - 1e-9)] = _NEVER
        return value

    def _finish(self, level: _Level, number: int) -> None:
        """Where slack is all that is left of the time, the work is done."""
        for value in (
            level.idle, level.spot, level.on_demand,
            *level.spot_starting, *level.on_demand_starting,
        ):  # fmt: skip
            value[:, number:] = 0.0


def _spend(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """The value with one step of slack less."""
    shifted = np.empty_like(value)
    shifted[:, 1:] = value[:, :-1]
    shifted[:, 0] = _NEVER
    return shifted


_SPARE_S = 1e-6
"""Tolerance for rounding of sums over thousands of ticks."""


def apply_safety_net(job: DeadlineJob, observed: SpotObservation, wanted: Mode) -> Mode:
    """The wanted mode, or the nearest one that keeps both guarantees."""
    if wanted is Mode.SPOT and not observed.is_spot_up:
        wanted = Mode.IDLE
    for mode in (wanted, Mode.ON_DEMAND if observed.mode is Mode.ON_DEMAND else Mode.IDLE):
        if is_in_time(job, observed, mode) and is_within_cost(job, observed, mode):
            return mode
    return Mode.ON_DEMAND


def is_in_time(job: DeadlineJob, observed: SpotObservation, mode: Mode) -> bool:
    """Whether on-demand, started after one step of ``mode``, still meets the deadline."""
    if mode is Mode.ON_DEMAND:
        return True
    time_left_s = job.deadline_s - observed.elapsed_s
    lost_s = _lost_s(job, observed, mode)
    return time_left_s - lost_s >= observed.left_s + job.restart_s - _SPARE_S


def is_within_cost(job: DeadlineJob, observed: SpotObservation, mode: Mode) -> bool:
    """Whether finishing on on-demand after one step of ``mode`` costs at most one restart too many.

    The most that may be spent is what on-demand alone costs, its one start included, and one start
    on on-demand more.
    """
    if mode is Mode.ON_DEMAND:
        return True
    price = observed.on_demand_dollars_per_hour
    step_dollars = 0.0
    left_s = observed.left_s
    if mode is Mode.SPOT:
        run_s = min(observed.step_s, left_s + _lost_s(job, observed, mode))
        step_dollars = observed.spot_dollars_per_hour * run_s / HOUR_S
        left_s -= run_s - min(run_s, _lost_s(job, observed, mode))
    most = price * (job.work_s + 2 * job.restart_s) / HOUR_S
    back = price * (left_s + job.restart_s) / HOUR_S
    return observed.spent_dollars + step_dollars + back <= most * (1 + 1e-12)


def _lost_s(job: DeadlineJob, observed: SpotObservation, mode: Mode) -> float:
    """Part of the next step that does no work."""
    if mode is Mode.IDLE:
        return observed.step_s
    starting_s = observed.starting_s if observed.mode is mode else job.restart_s
    return min(observed.step_s, starting_s)


_PRICE_STEP = 0.05
"""Prices that differ by less than this share of on-demand have one plan."""
_FACTOR_STEP = 0.5
"""Zones whose spells end at similar rates (within this power of two) have one plan."""
_MOST_FACTOR_STEPS = 4


@dataclass(slots=True)
class SpotPlanCache:
    """Plans of one job by spot price and zone; made on demand, and shared."""

    job: DeadlineJob
    model: SpotModel = PRIOR
    levels: int = LEVELS
    made: dict[tuple[int, int, int], SpotPlan] = field(
        default_factory=dict[tuple[int, int, int], "SpotPlan"], init=False
    )

    def at(self, price_share: float, *, up: float = 1.0, down: float = 1.0) -> SpotPlan:
        """The plan where spot costs this share of on-demand (which costs 1 an hour).

        ``up`` and ``down`` say how many times as fast as in the model spells end there.
        """
        price = min(max(round(price_share / _PRICE_STEP), 1), round(1 / _PRICE_STEP) - 1)
        key = (price, _factor_steps(up), _factor_steps(down))
        if key not in self.made:
            self.made[key] = make_spot_plan(
                self.job,
                self.model.scaled(
                    up=2 ** (key[1] * _FACTOR_STEP), down=2 ** (key[2] * _FACTOR_STEP)
                ),
                spot_dollars_per_hour=price * _PRICE_STEP,
                on_demand_dollars_per_hour=1.0,
                levels=self.levels,
            )
        return self.made[key]


def _factor_steps(factor: float) -> int:
    steps = round(math.log2(factor) / _FACTOR_STEP)
    return min(max(steps, -_MOST_FACTOR_STEPS), _MOST_FACTOR_STEPS)


class PlannedSpotPolicy:
    """Follows the plan from the history of the zone, within the safety net."""

    name = "planned"

    def __init__(self, plans: SpotPlanCache, *, price_share: float = 0.3) -> None:
        self.job = plans.job
        self.memory = SpotHistory(plans.model)
        self._plans = plans
        self._price_share = price_share
        """Price of spot relative to on-demand, where known."""

    def recall(self, was_up: NDArray[np.bool_], step_s: float) -> None:
        """Learn from the history of the zone before the job began."""
        for is_up in was_up.tolist():
            self.memory.observe(is_up, step_s)

    def choose(self, observed: SpotObservation) -> Mode:
        """The plan's choice, or the nearest one that is safe."""
        self.memory.observe(observed.is_spot_up, observed.step_s)
        if observed.is_spot_up:
            self._price_share = observed.spot_dollars_per_hour / observed.on_demand_dollars_per_hour
        return apply_safety_net(self.job, observed, self._choose_by_plan(observed))

    def _choose_by_plan(self, observed: SpotObservation) -> Mode:
        if observed.mode is Mode.SPOT:
            return Mode.SPOT
        plan = self._plans.at(
            self._price_share, up=self.memory.factor(True), down=self.memory.factor(False)
        )
        return plan.choose(
            observed.mode,
            time_left_s=self.job.deadline_s - observed.elapsed_s - observed.starting_s,
            left_s=observed.left_s,
            state=self.memory.state,
        )
