"""From layouts that fit to options: priced, held against budget and deadline, ranked. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.choice.limits import Limits, tell_excess
from yunlu.planning.choice.options import Hardware, Interval, Option, Options, PlanError
from yunlu.planning.choice.reasons import give_reasons
from yunlu.planning.choice.replacing import narrow
from yunlu.planning.choice.rigs import HERE, Price
from yunlu.planning.choice.search import Found, Question, foretell_steps, hold, run_seconds, search
from yunlu.planning.choice.spot import START_HERE_S, START_S, lost_share
from yunlu.planning.choice.spread import memory_factors, time_factors
from yunlu.planning.foretell.points import PRECISIONS, RECOMPUTE
from yunlu.planning.large_batch import Rule, scale_rate
from yunlu.planning.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.planning.foretell.points import Column
    from yunlu.spec.goal import Objective

MEMORY_PARTS = (
    *("weights", "gradients", "optimizer", "activations", "logits", "buffers", "framework"),
)
WAITING_DOLLARS_PER_HOUR = 1.0
"""What an hour of waiting counts when cost and time are balanced: a machine of one's own is not free."""
_MOST_LOST = 0.9
_LAST = 1e9
_BETTER = 0.95
"""What is cheaper or faster by less is not shown for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """All that options follow from."""

    question: Question
    prices: tuple[Price, ...]
    objective: Objective
    limits: Limits = field(default_factory=Limits)
    counts_tokens: bool
    checkpoint_s: float = 60.0
    """Between two checkpoints."""
    lr_scaling: Rule = "none"
    base_batch: int = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every find at every price of its rig, as columns."""

    find: np.ndarray[Any, np.dtype[np.int64]]
    price: np.ndarray[Any, np.dtype[np.int64]]
    total_s: Column
    dollars: Column
    """NaN where no price is known."""
    hourly: Column

    def __len__(self) -> int:
        return len(self.find)


@dataclass(frozen=True, slots=True)
class Weighed:
    """The search's finds, their steps by part, and what they cost at every price."""

    found: Found
    steps: dict[str, Column]
    candidates: Candidates


def weigh(ask: Ask) -> Weighed:
    """Search, and price what was found."""
    found = search(ask.question)
    steps = foretell_steps(ask.question, found)
    return Weighed(found, steps, price_all(ask, found, steps))


def choose_options(ask: Ask, weighed: Weighed, *, top: int) -> Options:
    """The best few; the nearest ones, with the reasons, where none meets the limits."""
    found, candidates = weighed.found, weighed.candidates
    if not len(found):
        raise nothing_fits(ask, found)
    scores = _score(candidates, ask.objective)
    excess = ask.limits.excess(candidates.total_s, candidates.dollars)
    is_met = excess <= 1.0
    problems: tuple[str, ...] = ()
    if is_met.any():
        order = np.argsort(np.where(is_met, scores, np.inf), kind="stable")[: int(is_met.sum())]
    else:
        order = np.lexsort((scores, excess))
    chosen = _pick(ask, found, candidates, order, top, by_rank_only=not is_met.any())
    options = _make_options(ask, weighed, chosen)
    if not is_met.any():
        problems = tell_excess(ask.limits, options[0])
    return Options(
        options=tuple(give_reasons(options, ask.objective, ask.limits)),
        objective=ask.objective,
        problems=problems,
        layouts=found.looked_at,
    )


def list_candidates(ask: Ask, weighed: Weighed) -> list[tuple[float, float, str]]:
    """Hours, dollars and hardware of every candidate with a price: what a picture shows."""
    found, candidates = weighed.found, weighed.candidates
    rows: list[tuple[float, float, str]] = []
    for place in np.flatnonzero(np.isfinite(candidates.dollars)):
        price, find = ask.prices[candidates.price[place]], candidates.find[place]
        hardware = _hardware(ask, price, int(found.nodes[find]))
        name = f"{hardware} ({hardware.devices} {hardware.device})"
        hours = float(candidates.total_s[place]) / 3600
        rows.append((hours, float(candidates.dollars[place]), name))
    return rows


def price_all(ask: Ask, found: Found, steps: dict[str, Column]) -> Candidates:
    """Time and cost of every find at every price."""
    step_s = np.sum(list(steps.values()), axis=0)
    run_s = run_seconds(ask.question.work, found.points, step_s)
    by_rig: dict[int, Any] = {
        int(rig): np.flatnonzero(found.rig == rig) for rig in np.unique(found.rig)
    }
    finds = [by_rig.get(price.rig, np.empty(0, dtype=np.int64)) for price in ask.prices]
    find = np.concatenate(finds)
    place = np.repeat(np.arange(len(finds)), [len(each) for each in finds])
    each = [price.dollars_per_hour for price in ask.prices]
    hourly = np.array([np.nan if dollars is None else dollars for dollars in each])[place]
    start_s = np.array([_start_s(price) for price in ask.prices])[place]
    lost = np.array(
        [
            lost_share(price.offer.cloud, nodes=1, checkpoint_s=ask.checkpoint_s) * price.spot
            for price in ask.prices
        ]
    )[place]
    nodes = found.nodes[find]
    total_s = start_s + run_s[find] / (1.0 - np.minimum(lost * nodes, _MOST_LOST))
    return Candidates(find, place, total_s, hourly * nodes * total_s / 3600, hourly * nodes)


def nothing_fits(ask: Ask, found: Found) -> PlanError:
    """No layout of any hardware holds the model, or none can be made at all."""
    most = ask.question.most_devices
    least = min((rig.devices for rig in ask.question.rigs), default=0)
    if least > most:
        return PlanError(
            f"goal.max_devices: {most} devices are fewer than any of these machines has ({least}).",
            hint=f"say --max-devices {least}, or widen --gpu and --cloud",
        )
    if found.tightest is None:
        return PlanError(
            "No layout fits what the job says: its devices, layout, batch and precision go with "
            "none of the hardware that is left.",
            hint="leave layout: auto and devices: auto, or widen --gpu, --cloud and --max-devices",
        )
    rig, devices, excess = found.tightest
    return PlanError(
        f"The model fits none of the hardware: the nearest, {devices} x "
        f"{ask.question.rigs[rig].device}, would need {excess:.1f} times its memory.",
        hint="allow more devices (--max-devices) or larger ones (--gpu), shorten data.max_length, "
        "or train an adapter (model.adapter: lora)",
    )


def _start_s(price: Price) -> float:
    return START_HERE_S if price.offer.cloud == HERE else START_S


def _score(candidates: Candidates, objective: Objective) -> Column:
    """The less the better; candidates without a price come last, the quickest first."""
    hours, dollars = candidates.total_s / 3600, candidates.dollars
    if objective == "cost":
        scores = dollars + 1e-9 * hours
    elif objective == "time":
        scores = hours + 1e-9 * dollars
    else:
        scores = np.log(dollars + WAITING_DOLLARS_PER_HOUR * hours) + np.log(hours)
    return np.where(np.isnan(dollars), _LAST + hours, scores)


def _pick(
    ask: Ask, found: Found, candidates: Candidates, order: Any, top: int, *, by_rank_only: bool
) -> list[int]:
    """The best, the cheapest and the fastest, then the best of each other device."""
    dollars = np.where(np.isnan(candidates.dollars), np.inf, candidates.dollars)[order]
    seconds = np.where(np.isinf(dollars), np.inf, candidates.total_s[order])
    wanted = [int(order[0])]
    if top >= 3 and not by_rank_only:
        for figure in (dollars, seconds):
            place = int(np.argmin(figure))
            wanted += [int(order[place])] if figure[place] < _BETTER * figure[0] else []
    picks = list(dict.fromkeys(wanted))
    rigs = ask.question.rigs
    for keyed_by_count in (False, True):
        seen = {_kind(rigs, found, candidates, each, with_count=keyed_by_count) for each in picks}
        for each in order.tolist():
            if len(picks) >= top:
                break
            kind = _kind(rigs, found, candidates, each, with_count=keyed_by_count)
            if kind not in seen:
                seen.add(kind)
                picks.append(each)
    rank = {each: place for place, each in enumerate(order.tolist())}
    return sorted(picks[:top], key=lambda each: rank[each])


def _kind(
    rigs: Sequence[Any], found: Found, candidates: Candidates, place: int, *, with_count: bool
) -> tuple[Any, ...]:
    find = candidates.find[place]
    rig = rigs[int(found.rig[find])]
    count = int(found.nodes[find]) * rig.devices
    return (rig.device, count) if with_count else (rig.device,)


def _make_options(ask: Ask, weighed: Weighed, chosen: list[int]) -> list[Option]:
    found, steps, candidates = weighed.found, weighed.steps, weighed.candidates
    finds = candidates.find[chosen]
    points = found.points.take(finds)
    memory = hold(points, ask.question.work)
    rigs = [ask.question.rigs[int(rig)] for rig in found.rig[finds]]
    is_measured = np.array([rig.is_measured for rig in rigs])
    memory_low, memory_high = memory_factors(memory, is_measured)
    low, high = time_factors(points, is_measured)
    options: list[Option] = []
    for place, candidate in enumerate(chosen):
        find = int(finds[place])
        price = ask.prices[candidates.price[candidate]]
        parts = {name: float(column[find]) for name, column in steps.items()}
        factor = rigs[place].memory_factor
        held = {name: factor * float(getattr(memory, name)[place]) for name in MEMORY_PARTS}
        option = _make_option(
            ask, price, nodes=int(found.nodes[find]), held=held, parts=parts,
            point={name: getattr(points, name)[place] for name in _POINT},
            memory_factors=(float(memory_low[place]), float(memory_high[place])),
            time_factors=(float(low[place]), float(high[place])),
        )  # fmt: skip
        options.append(option.with_recall(_recall(ask, price, option)))
    return options


_POINT = (
    *("dp", "fsdp", "tp", "pp", "virtual", "zero", "sequence", "batch", "micro_batch"),
    *("recompute", "precision"),
)


def _make_option(
    ask: Ask,
    price: Price,
    *,
    nodes: int,
    point: dict[str, float],
    held: dict[str, float],
    parts: dict[str, float],
    memory_factors: tuple[float, float],
    time_factors: tuple[float, float],
) -> Option:
    work = ask.question.work
    hardware = _hardware(ask, price, nodes)
    batch, micro = int(point["batch"]), int(point["micro_batch"])
    layout = _layout(point)
    steps = int(np.ceil(work.samples / batch))
    step = _interval(sum(parts.values()), time_factors)
    pace = Interval(value=batch / step.value, low=batch / step.high, high=batch / step.low)
    total_parts, total = _total(ask, price, nodes, steps, step)
    memory = _interval(sum(held.values()), memory_factors)
    hourly = hardware.dollars_per_hour
    return Option(
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


def _total(
    ask: Ask, price: Price, nodes: int, steps: int, step: Interval
) -> tuple[dict[str, float], Interval]:
    """Seconds from the order to the model, by what takes them."""
    lost = lost_share(price.offer.cloud, nodes=nodes, checkpoint_s=ask.checkpoint_s) * price.spot
    longer = 1.0 / (1.0 - min(lost, _MOST_LOST))
    share = ask.question.work.evaluation_share
    start_s = _start_s(price)
    run = step.times(steps * (1.0 + share) * longer)
    parts = {
        "start_up": start_s,
        "steps": steps * step.value,
        "evaluation": steps * step.value * share,
        "interruptions": run.value * (1.0 - 1.0 / longer),
    }
    bounds = {name: getattr(run, name) + start_s for name in ("value", "low", "high")}
    return parts, Interval(**bounds)


def _interval(value: float, factors: tuple[float, float]) -> Interval:
    return Interval(value=value, low=value * factors[0], high=value * factors[1])


def _hardware(ask: Ask, price: Price, nodes: int) -> Hardware:
    rig, offer = ask.question.rigs[price.rig], price.offer
    dollars = price.dollars_per_hour
    return Hardware(
        cloud=offer.cloud,
        instance=offer.instance,
        region=offer.region,
        nodes=nodes,
        device=rig.device,
        devices_per_node=rig.devices,
        spot=price.spot,
        dollars_per_hour=None if dollars is None else dollars * nodes,
        memory_bytes=rig.memory_bytes,
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


def _recall(ask: Ask, price: Price, option: Option) -> Callable[[dict[str, Any]], Option]:
    def again(changes: dict[str, Any]) -> Option:
        question, other = narrow(ask.question, ask.prices, price, option, changes)
        return _foretell_one(replace(ask, question=question, prices=(other,)))

    return again


def _foretell_one(ask: Ask) -> Option:
    weighed = weigh(ask)
    if not len(weighed.found):
        raise nothing_fits(ask, weighed.found)
    best = int(np.argmin(weighed.candidates.total_s))
    return _make_options(ask, weighed, [best])[0]
