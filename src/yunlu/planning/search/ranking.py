"""Ranking: price the layouts that fit, apply budget and deadline, order the options. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.search.layout_search import (
    LayoutSearchResult,
    predict_memory,
    predict_steps,
    run_seconds,
    search,
)
from yunlu.planning.search.options import (
    PlanOptions,
    give_reasons,
    narrow,
    refuse_all,
    refuse_change,
)
from yunlu.planning.search.priced_plan import (
    MOST_LOST,
    POINT_COLUMNS,
    OptionQuery,
    SearchedLayout,
    explain_excess,
    lost_share,
    make_priced_plan,
    memory_factors,
    priced_hardware,
    start_seconds,
    time_factors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.planning.plan import Plan
    from yunlu.planning.predict.query_batch import Column
    from yunlu.planning.search.layout_search import Price
    from yunlu.spec.job import Objective

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
        hardware = priced_hardware(ask, price, int(result.nodes[find]))
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


def _make_options(ask: OptionQuery, weighed: RankedCandidates, chosen: list[int]) -> list[Plan]:
    result, steps, candidates = weighed.layouts, weighed.steps, weighed.candidates
    finds = candidates.find[chosen]
    points = result.points.take(finds)
    memory = predict_memory(points, ask.question.work)
    configs = [ask.question.configs[int(config)] for config in result.config[finds]]
    memory_low, memory_high = memory_factors(points, memory, configs)
    low, high = time_factors(points, configs)
    options: list[Plan] = []
    for index, candidate in enumerate(chosen):
        find = int(finds[index])
        price = ask.prices[candidates.price[candidate]]
        parts = {name: float(column[find]) for name, column in steps.items()}
        factor = configs[index].memory_factor
        held = {name: factor * float(getattr(memory, name)[index]) for name in MEMORY_PARTS}
        searched = SearchedLayout(
            nodes=int(result.nodes[find]), memory_parts=held, step_parts=parts,
            point={name: float(getattr(points, name)[index]) for name in POINT_COLUMNS},
            memory_factors=(float(memory_low[index]), float(memory_high[index])),
            time_factors=(float(low[index]), float(high[index])),
        )  # fmt: skip
        option = make_priced_plan(ask, price, searched)
        options.append(option.with_recall(_recall(ask, price, option)))
    return options


def _recall(ask: OptionQuery, price: Price, option: Plan) -> Callable[[dict[str, Any]], Plan]:
    def again(changes: dict[str, Any]) -> Plan:
        question, other = narrow(ask.question, ask.prices, price, option, changes)
        changed = replace(
            ask, question=question, prices=(other,), changed=ask.changed | changes.keys()
        )
        weighed = rank_candidates(changed)
        if not len(weighed.layouts):
            raise refuse_change(question, weighed.layouts, changes)
        best = int(np.argmin(weighed.candidates.total_s))
        made = _make_options(changed, weighed, [best])[0]
        # Values kept this time may be changed the next.
        before = replace(ask, changed=changed.changed)
        return made.with_recall(_recall(before, other._replace(config=price.config), made))

    return again
