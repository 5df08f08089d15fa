"""One option changed by hand: what may be said, and the question that follows from it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import did_you_mean
from yunlu.planning.choice.grid import lay_out
from yunlu.planning.choice.options import Option, PlanError
from yunlu.planning.foretell.points import RECOMPUTE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.planning.choice.grid import Rules
    from yunlu.planning.choice.rigs import Price
    from yunlu.planning.choice.search import Question, Rig

_AXES = ("dp", "fsdp", "tp", "pp")
_COUNTS = (*_AXES, "batch", "micro_batch", "nodes")
_SWITCHES = ("zero1", "spot")
FIELDS = (*_COUNTS, *_SWITCHES, "recompute", "precision")
"""What can be said."""


def narrow(
    question: Question,
    prices: Sequence[Price],
    price: Price,
    option: Option,
    changes: Mapping[str, Any],
) -> tuple[Question, Price]:
    """The question with what the option has and what is said; refuses what cannot be."""
    _check_kinds(changes)
    rig = question.rigs[price.rig]
    precision = _choose("precision", changes.get("precision", option.precision),
                        question.rules.keys() & rig.peak_flops.keys())  # fmt: skip
    recompute = _choose("recompute", changes.get("recompute", option.recompute), RECOMPUTE)
    nodes = changes.get("nodes", option.hardware.nodes)
    if nodes > rig.most_nodes:
        raise _refuse("nodes", nodes, range(1, rig.most_nodes + 1))
    kept = {axis: option.layout.size_of(axis) for axis in ("tp", "pp")}
    said = {axis: changes[axis] for axis in _AXES if axis in changes}
    zero1 = changes.get("zero1")
    rules = replace(
        question.rules[precision],
        batches=(changes.get("batch", option.batch),),
        pinned={**kept, **said},
        recompute=(RECOMPUTE.index(recompute),),
        micro_batch=changes.get("micro_batch"),
        zero1=(zero1,) if zero1 is not None else question.rules[precision].zero1,
    )
    devices = nodes * rig.devices
    rules = _settle(rig, devices, rules, changes, option)
    other = _priced(prices, price, spot=changes.get("spot", price.spot))
    narrowed = replace(
        question,
        rigs=(rig,),
        rules={precision: rules},
        nodes=nodes,
        most_devices=max(devices, question.most_devices),
        least_devices=1,
    )
    return narrowed, other._replace(rig=0)


def _settle(
    rig: Rig, devices: int, rules: Rules, changes: Mapping[str, Any], option: Option
) -> Rules:
    """The rules with which there is a layout; the option's own micro-batch where it still goes."""

    def count(tried: Rules) -> int:
        return len(lay_out(devices, min(rig.domain, devices), tried)["dp"])

    if rules.micro_batch is None:
        same = replace(rules, micro_batch=option.micro_batch)
        if count(same):
            return same
    if count(rules):
        return rules
    for name in changes:
        free = _without(name, rules)
        if free is None or not count(free):
            continue
        table = lay_out(devices, min(rig.domain, devices), free)
        column = "zero" if name == "zero1" else name
        found = np.unique(table[column]).astype(int).tolist()
        raise _refuse(name, changes[name], found)
    said = ", ".join(f"{name}={value}" for name, value in changes.items())
    raise PlanError(
        f"{said}: there is no such layout of {devices} devices.",
        hint="change fewer of them at once; each alone is told which values it may have",
    )


def _without(name: str, rules: Rules) -> Rules | None:
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
        if name in _SWITCHES and not isinstance(value, bool):
            raise PlanError(f"{name}: expected True or False, got {value!r}")


def _choose(name: str, value: Any, known: Iterable[str]) -> str:
    if value not in known:
        raise PlanError(
            f"{name}: {value!r} cannot be had here", hint=f"it may be {_words(sorted(known))}"
        )
    return str(value)


def _refuse(name: str, value: Any, valid: Iterable[int]) -> PlanError:
    return PlanError(
        f"{name}: {value} does not go with these devices and the rest of the layout",
        hint=f"{name} may be {_words([str(each) for each in valid])}",
    )


def _words(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _priced(prices: Sequence[Price], price: Price, *, spot: bool) -> Price:
    if spot == price.spot:
        return price
    alike = [each for each in prices
             if each.rig == price.rig and each.offer.key == price.offer.key]  # fmt: skip
    found = next((each for each in alike if each.spot == spot), None)
    if found is None and price.offer.price(spot=spot) is None:
        raise PlanError(
            f"spot: {price.offer.key} is not offered {'as spot' if spot else 'on demand'}",
            hint=f"spot may be {price.spot}",
        )
    return found or price._replace(spot=spot)
