"""Spot policy of a live pool: which runs may use spot or on-demand nodes now. Pure but for its memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.executors.executor import SPOT, name_kind
from yunlu.scheduler.autoscaling import BOOT_S, DeadlineWatch
from yunlu.scheduler.policy.goodput import FittedSpeed
from yunlu.scheduler.policy.speed_by_type import SpeedByType
from yunlu.scheduler.policy.values import Reason
from yunlu.scheduler.spot import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.executors.executor import Reserve
    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.policy.values import Decision, Demand, PoolState, Speed

_USUAL_SHARE = 0.3
"""Price of spot relative to on-demand, where unknown."""
_LEVELS = 120
_ROOM = 1.25
"""Runs fall back to a size with this multiple of the time they need."""
_DRIFT = 1.3
"""A speed that was off by this factor makes a new plan."""
_WORDS = {
    Mode.IDLE: "it waits for spot: on-demand still makes its deadline if it starts later",
    Mode.SPOT: "on spot, while on-demand could still make its deadline",
    Mode.ON_DEMAND: "on on-demand, to make its deadline",
}


@dataclass(slots=True)
class _SpotRun:
    """One run with a deadline."""

    watch: DeadlineWatch
    deadline_at: float
    shape: tuple[str, int, int]
    """Type, nodes and devices of its on-demand fallback."""
    spent_then: float
    """Dollars spent when the watch began."""
    chosen: Mode = Mode.IDLE
    chosen_at: float = -math.inf
    """Since when the choice holds; a node may still be pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stall:
    """Nodes of one type and market, available or asleep."""

    devices: int
    type: str
    device_dollars: float
    is_spot: bool


class LiveSpotPolicy:
    """Chooses spot or on-demand for the runs with a deadline of one pool; its state can be rebuilt."""

    def __init__(self, *, step_s: float, prices: Mapping[str, float] | None = None) -> None:
        """To be called at least every ``step_s``; prices by kind, for nodes that are asleep."""
        self._step_s, self._prices = step_s, prices or {}
        self._watched: dict[str, _SpotRun] = {}
        self._has_spot = False

    def choose(
        self,
        state: PoolState,
        reserves: Sequence[Reserve],
        *,
        spent_dollars: Mapping[str, float],
        unknown: Iterable[str] = (),
    ) -> dict[str, Mode]:
        """What each run with a deadline is to use; empty if the pool does not have both markets.

        Args:
            state: As it is.
            reserves: Machines that can be had.
            spent_dollars: By run, so far.
            unknown: Runs whose speed is a guess: nothing can be promised to them yet.
        """
        stalls = self._set_up(state.nodes, reserves)
        seen = any(n.is_spot for n in state.nodes) or any(r.is_spot for r in reserves)
        self._has_spot = self._has_spot or seen  # preempted nodes may come back
        own = [stall for stall in stalls if not stall.is_spot]
        unknown = {*unknown}
        modes: dict[str, Mode] = {}
        for demand in state.jobs if own and self._has_spot else ():
            if demand.deadline_at is None or demand.remaining is None or demand.id in unknown:
                continue
            if demand.deadline_at <= state.now:
                continue  # it is late: no guarantee any more, and it may use any node
            spent = spent_dollars.get(demand.id, 0.0)
            watched = self._find(demand, own, state.now, spent)
            if watched is not None:
                spent = max(0.0, spent - watched.spent_then) / watched.shape[2]
                modes[demand.id] = self._ask(demand, watched, stalls, state, spent)
        self._watched = {run: item for run, item in self._watched.items() if run in modes}
        return modes

    def _set_up(self, nodes: Sequence[Node], reserves: Sequence[Reserve]) -> list[_Stall]:
        there = Counter(name_kind(node.type, is_spot=node.is_spot) for node in nodes)
        stalls = [
            _Stall(devices=node.devices, type=node.type, is_spot=node.is_spot,
                   device_dollars=node.dollars_per_hour / node.devices)
            for node in nodes if not node.is_leaving and node.devices
        ]  # fmt: skip
        # Pending nodes are available too, or they would be released before they are there.
        away = {
            reserve.kind: reserve.most - min(reserve.awake, there[reserve.kind])
            for reserve in reserves
        }
        return stalls + [
            _Stall(devices=reserve.devices * away[reserve.kind], type=reserve.type, is_spot=reserve.is_spot,
                   device_dollars=self._prices.get(reserve.kind, 0.0) / reserve.devices)
            for reserve in reserves if away[reserve.kind] > 0
        ]  # fmt: skip

    def _find(
        self, demand: Demand, own: Sequence[_Stall], now: float, spent: float
    ) -> _SpotRun | None:
        """Its watch; a new one if it has none, or if deadline or speed changed."""
        known = self._watched.get(demand.id)
        assert demand.deadline_at is not None
        if known is not None and abs(known.deadline_at - demand.deadline_at) < self._step_s:
            drift = _goodput(demand, known.shape) / known.watch.goodput
            if 1 / _DRIFT < drift < _DRIFT:
                return known
        shape, goodput = _fall_back(demand, own, now)
        if goodput <= 0:
            return None
        watch = DeadlineWatch(
            replace(demand, restart_s=_start_s(demand)),
            now=now,
            goodput=goodput,
            step_s=self._step_s,
            levels=_LEVELS,
        )
        result = _SpotRun(watch, demand.deadline_at, shape, spent)
        self._watched[demand.id] = result
        return result

    def _ask(
        self,
        demand: Demand,
        watched: _SpotRun,
        stalls: Sequence[_Stall],
        state: PoolState,
        spent: float,
    ) -> Mode:
        spot = [stall for stall in stalls if stall.is_spot]
        dollars = min((s.device_dollars for s in stalls if not s.is_spot), default=0.0) or 1.0
        spot_dollars = min((s.device_dollars for s in spot if s.device_dollars), default=0.0)
        mode, since = _mode_of(demand, state.nodes), demand.held_since
        is_coming = watched.chosen is Mode.ON_DEMAND or (
            bool(spot) and state.now - watched.chosen_at < _start_s(demand)
        )
        if mode is Mode.IDLE and is_coming:
            mode, since = watched.chosen, watched.chosen_at
        ran_s = math.inf if since is None else state.now - since
        chosen = watched.watch.choose(
            demand,
            now=state.now,
            mode=mode,
            starting_s=max(0.0, _start_s(demand) - ran_s),
            is_spot_up=bool(spot),
            spot_dollars_per_hour=spot_dollars or _USUAL_SHARE * dollars,
            on_demand_dollars_per_hour=dollars,
            spent_dollars=spent,
        )
        if chosen is not watched.chosen:
            watched.chosen, watched.chosen_at = chosen, state.now
        return chosen


def steer(state: PoolState, modes: Mapping[str, Mode]) -> PoolState:
    """The same pool for an allocator that knows types only: each run sees the nodes it may use."""
    if not modes:
        return state
    nodes = tuple(
        replace(n, type=name_kind(n.type, is_spot=n.is_spot), is_spot=False) for n in state.nodes
    )
    spot = frozenset(node.type for node in nodes if node.type.endswith(SPOT))
    own = frozenset(node.type for node in nodes) - spot
    jobs: list[Demand] = []
    for demand in state.jobs:
        mode = modes.get(demand.id)
        types = {Mode.SPOT: spot, Mode.ON_DEMAND: own}.get(mode) if mode is not None else None
        if types == frozenset() and demand.held:
            types = spot | own  # it continues until a node of the right kind is there
        if not demand.is_pinned and (mode is Mode.IDLE or types == frozenset()):
            continue  # nothing for it now
        speed = _on_both(demand.speed)
        jobs.append(replace(demand, speed=speed, types=None if demand.is_pinned else types))
    return replace(state, nodes=nodes, jobs=tuple(jobs))


def explain(modes: Mapping[str, Mode], decision: Decision) -> Decision:
    """Add to the decision what the deadline means for each run that has one."""
    reasons = dict(decision.reasons)
    for run, mode in modes.items():
        before, parts = reasons.get(run), _WORDS[mode]
        text = f"{before.text.rstrip('.')}; {parts}" if before is not None else parts
        figures = {**(before.figures if before is not None else {}), "market": mode.name.lower()}
        reasons[run] = Reason(code=before.code if before else "market", text=text, figures=figures)
    return replace(decision, reasons=reasons)


def _fall_back(
    demand: Demand, own: Sequence[_Stall], now: float
) -> tuple[tuple[str, int, int], float]:
    """Fewest on-demand devices that meet the deadline with some slack, and their goodput."""
    best = (("", 0, 0), 0.0)
    left_s = (demand.deadline_at or now) - now - 2 * _start_s(demand)
    for type_ in sorted({stall.type for stall in own}):
        there = sum(stall.devices for stall in own if stall.type == type_)
        largest = max(stall.devices for stall in own if stall.type == type_)
        for size in _sizes(demand, there):
            shape = (type_, -(-size // largest), size)
            goodput = _goodput(demand, shape)
            if goodput > best[1]:
                best = (shape, goodput)
            if goodput > 0 and _ROOM * (demand.remaining or 0.0) / goodput <= left_s:
                return shape, goodput
    return best


def _goodput(demand: Demand, shape: tuple[str, int, int]) -> float:
    type_, nodes, devices = shape
    return float(demand.speed.goodput(type_, np.array([nodes]), np.array([devices]))[0])


def _sizes(demand: Demand, there: int) -> list[int]:
    unit, size = demand.multiple, max(demand.min_devices, demand.multiple)
    sizes: list[int] = []
    while size <= min(demand.max_devices, there):
        sizes.append(size)
        size = max(size + unit, 2 * size // unit * unit)
    return sizes


def _start_s(demand: Demand) -> float:
    """Time to get a node and start there; a resize takes half of it."""
    return BOOT_S + 2 * demand.restart_s


def _mode_of(demand: Demand, nodes: Sequence[Node]) -> Mode:
    """What it runs on: one spot node makes it a run on spot."""
    spot = {node.name: node.is_spot for node in nodes}
    held = [spot[name] for name, _ in demand.held.shares if name in spot]
    return Mode.IDLE if not held else Mode.SPOT if any(held) else Mode.ON_DEMAND


def _on_both(speed: Speed) -> Speed:
    """A speed that is the same on spot and on-demand nodes of a type."""
    if isinstance(speed, FittedSpeed):
        return _fitted_on_both(speed)
    if isinstance(speed, SpeedByType):
        more = {f"{name}{SPOT}": _fitted_on_both(result) for name, result in speed.by_type.items()}
        return replace(speed, by_type={**speed.by_type, **more})
    return _OnBoth(speed)


def _fitted_on_both(speed: FittedSpeed) -> FittedSpeed:
    more = {f"{name}{SPOT}": result for name, result in speed.throughputs.items()}
    return replace(speed, throughputs={**speed.throughputs, **more})


@dataclass(frozen=True, slots=True)
class _OnBoth:
    """Wrapper of an external estimator's model."""

    speed: Speed

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return self.speed.goodput(device_type.removesuffix(SPOT), nodes, devices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.speed, name)
