"""Explanation of a plan: shares of memory and time, and why it won or lost. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from yunlu.core.units import show_bytes, show_duration

if TYPE_CHECKING:
    from yunlu.planning.plan import Interval, Plan

_STEP_WORDS = {
    "compute": "computing",
    "tp": "tensor parallel",
    "pp_bubble": "pipeline bubble",
    "dp": "gradients and shards",
    "optimizer": "optimiser",
    "input": "input",
    "other": "other",
}
_WAITS = {
    "tp": "tensor parallel waits for links",
    "pp_bubble": "pipeline bubble",
    "dp": "waits for gradients and shards",
    "input": "waits for input",
    "other": "overheads of small work",
}
_MUCH = 0.15
"""Share of a step that is worth mentioning."""
_ALIKE = 1.05


def explain_plan(plan: Plan) -> str:
    """Memory and time of one plan, by component."""
    parts, hardware = plan.prediction, plan.hardware
    lines = [f"{hardware} ({hardware.device}): {describe_layout(plan)}"]
    if plan.reason:
        lines.append(f"  {plan.reason}")
    lines.append(f"  memory of a device: {show_interval(plan.memory_bytes, show_bytes)}")
    lines += _shares(parts.memory_parts, show_bytes, {})
    lines.append(f"  a step: {show_interval(plan.step_s, show_duration)}")
    lines += _shares(parts.step_parts, show_duration, _STEP_WORDS)
    lines.append(f"  in all: {show_interval(plan.total_s, show_duration)}")
    lines += _shares(parts.total_parts, show_duration, {})
    lines += [f"  {item.name} {item.value}: {item.reason}" for item in plan.choices if item.reason]
    text = " ".join(f"--set {shlex.quote(override)}" for override in plan.overrides)
    lines.append(f"  to train it so: yunlu train JOB {text}")
    return "\n".join(lines)


def describe_layout(plan: Plan) -> str:
    """``dp8 x tp2, micro-batch 4 x 2, selective recompute, bf16``."""
    parts = [str(plan.layout) + (", zero1" if plan.layout.zero1 else "")]
    parts.append(f"micro-batch {plan.micro_batch} x {plan.accumulation}")
    if plan.recompute != "none":
        parts.append(f"{plan.recompute} recompute")
    parts.append(plan.precision)
    return ", ".join(parts)


def show_interval(interval: Interval, show: object) -> str:
    """``3.1 h (2.6 h to 3.8 h)``."""
    show_value = show if callable(show) else str
    return (
        f"{show_value(interval.value)} ({show_value(interval.low)} to {show_value(interval.high)})"
    )


def main_wait(plan: Plan) -> str:
    """Largest component of a step besides compute, if it is large; else empty."""
    step_s = max(plan.step_s.value, 1e-12)
    lost = {name: plan.prediction.step_parts.get(name, 0.0) / step_s for name in _WAITS}
    name = max(lost, key=lambda item: lost[item])
    return f"{_WAITS[name]} {lost[name]:.0%}" if lost[name] >= _MUCH else ""


def compare(value: float, best: float, worse: str) -> str:
    """``3.1x dearer``; empty where they are similar."""
    if best <= 0 or value <= best * _ALIKE:
        return ""
    return f"{value / best:.1f}x {worse}" if value < 100 * best else f"{value / best:,.0f}x {worse}"


def _shares(parts: dict[str, float], show: object, labels: dict[str, str]) -> list[str]:
    say = show if callable(show) else str
    whole = sum(parts.values()) or 1.0
    return [
        f"    {labels.get(name, name.replace('_', ' ')):<22}{say(value):>12}  {value / whole:4.0%}"
        for name, value in parts.items()
        if value > 0.0005 * whole
    ]
