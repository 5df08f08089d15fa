"""Ranking: price the layouts that fit, apply budget and deadline, order the options. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.large_batch import Rule, scale_rate
from yunlu.planning.layout import Layout
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE
from yunlu.planning.search.duration import MOST_LOST, start_seconds, sum_up
from yunlu.planning.search.interval_factors import memory_factors, time_factors
from yunlu.planning.search.layout_search import (
    LayoutQuery,
    LayoutSearchResult,
    predict_memory,
    predict_steps,
    run_seconds,
    search,
)
from yunlu.planning.search.limits import GoalLimits, explain_excess
from yunlu.planning.search.option_changes import narrow
from yunlu.planning.search.options import Hardware, Interval, PlanOption, PlanOptions
from yunlu.planning.search.reasons import give_reasons
from yunlu.planning.search.refusals import refuse_all, refuse_change
from yunlu.planning.search.spot import START_HERE_S, lost_share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.planning.predict.query_batch import Column
    from yunlu.planning.search.hardware_configs import Price
    from yunlu.spec.goal import Objective

MEMORY_PARTS = (
    *("weights", "gradients", "optimizer", "activations", "logits", "buffers", "framework"),
)
WAITING_DOLLARS_PER_HOUR = 1.0
"""Cost of an hour of waiting when cost and time are balanced: own hardware is not free."""
_LAST = 1e9
_BETTER = 0.95
"""An option that is cheaper or faster by less is not listed for that."""
_TOO_MUCH = 100.0
"""An option that takes or costs so many times more than the best is not listed for being cheap or fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionQuery:
    """Everything that options depend on."""

    question: LayoutQuery
    prices: tuple[Price, ...]
    objective: Objective
    limits: GoalLimits = field(default_factory=GoalLimits)
    counts_tokens: bool
    checkpoint_s: float = 60.0
    """Seconds between two checkpoints."""
    start_here_s: float = START_HERE_S
    """Start-up on this machine."""
    lr_scaling: Rule = "none"
    base_batch: int = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every layout at every price of its hardware config, as columns."""

    find: np.ndarray[Any, np.dtype[np.int64]]
    price: np.ndarray[Any, np.dtype[np.int64]]
    total_s: Column
    dollars: Column
    """NaN where the price is unknown."""
    hourly: Column

    def __len__(self) -> int:
        return len(self.find)


@dataclass(frozen=True, slots=True)
class RankedCandidates:
    """Layouts of the search, their step times by component, and costs at every price."""

    layouts: LayoutSearchResult
    steps: dict[str, Column]
    candidates: Candidates


def rank_candidates(ask: OptionQuery) -> RankedCandidates:
    """Search, and price the results."""
    result = search(ask.question)
    steps = predict_steps(ask.question, result)
    return RankedCandidates(result, steps, price_all(ask, result, steps))


def choose_options(ask: OptionQuery, weighed: RankedCandidates, *, top: int) -> PlanOptions:
    """The best options; the nearest ones, with the reasons, where none meets the limits."""
    result, candidates = weighed.layouts, weighed.candidates
    if not len(result):
        raise refuse_all(ask.question, result)
    scores = _score(candidates, ask.objective)
    excess = ask.limits.excess(candidates.total_s, candidates.dollars)
    is_met = excess <= 1.0
    problems: tuple[str, ...] = ()
    if is_met.any():
        order = np.argsort(np.where(is_met, scores, np.inf), kind="stable")[: int(is_met.sum())]
    else:
        order = np.lexsort((scores, excess))
    chosen = _pick(ask, result, candidates, order, top, by_rank_only=not is_met.any())
    options = _make_options(ask, weighed, chosen)
    if not is_met.any():
        problems = explain_excess(
            ask.limits, options[0], total_s=candidates.total_s, dollars=candidates.dollars
        )
    return PlanOptions(
        options=tuple(give_reasons(options, ask.objective, ask.limits, is_met=bool(is_met.any()))),
        objective=ask.objective,
        problems=problems,
        layouts=result.looked_at,
    )


def list_candidates(ask: OptionQuery, weighed: RankedCandidates) -> list[tuple[float, float, str]]:
    """Hours, dollars and hardware of every candidate with a price, for plots."""
    result, candidates = weighed.layouts, weighed.candidates
    rows: list[tuple[float, float, str]] = []
    for index in np.flatnonzero(np.isfinite(candidates.dollars)):
        price, find = ask.prices[candidates.price[index]], candidates.find[index]
        hardware = _hardware(ask, price, int(result.nodes[find]))
        name = f"{hardware} ({hardware.devices} {hardware.device})"
        hours = float(candidates.total_s[index]) / 3600
        rows.append((hours, float(candidates.dollars[index]), name))
    return rows


def price_all(
    ask: OptionQuery, layouts: LayoutSearchResult, steps: dict[str, Column]
) -> Candidates:
    """Time and cost of every layout at every price."""
    step_s = np.sum(list(steps.values()), axis=0)
    run_s = run_seconds(ask.question.work, layouts.points, step_s)
    by_config: dict[int, Any] = {
        int(config): np.flatnonzero(layouts.config == config)
        for config in np.unique(layouts.config)
    }
    finds = [by_config.get(price.config, np.empty(0, dtype=np.int64)) for price in ask.prices]
    find = np.concatenate(finds)
    index = np.repeat(np.arange(len(finds)), [len(one_find) for one_find in finds])
    item = [price.dollars_per_hour for price in ask.prices]
    hourly = np.array([np.nan if dollars is None else dollars for dollars in item])[index]
    start_s = np.array([start_seconds(price, here_s=ask.start_here_s) for price in ask.prices])[
        index
    ]
    lost = np.array(
        [
            lost_share(price.offer.cloud, nodes=1, checkpoint_s=ask.checkpoint_s) * price.spot
            for price in ask.prices
        ]
    )[index]
    nodes = layouts.nodes[find]
    total_s = start_s + run_s[find] / (1.0 - np.minimum(lost * nodes, MOST_LOST))
    return Candidates(find, index, total_s, hourly * nodes * total_s / 3600, hourly * nodes)


def _score(candidates: Candidates, objective: Objective) -> Column:
    """Lower is better; candidates without a price come last, the fastest first."""
    hours, dollars = candidates.total_s / 3600, candidates.dollars
    if objective == "cost":
        scores = dollars + 1e-9 * hours
    elif objective == "time":
        scores = hours + 1e-9 * dollars
    else:
        scores = np.log(dollars + WAITING_DOLLARS_PER_HOUR * hours) + np.log(hours)
    return np.where(np.isnan(dollars), _LAST + hours, scores)


def _pick(
    ask: OptionQuery,
    layouts: LayoutSearchResult,
    candidates: Candidates,
    order: Any,
    top: int,
    *,
    by_rank_only: bool,
) -> list[int]:
    """The best, the cheapest and the fastest, then the best of each other device."""
    dollars = np.where(np.isnan(candidates.dollars), np.inf, candidates.dollars)[order]
    seconds = np.where(np.isinf(dollars), np.inf, candidates.total_s[order])
    wanted = [int(order[0])]
    if top >= 3 and not by_rank_only:
        is_slow = seconds > _TOO_MUCH * seconds[0]
        is_dear = dollars > _TOO_MUCH * max(dollars[0], WAITING_DOLLARS_PER_HOUR)
        for figure in (np.where(is_slow, np.inf, dollars), np.where(is_dear, np.inf, seconds)):
            index = int(np.argmin(figure))
            wanted += [int(order[index])] if figure[index] < _BETTER * figure[0] else []
    picks = list(dict.fromkeys(wanted))
    configs = ask.question.configs
    for keyed_by_count in (False, True):
        seen = {
            _kind(configs, layouts, candidates, pick, with_count=keyed_by_count) for pick in picks
        }
        for item in order.tolist():
            if len(picks) >= top:
                break
            kind = _kind(configs, layouts, candidates, item, with_count=keyed_by_count)
            if kind not in seen:
                seen.add(kind)
                picks.append(item)
    rank = {item: index for index, item in enumerate(order.tolist())}
    return sorted(picks[:top], key=lambda item: rank[item])


def _kind(
    configs: Sequence[Any],
    layouts: LayoutSearchResult,
    candidates: Candidates,
    index: int,
    *,
    with_count: bool,
) -> tuple[Any, ...]:
    find = candidates.find[index]
    config = configs[int(layouts.config[find])]
    count = int(layouts.nodes[find]) * config.devices
    return (config.device, count) if with_count else (config.device,)


def _make_options(
    ask: OptionQuery, weighed: RankedCandidates, chosen: list[int]
) -> list[PlanOption]:
    result, steps, candidates = weighed.layouts, weighed.steps, weighed.candidates
    finds = candidates.find[chosen]
    points = result.points.take(finds)
    memory = predict_memory(points, ask.question.work)
    configs = [ask.question.configs[int(config)] for config in result.config[finds]]
    memory_low, memory_high = memory_factors(points, memory, configs)
    low, high = time_factors(points, configs)
    options: list[PlanOption] = []
    for index, candidate in enumerate(chosen):
        find = int(finds[index])
        price = ask.prices[candidates.price[candidate]]
        parts = {name: float(column[find]) for name, column in steps.items()}
        factor = configs[index].memory_factor
        held = {name: factor * float(getattr(memory, name)[index]) for name in MEMORY_PARTS}
        option = _make_option(
            ask, price, nodes=int(result.nodes[find]), held=held, parts=parts,
            point={name: getattr(points, name)[index] for name in _POINT},
            memory_factors=(float(memory_low[index]), float(memory_high[index])),
            time_factors=(float(low[index]), float(high[index])),
        )  # fmt: skip
        options.append(option.with_recall(_recall(ask, price, option)))
    return options


_POINT = (
    *("dp", "fsdp", "tp", "pp", "virtual", "zero", "sequence", "batch", "micro_batch"),
    *("recompute", "precision"),
)


def _make_option(
    ask: OptionQuery,
    price: Price,
    *,
    nodes: int,
    point: dict[str, float],
    held: dict[str, float],
    parts: dict[str, float],
    memory_factors: tuple[float, float],
    time_factors: tuple[float, float],
) -> PlanOption:
    work = ask.question.work
    hardware = _hardware(ask, price, nodes)
    batch, micro = int(point["batch"]), int(point["micro_batch"])
    layout = _layout(point)
    steps = int(np.ceil(work.samples / batch))
    step = _interval(sum(parts.values()), time_factors)
    pace = Interval(value=batch / step.value, low=batch / step.high, high=batch / step.low)
    total_parts, total = sum_up(
        price, nodes=nodes, steps=steps, step=step, checkpoint_s=ask.checkpoint_s,
        evaluating=work.evaluation_share + work.evaluated / batch,
        start_s=start_seconds(price, here_s=ask.start_here_s),
    )  # fmt: skip
    memory = _interval(sum(held.values()), memory_factors)
    hourly = hardware.dollars_per_hour
    return PlanOption(
        hardware=hardware,
        layout=layout,
        batch=batch,
        micro_batch=micro,
        accumulation=int(np.ceil(batch / (layout.replicas * micro))),
        recompute=RECOMPUTE[int(point["recompute"])],  # pyright: ignore[reportArgumentType]
        precision=PRECISIONS[int(point["precision"])],  # pyright: ignore[reportArgumentType]
        steps=steps,
        lr_scaling=ask.lr_scaling,
        lr_factor=scale_rate(1.0, batch=batch, base_batch=ask.base_batch, rule=ask.lr_scaling),
        memory_bytes=memory,
        headroom=1.0 - memory.high / hardware.memory_bytes,
        step_s=step,
        samples_per_s=pace,
        tokens_per_s=pace.times(work.seq) if ask.counts_tokens else None,
        total_s=total,
        dollars=None if hourly is None else total.times(hourly / 3600),
        memory_parts=held,
        step_parts=parts,
        total_parts=total_parts,
    )


def _interval(value: float, factors: tuple[float, float]) -> Interval:
    return Interval(value=value, low=value * factors[0], high=value * factors[1])


def _hardware(ask: OptionQuery, price: Price, nodes: int) -> Hardware:
    config, offer = ask.question.configs[price.config], price.offer
    dollars = price.dollars_per_hour
    return Hardware(
        cloud=offer.cloud,
        instance=offer.instance,
        region=offer.region,
        nodes=nodes,
        device=config.device,
        devices_per_node=config.devices,
        spot=price.spot,
        dollars_per_hour=None if dollars is None else dollars * nodes,
        memory_bytes=config.memory_bytes,
    )


def _layout(point: dict[str, float]) -> Layout:
    stages = int(point["virtual"])
    return Layout(
        dp=int(point["dp"]),
        fsdp=int(point["fsdp"]),
        tp=int(point["tp"]),
        pp=int(point["pp"]),
        sequence=bool(point["sequence"]),
        zero1=point["zero"] == 1.0,
        schedule="interleaved" if stages > 1 else "1f1b",
        stages_per_rank=stages,
    )


def _recall(
    ask: OptionQuery, price: Price, option: PlanOption
) -> Callable[[dict[str, Any]], PlanOption]:
    def again(changes: dict[str, Any]) -> PlanOption:
        question, other = narrow(ask.question, ask.prices, price, option, changes)
        changed = replace(ask, question=question, prices=(other,))
        weighed = rank_candidates(changed)
        if not len(weighed.layouts):
            raise refuse_change(question, weighed.layouts, changes)
        best = int(np.argmin(weighed.candidates.total_s))
        made = _make_options(changed, weighed, [best])[0]
        # Values kept this time may be changed the next.
        return made.with_recall(_recall(ask, other._replace(config=price.config), made))

    return again
