"""Changes of an option by hand: validated, and turned into a new query. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import did_you_mean
from yunlu.planning.predict.query_batch import RECOMPUTE
from yunlu.planning.search.grid import enumerate_layouts
from yunlu.planning.search.options import PlanError
from yunlu.planning.search.refusals import join_words, refuse_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from yunlu.planning.layout import Layout
    from yunlu.planning.plan import Plan
    from yunlu.planning.predict.query_batch import Column
    from yunlu.planning.search.grid import LayoutRules
    from yunlu.planning.search.hardware_configs import Price
    from yunlu.planning.search.layout_search import HardwareConfig, LayoutQuery

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
