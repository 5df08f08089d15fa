"""Replays jobs on public traces of spot markets: cost of each policy, and whether it was late.

Rules of greedy and Uniform Progress after Wu et al., "Can't Be Late: Optimizing Spot Instance Savings
under Deadlines" (NSDI'24), sections 3.3, 3.4 and 5.2.2. Their safety net is meant for a policy that is
asked at every moment; asked once a tick, it has to hold back one tick more, or it is late.

The least cost of a job with knowledge of the future, by exact dynamic programming over a trace, is for
comparison only: the same ticks, starts that cost time, paid by the second.
"""

from __future__ import annotations

import csv
import gzip
import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import YunluError
from yunlu.core.limits import decode_json
from yunlu.scheduler.spot import (
    HOUR_S,
    PRIOR,
    Mode,
    PlannedSpotPolicy,
    SpotMarket,
    SpotObservation,
    SpotOutcome,
    SpotPlanCache,
    up_states,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from yunlu.scheduler.spot import DeadlineJob, DeadlinePolicy, SpotModel

DAY_S = 86400.0


class TraceError(YunluError):
    """A trace cannot be read, or lacks what was requested."""

    code = "trace"


def read_availability(
    path: Path, *, spot_dollars_per_hour: float, on_demand_dollars_per_hour: float
) -> SpotMarket:
    """One zone: ``{"metadata": {"gap_seconds": 195}, "data": [1, 0, ...]}``, machines per tick.

    A trace of several machines counts as up while all of them are.
    """
    try:
        record: dict[str, Any] = decode_json(path.read_text())
        counts = np.asarray(record["data"], dtype=np.int64)
        step_s = float(record["metadata"]["gap_seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path}: not a trace of availability ({type(error).__name__}: {error}).",
            hint='expected JSON like {"metadata": {"gap_seconds": 300}, "data": [1, 0, 1]}',
        ) from error
    if counts.ndim != 1 or not counts.size or not step_s > 0:
        raise TraceError(f"{path}: no ticks in it.", hint="give a trace with data in it")
    return SpotMarket(
        name=path.stem,
        step_s=step_s,
        is_up=counts >= max(1, counts.max()),
        spot_dollars_per_hour=np.full(len(counts), spot_dollars_per_hour),
        on_demand_dollars_per_hour=on_demand_dollars_per_hour,
    )


def read_prices(
    path: Path, *, instance: str, zones: str = "", step_s: float = 1800.0, below: float = 1.0
) -> list[SpotMarket]:
    """An instance in every zone whose name begins so, from a history of one row a day and zone.

    Spot counts as up while it is on offer for less than ``below`` of on-demand: a history of prices
    does not say when machines were taken away. A price holds until the next row; a row without a
    price says that there was none. Where the price of on-demand changes, a new market begins.
    """
    rows: dict[str, dict[np.datetime64, tuple[float, float]]] = {}
    for row in _rows(path):
        if row["instance"] == instance and row["az"].startswith(zones):
            prices = (_number(row["spot_price"]), _number(row["ondemand_price"]))
            # The last row of a day counts.
            rows.setdefault(row["az"], {})[np.datetime64(row["date"], "D")] = prices
    if not rows:
        raise TraceError(
            f"{path}: no price of {instance} in a zone that begins with {zones!r}.",
            hint="known instances: " + ", ".join(sorted({key[0] for key in count_prices(path)})),
        )
    return [
        _make_market(f"{instance} {zone} {min(era)}", era, step_s, below)
        for zone, days in sorted(rows.items())
        for era in _split_eras(days)
    ]


def count_prices(path: Path) -> Mapping[tuple[str, str], int]:
    """Instances and zones of a history, with how many rows each has."""
    return Counter((row["instance"], row["az"]) for row in _rows(path))


def _split_eras(
    days: Mapping[np.datetime64, tuple[float, float]],
) -> list[dict[np.datetime64, tuple[float, float]]]:
    """Runs of days with one price of on-demand; a day that does not tell it belongs to its run."""
    eras: list[dict[np.datetime64, tuple[float, float]]] = []
    price = float("nan")
    for day in sorted(days):
        spot, on_demand = days[day]
        if not np.isnan(on_demand) and on_demand != price:
            price = on_demand
            eras.append({})
        if eras:
            eras[-1][day] = (spot, price)
    return eras


def _make_market(
    name: str, days: Mapping[np.datetime64, tuple[float, float]], step_s: float, below: float
) -> SpotMarket:
    order = sorted(days)
    at_s = np.array([(day - order[0]).astype(int) for day in order]) * DAY_S
    ticks = np.arange(0.0, float(at_s[-1]) + DAY_S, step_s)
    now = np.searchsorted(at_s, ticks, side="right") - 1
    spot = np.array([days[day][0] for day in order])[now]
    on_demand = days[order[0]][1]
    return SpotMarket(
        name=name,
        step_s=step_s,
        is_up=np.nan_to_num(spot, nan=np.inf) < below * on_demand,
        spot_dollars_per_hour=np.where(np.isnan(spot), on_demand, spot),
        on_demand_dollars_per_hour=on_demand,
    )


def _number(text: str) -> float:
    return float(text) if text else float("nan")


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from csv.DictReader(file)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: cannot be read ({error}).",
            hint="expected a CSV of date,instance,az,spot_price,ondemand_price, or that with gzip",
        ) from error


def interrupt(market: SpotMarket, model: SpotModel, *, random: np.random.Generator) -> SpotMarket:
    """The same prices, with spells drawn from the model; spot is up only where it was offered."""
    moves = np.cumsum(model.transitions(market.step_s).toarray(), axis=1).tolist()
    is_up = up_states()
    last = len(is_up) - 1
    state = int(random.integers(len(is_up)))
    states: list[int] = []
    for chance in random.random(len(market)).tolist():
        states.append(state)
        state = min(bisect_left(moves[state], chance), last)
    return replace(market, is_up=market.is_up & is_up[states])


@dataclass(slots=True)
class OnDemandOnly:
    """Never uses spot."""

    job: DeadlineJob
    name: str = "on-demand"

    def choose(self, observed: SpotObservation) -> Mode:
        """On-demand, always."""
        del observed
        return Mode.ON_DEMAND


@dataclass(slots=True)
class Greedy:
    """Spot whenever available; at the last moment, on-demand to the end."""

    job: DeadlineJob
    name: str = "greedy"
    is_caught: bool = field(default=False, init=False)

    def choose(self, observed: SpotObservation) -> Mode:
        """Spot or idle, until the safety net applies."""
        if observed.mode is Mode.SPOT:
            return Mode.SPOT
        self.is_caught = self.is_caught or is_caught(self.job, observed)
        if self.is_caught:
            return Mode.ON_DEMAND
        return Mode.SPOT if observed.is_spot_up else Mode.IDLE


@dataclass(slots=True)
class UniformProgress:
    """Keeps up with the straight line from no work at the start to all work at the deadline."""

    job: DeadlineJob
    name: str = "uniform progress"
    is_caught: bool = field(default=False, init=False)

    def choose(self, observed: SpotObservation) -> Mode:
        """Spot if available; on-demand when behind, until two restarts ahead."""
        if observed.mode is Mode.SPOT:
            return Mode.SPOT
        self.is_caught = self.is_caught or is_caught(self.job, observed)
        if self.is_caught:
            return Mode.ON_DEMAND
        if observed.mode is Mode.ON_DEMAND and self._lead_s(observed, 2 * self.job.restart_s) < 0:
            return Mode.ON_DEMAND
        if observed.is_spot_up:
            return Mode.SPOT
        return Mode.ON_DEMAND if self._lead_s(observed, 0.0) < 0 else Mode.IDLE

    def _lead_s(self, observed: SpotObservation, ahead_s: float) -> float:
        expected_s = (observed.elapsed_s + ahead_s) * self.job.work_s / self.job.deadline_s
        return self.job.work_s - observed.left_s - expected_s


def is_caught(job: DeadlineJob, observed: SpotObservation) -> bool:
    """The safety net of the paper, one tick early."""
    time_left_s = job.deadline_s - observed.elapsed_s
    return time_left_s < observed.left_s + 2 * job.restart_s + observed.step_s


_MOST_UNITS = 20_000


def find_optimum(job: DeadlineJob, market: SpotMarket, *, start: int = 0) -> float:
    """Dollars; infinity where even on-demand would be late, or the trace is too short.

    Exact where step, restart, work and deadline are whole multiples of a unit that leaves at most
    20,000 units of work; else work and restarts are rounded down, so it is a lower bound.
    """
    step_s = market.step_s
    unit_s = _choose_unit_s(job, step_s)
    step, restart = round(step_s / unit_s), int(job.restart_s / unit_s + 1e-9)
    work, deadline = int(job.work_s / unit_s + 1e-9), math.ceil(job.deadline_s / unit_s - 1e-9)
    ticks = math.ceil(deadline / step)
    if start + ticks > len(market):
        return math.inf
    search = _Search(step, restart, work)
    for tick in reversed(range(ticks)):
        length = min(step, deadline - tick * step)
        price = market.spot_dollars_per_hour[start + tick] if market.is_up[start + tick] else None
        search.step_back(
            length,
            None if price is None else float(price) * unit_s / HOUR_S,
            market.on_demand_dollars_per_hour * unit_s / HOUR_S,
        )
    return float(search.idle[work])


def _choose_unit_s(job: DeadlineJob, step_s: float) -> float:
    spans = [step_s, job.restart_s, job.work_s, job.deadline_s]
    if all(float(span).is_integer() for span in spans):
        unit_s = math.gcd(*(int(span) for span in spans))
        if job.work_s / unit_s <= _MOST_UNITS:
            return float(unit_s)
    parts = max(1, int(_MOST_UNITS * step_s / job.work_s))
    return step_s / parts


class _Search:
    """Least cost to go by units of work left, for each mode and rest of its start."""

    def __init__(self, step: int, restart: int, work: int) -> None:
        self.levels = [max(0, restart - step * passed) for passed in range(restart // step + 2)]
        """Possible rests of a start at a tick: all of it, one tick less, ..., nothing."""
        never = np.full(work + 1, math.inf)
        never[0] = 0.0
        self.left = np.arange(work + 1)
        self.idle: NDArray[np.float64] = never
        self.spot: Sequence[NDArray[np.float64]] = [never] * len(self.levels)
        self.on_demand: Sequence[NDArray[np.float64]] = [never] * len(self.levels)

    def step_back(self, length: int, spot_price: float | None, on_demand_price: float) -> None:
        """One tick earlier; prices per unit of time, None where spot is down."""
        on_demand = self._run(self.on_demand, length, on_demand_price)
        idle = np.minimum(self.idle, on_demand[0])
        if spot_price is None:
            self.on_demand = [np.minimum(value, self.idle) for value in on_demand]
            self.spot = [idle] * len(self.levels)
        else:
            spot = self._run(self.spot, length, spot_price)
            idle = np.minimum(idle, spot[0])
            self.on_demand = [np.minimum(value, idle) for value in on_demand]
            self.spot = [np.minimum(value, idle) for value in spot]
        self.idle = idle

    def _run(
        self, after: Sequence[NDArray[np.float64]], length: int, price: float
    ) -> list[NDArray[np.float64]]:
        """Run for one tick, for each state of its start."""
        values: list[NDArray[np.float64]] = []
        for index, starting in enumerate(self.levels):
            lost = min(length, starting)
            then = after[min(index + 1, len(self.levels) - 1)]
            worked = min(length - lost, len(then))
            value = np.empty_like(then)
            value[worked:] = price * length + then[: len(then) - worked]
            value[:worked] = price * (lost + self.left[:worked])
            value[0] = 0.0
            values.append(value)
        return values


_DONE_S = 1e-6


def replay(
    policy: DeadlinePolicy, job: DeadlineJob, market: SpotMarket, *, start: int = 0
) -> SpotOutcome:
    """Run one job in one zone from tick ``start`` until it is done, or the trace ends.

    Each tick the policy sees whether spot is up and for how much, then chooses; what it chose holds
    for the tick. Every start costs ``restart_s`` of paid time without work; a start that is cut short
    is begun anew. Paid by the second.
    """
    return replay_zones(policy, job, (market,), start=start)


def replay_zones(
    policy: DeadlinePolicy, job: DeadlineJob, zones: Sequence[SpotMarket], *, start: int = 0
) -> SpotOutcome:
    """The same where several zones may be used: spot starts in the cheapest that is up, and stays there."""
    step_s, on_demand = zones[0].step_s, min(zone.on_demand_dollars_per_hour for zone in zones)
    ticks = min(len(zones[0]) - start, math.ceil(job.deadline_s / step_s) + 1)
    job_state = _JobState(job=job, left_s=job.work_s)
    modes: list[int] = []
    done: list[float] = []
    for tick in range(ticks):
        zone = _choose_zone(
            zones, start + tick, job_state.zone if job_state.mode is Mode.SPOT else None
        )
        if job_state.mode is Mode.SPOT and zone != job_state.zone:
            job_state.mode, job_state.starting_s = Mode.IDLE, 0.0
        price = zones[zone or 0].spot_dollars_per_hour[start + tick]
        wanted = policy.choose(
            SpotObservation(
                elapsed_s=tick * step_s,
                left_s=job_state.left_s,
                mode=job_state.mode,
                starting_s=job_state.starting_s,
                is_spot_up=zone is not None,
                spot_dollars_per_hour=float(price),
                on_demand_dollars_per_hour=on_demand,
                spent_dollars=job_state.spent_dollars,
                step_s=step_s,
            )
        )
        assert wanted is not Mode.SPOT or zone is not None, f"{policy.name} wants what is not there"
        job_state.zone = zone
        run_s = job_state.run(wanted, step_s, float(price) if wanted is Mode.SPOT else on_demand)
        modes.append(wanted)
        done.append(job.work_s - job_state.left_s)
        if job_state.left_s <= _DONE_S:
            job_state.finished_s = tick * step_s + run_s
            break
    return SpotOutcome(
        cost_dollars=job_state.spent_dollars,
        on_demand_cost_dollars=job.work_s / HOUR_S * on_demand,
        finished_s=job_state.finished_s,
        is_late=job_state.finished_s is None or job_state.finished_s > job.deadline_s + _DONE_S,
        spot_s=job_state.paid_s[Mode.SPOT],
        on_demand_s=job_state.paid_s[Mode.ON_DEMAND],
        starts=job_state.starts,
        modes=np.array(modes, dtype=np.int8),
        work_done_s=np.array(done),
    )


@dataclass(slots=True, kw_only=True)
class _JobState:
    """State of a running job."""

    job: DeadlineJob
    left_s: float
    mode: Mode = Mode.IDLE
    zone: int | None = None
    starting_s: float = 0.0
    spent_dollars: float = 0.0
    starts: int = 0
    finished_s: float | None = None
    paid_s: dict[Mode, float] = field(
        default_factory=lambda: {Mode.IDLE: 0.0, Mode.SPOT: 0.0, Mode.ON_DEMAND: 0.0}
    )

    def run(self, mode: Mode, step_s: float, dollars_per_hour: float) -> float:
        """One tick; returns how much of it was used."""
        if mode is not self.mode:
            self.starting_s = 0.0 if mode is Mode.IDLE else self.job.restart_s
            self.starts += mode is not Mode.IDLE
        self.mode = mode
        if mode is Mode.IDLE:
            return 0.0
        lost_s = min(step_s, self.starting_s)
        run_s = min(step_s, lost_s + self.left_s)
        self.starting_s -= lost_s
        self.left_s -= run_s - lost_s
        self.paid_s[mode] += run_s
        self.spent_dollars += run_s / HOUR_S * dollars_per_hour
        return run_s


def _choose_zone(zones: Sequence[SpotMarket], tick: int, held: int | None) -> int | None:
    """Its zone, while that is up; else the cheapest that is."""
    if held is not None and zones[held].is_up[tick]:
        return held
    up = [index for index, zone in enumerate(zones) if zone.is_up[tick]]
    return min(up, key=lambda index: zones[index].spot_dollars_per_hour[tick], default=None)


BASELINES = {
    "on-demand": OnDemandOnly,
    "greedy": Greedy,
    "uniform progress": UniformProgress,
}
OURS = "planned"
OPTIMUM = "optimum"
_PAST_MEMORIES = 2.0
"""How many memory spans of a zone back the past still has weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedJob:
    """One job, replayed under every policy."""

    zone: str
    start: int
    outcomes: dict[str, SpotOutcome]
    optimum_dollars: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """Result of one policy over all trials."""

    policy: str
    ratio: float
    """Mean cost relative to on-demand."""
    worst_ratio: float
    late: int
    starts: float
    """Mean number of starts."""
    spot_share: float
    """Share of the paid time on spot."""


def draw_starts(
    markets: Sequence[SpotMarket], job: DeadlineJob, *, per_market: int, random: np.random.Generator
) -> list[tuple[SpotMarket, int]]:
    """Random starts in every zone, with time for the whole deadline."""
    starts: list[tuple[SpotMarket, int]] = []
    for market in markets:
        room = len(market) - int(job.deadline_s / market.step_s)
        if room <= 0:
            raise TraceError(
                f"{market.name}: {len(market) * market.step_s / HOUR_S:.1f} h are too short for a "
                f"deadline of {job.deadline_s / HOUR_S:g} h.",
                hint="give a longer trace or a shorter deadline",
            )
        starts += [(market, int(random.integers(0, room))) for _ in range(per_market)]
    return starts


def replay_jobs(
    job: DeadlineJob,
    starts: Sequence[tuple[SpotMarket, int]],
    *,
    knows_past: bool = True,
    with_optimum: bool = True,
) -> list[ReplayedJob]:
    """Replay the job from every start; our policy knows the zone's past where ``knows_past``."""
    plans = SpotPlanCache(job, PRIOR)
    trials: list[ReplayedJob] = []
    for market, start in starts:
        outcomes = {
            name: replay(make(job), job, market, start=start) for name, make in BASELINES.items()
        }
        outcomes[OURS] = replay(
            _prepare(plans, market, start, knows_past=knows_past), job, market, start=start
        )
        optimum = find_optimum(job, market, start=start) if with_optimum else None
        trials.append(
            ReplayedJob(zone=market.name, start=start, outcomes=outcomes, optimum_dollars=optimum)
        )
    return trials


def replay_jobs_in_any_zone(
    job: DeadlineJob, zones: Sequence[SpotMarket], starts: Sequence[int]
) -> list[SpotOutcome]:
    """Our policy where any of the zones may be used."""
    plans = SpotPlanCache(job, PRIOR)
    merged = np.logical_or.reduce([zone.is_up for zone in zones])
    outcomes: list[SpotOutcome] = []
    for start in starts:
        policy = PlannedSpotPolicy(plans)
        policy.recall(merged[_past(PRIOR, zones[0], start) : start], zones[0].step_s)
        outcomes.append(replay_zones(policy, job, zones, start=start))
    return outcomes


def summarise_policies(trials: Sequence[ReplayedJob]) -> list[PolicySummary]:
    """Mean of each policy; the optimum last, where it was computed."""
    standings = [
        summarise(name, [trial.outcomes[name] for trial in trials]) for name in trials[0].outcomes
    ]
    if trials[0].optimum_dollars is not None:
        ratios = [
            (trial.optimum_dollars or 0.0) / trial.outcomes[OURS].on_demand_cost_dollars
            for trial in trials
        ]
        standings.append(
            PolicySummary(
                policy=OPTIMUM,
                ratio=float(np.mean(ratios)),
                worst_ratio=max(ratios),
                late=sum(math.isinf(ratio) for ratio in ratios),
                starts=math.nan,
                spot_share=math.nan,
            )
        )
    return standings


def summarise(policy: str, outcomes: Sequence[SpotOutcome]) -> PolicySummary:
    """Means of one policy."""
    paid_s = sum(outcome.spot_s + outcome.on_demand_s for outcome in outcomes)
    return PolicySummary(
        policy=policy,
        ratio=float(np.mean([outcome.ratio for outcome in outcomes])),
        worst_ratio=max(outcome.ratio for outcome in outcomes),
        late=sum(outcome.is_late for outcome in outcomes),
        starts=float(np.mean([outcome.starts for outcome in outcomes])),
        spot_share=sum(outcome.spot_s for outcome in outcomes) / max(paid_s, 1e-9),
    )


def _prepare(
    plans: SpotPlanCache, market: SpotMarket, start: int, *, knows_past: bool
) -> PlannedSpotPolicy:
    price = market.on_demand_dollars_per_hour
    policy = PlannedSpotPolicy(
        plans, price_share=float(market.spot_dollars_per_hour[start]) / price
    )
    if knows_past:
        policy.recall(market.is_up[_past(plans.model, market, start) : start], market.step_s)
    return policy


def _past(model: SpotModel, market: SpotMarket, start: int) -> int:
    return max(0, start - int(_PAST_MEMORIES * model.place_memory_s / market.step_s))
