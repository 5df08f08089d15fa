"""Plan options: the best few plans of a job, the reasons of each, refusals, and changes by hand. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from yunlu.core.errors import YunluError, did_you_mean
from yunlu.core.html_table import html_table
from yunlu.core.units import show_bytes, show_duration
from yunlu.core.value import Value
from yunlu.planning.plan import Plan, compare, describe_layout, main_wait
from yunlu.planning.predict.query_batch import RECOMPUTE
from yunlu.planning.search.layout_search import enumerate_layouts, node_counts
from yunlu.spec.job import Objective

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from yunlu.planning.layouts import Layout
    from yunlu.planning.predict.query_batch import Column
    from yunlu.planning.search.layout_search import (
        HardwareConfig,
        LayoutQuery,
        LayoutRules,
        LayoutSearchResult,
        Price,
    )
    from yunlu.planning.search.priced_plan import GoalLimits


class PlanError(YunluError):
    """The request is impossible, or impossible on this hardware."""

    code = "plan"


class PlanOptions(Value):
    """The best few plans, best first."""

    options: tuple[Plan, ...] = Field(min_length=1)
    objective: Objective
    problems: tuple[str, ...] = ()
    """Why no option meets the goal, and what to change; then the options are the nearest."""
    notes: tuple[str, ...] = ()
    """Assumptions, and what would improve the answer."""
    layouts: int
    """Number of combinations that were searched."""

    @property
    def best(self) -> Plan:
        """The first."""
        return self.options[0]

    def __iter__(self) -> Iterator[Plan]:  # pyright: ignore[reportIncompatibleMethodOverride] - the options, not pydantic's pairs
        return iter(self.options)

    def __len__(self) -> int:
        return len(self.options)

    def __getitem__(self, index: int) -> Plan:
        return self.options[index]

    def replace(self, **changes: Any) -> Plan:
        """The best option with changes."""
        return self.best.replace(**changes)

    def explain(self) -> str:
        """Every option as text."""
        return "\n\n".join(option.explain() for option in self.options)

    def _repr_html_(self) -> str:
        """A row for each option, for a notebook."""
        rows = [
            (
                f"{option.hardware} ({option.hardware.device})",
                describe_layout(option),
                show_bytes(option.memory_bytes.value),
                show_duration(option.total_s.value),
                "–" if option.dollars is None else f"${option.dollars.value:,.2f}",
                option.reason,
            )
            for option in self.options
        ]
        head = ("hardware", "layout", "memory", "time", "cost", "why")
        return html_table(rows, head=head, note=" ".join((*self.problems, *self.notes)))

    def to_json(self) -> str:
        """Everything, for programs."""
        return self.model_dump_json(indent=2)


_TIGHT = 0.05
_ALIKE = 1.05
_BEST = {"balanced": "best balance of cost and time", "cost": "cheapest", "time": "fastest"}


def give_reasons(
    options: Sequence[Plan],
    objective: Objective,
    limits: GoalLimits,
    *,
    is_met: bool,
    compared: int = 0,
) -> list[Plan]:
    """The same options, each with its reason; the first reason says whether the limits are met.

    The last so many as are only ``compared`` are not chosen from.
    """
    best = options[0]
    real = options[: len(options) - compared]
    costs = [option.dollars.value for option in real if option.dollars is not None]
    times = [option.total_s.value for option in real if option.dollars is not None]
    least = (_outstanding(costs), _outstanding(times))
    results: list[Plan] = []
    for index, option in enumerate(options):
        parts = [_BEST[objective] if is_met else "nearest to the limits"]
        parts = parts if option is best and option.dollars is not None else []
        parts += _extremes(option, least) if index < len(real) else ["only compared"]
        parts += [] if option is best else _against(option, best)
        parts += [main_wait(option), _memory_words(option), *_doubts(option, limits)]
        reason = "; ".join(dict.fromkeys(word for word in parts if word))
        results.append(_with_reason(option, reason))
    return results


def _outstanding(figures: Sequence[float]) -> float | None:
    """The least, where the others are not all similar."""
    return min(figures) if figures and max(figures) > _ALIKE * min(figures) else None


def _with_reason(option: Plan, reason: str) -> Plan:
    return option.model_copy(update={"reason": reason})


def _extremes(option: Plan, least: tuple[float | None, float | None]) -> list[str]:
    if option.dollars is None:
        return ["price unknown"]
    cheapest, fastest = least
    text = ["cheapest"] if option.dollars.value == cheapest else []
    return [*text, "fastest"] if option.total_s.value == fastest else text


def _against(option: Plan, best: Plan) -> list[str]:
    """Comparison with the first option."""
    parts: list[str] = []
    if option.dollars is not None and best.dollars is not None:
        dollars, least = option.dollars.value, best.dollars.value
        parts += [compare(dollars, least, "dearer"), compare(least, dollars, "cheaper")]
        if least == 0 and dollars > 0:
            parts.append("not free")
    seconds, first = option.total_s.value, best.total_s.value
    return [*parts, compare(seconds, first, "slower"), compare(first, seconds, "faster")]


def _memory_words(option: Plan) -> str:
    return "memory nearly full" if option.headroom < _TIGHT else ""


def _doubts(option: Plan, limits: GoalLimits) -> list[str]:
    """Limits that are met as expected, but not at the 90 % quantile."""
    parts: list[str] = []
    dollars, budget = option.dollars, limits.budget
    if budget is not None and dollars is not None and dollars.value <= budget < dollars.high:
        parts.append("may exceed the budget")
    deadline_s = limits.deadline_s
    if deadline_s is not None and option.total_s.value <= deadline_s < option.total_s.high:
        parts.append("may miss the deadline")
    return parts


def refuse_all(question: LayoutQuery, layouts: LayoutSearchResult) -> PlanError:
    """No layout of any hardware holds the model, or none exists."""
    if layouts.tightest is not None:
        config, devices, excess = layouts.tightest
        columns = question.work.columns
        is_adapted = columns["trainable"] < columns["parameters"]
        less = "take a smaller model" if is_adapted else "train an adapter (model.adapter: lora)"
        return PlanError(
            f"The model fits none of the hardware: the nearest, {devices} x "
            f"{question.configs[config].device}, would need {_describe_excess(excess, question)}.",
            hint="allow more devices (--max-devices) or larger ones (--gpu), shorten "
            f"data.max_length, or {less}",
        )
    if question.least_devices == question.most_devices > 1:
        return _refuse_devices(question)
    most = question.most_devices
    least = min((config.devices for config in question.configs), default=0)
    if least > most:
        return PlanError(
            f"goal.max_devices: {most} devices are fewer than any of these machines has ({least}).",
            hint=f"say --max-devices {least}, or widen --gpu and --cloud",
        )
    return PlanError(
        "No layout fits what the job says: its devices, layout, batch and precision go with "
        "none of the hardware that is left.",
        hint="leave layout: auto and devices: auto, or widen --gpu, --cloud and --max-devices",
    )


def refuse_change(
    question: LayoutQuery, layouts: LayoutSearchResult, changes: Mapping[str, Any]
) -> PlanError:
    """An option that was changed by hand no longer fits."""
    given = _name_changes(changes)
    if layouts.tightest is None:
        return refuse_layout(changes, devices=question.most_devices)
    config, devices, excess = layouts.tightest
    return PlanError(
        f"{given}: {devices} x {question.configs[config].device} would need {_describe_excess(excess, question)}.",
        hint="a smaller micro_batch, recompute='full', or more fsdp, tp or nodes need less",
    )


def refuse_layout(changes: Mapping[str, Any], *, devices: int) -> PlanError:
    """There is no layout with all of the changes."""
    together = (
        "change fewer of them at once; the error of a single change lists its possible values"
    )
    alone = "every replica needs a sample of each step: a larger batch, or fewer nodes, go together"
    return PlanError(
        f"{_name_changes(changes)}: there is no such layout of {devices} devices.",
        hint=together if len(changes) > 1 else alone,
    )


def join_words(items: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _name_changes(changes: Mapping[str, Any]) -> str:
    """Such as ``tp=2, recompute=full``."""
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "unchanged"


def _refuse_devices(question: LayoutQuery) -> PlanError:
    devices = question.most_devices
    if any(node_counts(config, question) for config in question.configs):
        return PlanError(
            f"No layout fits what the job says: none of {devices} devices goes with its layout, "
            "batch and precision.",
            hint="say other devices (or auto), layout: auto or a larger train.batch, or widen --gpu",
        )
    sizes = sorted({config.devices for config in question.configs})
    return PlanError(
        f"devices: {devices} devices are no whole number of these machines, which have "
        f"{join_words([str(size) for size in sizes])}.",
        hint="say another number of devices, or devices: auto, or widen --gpu and --cloud",
    )


def _describe_excess(excess: float, question: LayoutQuery) -> str:
    # Rounded up: an excess is never shown as just enough.
    return (
        f"{math.ceil(excess * 100) / 100:.2f} times its memory, if nine in ten runs are to fit "
        f"into the {question.memory_share:.0%} of it that can be used".replace("%", " %")
    )


_AXES = ("dp", "fsdp", "tp", "pp")
_COUNTS = (*_AXES, "batch", "micro_batch", "nodes")
_FOLLOWING = ("dp", "fsdp")
"""Axes that may change where the others do."""
_MOST = 2**31 - 1
_SWITCHES = ("zero1", "spot")
FIELDS = (*_COUNTS, *_SWITCHES, "recompute", "precision")
"""Fields that can be changed."""


def narrow(
    question: LayoutQuery,
    prices: Sequence[Price],
    price: Price,
    option: Plan,
    changes: Mapping[str, Any],
) -> tuple[LayoutQuery, Price]:
    """The query restricted to the option and the changes; refuses impossible ones."""
    _check_kinds(changes)
    config = question.configs[price.config]
    precision = _choose("precision", changes.get("precision", option.precision),
                        question.rules.keys() & config.peak_flops.keys())  # fmt: skip
    recompute = _choose("recompute", changes.get("recompute", option.recompute), RECOMPUTE)
    nodes = changes.get("nodes", option.hardware.nodes)
    if nodes > config.node_limit:
        valid = "1" if config.node_limit == 1 else f"1 to {config.node_limit}"
        raise _refuse("nodes", nodes, valid)
    if changes.get("zero1") and "fsdp" not in changes:
        changes = {**changes, "fsdp": 1}  # fsdp shards what zero1 would, and more
    layout, usual = option.layout, question.rules[precision]
    pinned = {axis: changes.get(axis, layout.size_of(axis)) for axis in _AXES}
    rules = replace(
        usual,
        batches=(changes.get("batch", option.batch),),
        pinned=pinned,
        recompute=(RECOMPUTE.index(recompute),),
        micro_batch=changes.get("micro_batch"),
        zero1=_zero1(usual, layout, changes),
    )
    devices = nodes * config.devices
    rules = _find_feasible(config, devices, rules, changes, option)
    other = _priced(prices, price, spot=changes.get("spot", price.spot))
    narrowed = replace(
        question,
        configs=(config,),
        rules={precision: rules},
        nodes=nodes,
        most_devices=max(devices, question.most_devices),
        least_devices=1,
    )
    return narrowed, other._replace(config=0)


def _find_feasible(
    config: HardwareConfig,
    devices: int,
    rules: LayoutRules,
    changes: Mapping[str, Any],
    option: Plan,
) -> LayoutRules:
    """Rules that allow a layout, as near to the option's own as possible."""

    def lay(tried: LayoutRules) -> dict[str, Column]:
        return enumerate_layouts(devices, min(config.domain, devices), tried)

    for tried in _loosened(rules, changes, option):
        if _is_wanted(lay(tried), changes).any():
            return tried
        rules = tried
    for name in changes:
        free = _without(name, rules)
        if free is None:
            continue
        grid = lay(free)
        if name == "zero1":
            result = ["False"] if len(grid["dp"]) else []
        else:
            sizes = grid[name][_is_wanted(grid, changes)]
            result = [str(item) for item in np.unique(sizes).astype(int).tolist()]
        if result:
            raise _refuse(name, changes[name], join_words(result))
    raise refuse_layout(changes, devices=devices)


def _is_wanted(grid: Mapping[str, Column], changes: Mapping[str, Any]) -> Any:
    """Which layouts have zero1 where it is requested: a single replica never has."""
    return grid["zero"] == 1.0 if changes.get("zero1") else np.ones(len(grid["dp"]), dtype=bool)


def _zero1(usual: LayoutRules, layout: Layout, changes: Mapping[str, Any]) -> tuple[bool, ...]:
    """As requested; else as the option has it, where possible."""
    if "zero1" in changes:
        return (changes["zero1"],)
    is_free = layout.dp == 1 or layout.fsdp > 1 or (layout.zero1 and "zero1" in usual.barred)
    return usual.zero1 if is_free else (layout.zero1,)


def _loosened(
    rules: LayoutRules, changes: Mapping[str, Any], option: Plan
) -> Iterator[LayoutRules]:
    """All of the option's values; then without those that may change, the micro-batch first."""
    fixed = {axis: size for axis, size in rules.pinned.items()
             if axis in changes or axis not in _FOLLOWING}  # fmt: skip
    own_stages = (option.layout.stages_per_rank,) if option.layout.pp > 1 else rules.stages_per_rank
    own_micro = option.micro_batch if rules.micro_batch is None else rules.micro_batch
    choices = product(
        (own_stages, rules.stages_per_rank), (rules.pinned, fixed), (own_micro, rules.micro_batch)
    )
    for stages, pinned, micro in choices:
        yield replace(rules, stages_per_rank=stages, pinned=pinned, micro_batch=micro)


def _without(name: str, rules: LayoutRules) -> LayoutRules | None:
    if name in rules.pinned:
        return replace(
            rules, pinned={key: size for key, size in rules.pinned.items() if key != name}
        )
    if name == "micro_batch":
        return replace(rules, micro_batch=None)
    return replace(rules, zero1=(False, True)) if name == "zero1" else None


def _check_kinds(changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if name not in FIELDS:
            raise PlanError(
                f"an option has no {name!r} to replace", hint=did_you_mean(name, FIELDS)
            )
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name in _COUNTS and not is_count:
            raise PlanError(f"{name}: expected a whole number above 0, got {value!r}")
        if name in _COUNTS and value > _MOST:
            raise PlanError(f"{name}: expected a whole number from 1 to {_MOST}, got more")
        if name in _SWITCHES and not isinstance(value, bool):
            raise PlanError(f"{name}: expected True or False, got {value!r}")


def _choose(name: str, value: Any, known: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise PlanError(
            f"{name}: {value!r} is not possible here", hint=f"it may be {join_words(sorted(known))}"
        )
    return value


def _refuse(name: str, value: Any, valid: str) -> PlanError:
    return PlanError(
        f"{name}: {value} does not go with these devices and the rest of the layout",
        hint=f"{name} may be {valid}",
    )


def _priced(prices: Sequence[Price], price: Price, *, spot: bool) -> Price:
    if spot == price.spot:
        return price
    alike = [one_price for one_price in prices
             if one_price.config == price.config and one_price.offer.key == price.offer.key]  # fmt: skip
    result = next((item for item in alike if item.spot == spot), None)
    if result is None and price.offer.price(spot=spot) is None:
        raise PlanError(
            f"spot: {price.offer.key} is not offered {'as spot' if spot else 'on demand'}",
            hint=f"spot may be {price.spot}",
        )
    return result or price._replace(spot=spot)
