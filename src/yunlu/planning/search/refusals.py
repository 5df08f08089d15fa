"""Errors when there is no option: the cause and what to change. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from yunlu.planning.search.layout_search import node_counts
from yunlu.planning.search.options import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from yunlu.planning.search.layout_search import LayoutQuery, LayoutSearchResult


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
