"""Explanation of an option: shares of memory and time, and why it won or lost. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from yunlu.core.units import show_bytes, show_duration

if TYPE_CHECKING:
    from yunlu.planning.search.options import Interval, PlanOption

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


def explain_option(option: PlanOption) -> str:
    """Memory and time of one option, by component."""
    lines = [f"{option.hardware} ({option.hardware.device}): {describe_layout(option)}"]
    if option.reason:
        lines.append(f"  {option.reason}")
    lines.append(f"  memory of a device: {show_interval(option.memory_bytes, show_bytes)}")
    lines += _shares(option.memory_parts, show_bytes, {})
    lines.append(f"  a step: {show_interval(option.step_s, show_duration)}")
    lines += _shares(option.step_parts, show_duration, _STEP_WORDS)
    lines.append(f"  in all: {show_interval(option.total_s, show_duration)}")
    lines += _shares(option.total_parts, show_duration, {})
    text = " ".join(f"--set {shlex.quote(override)}" for override in option.overrides)
    lines.append(f"  to train it so: yunlu train JOB {text}")
    return "\n".join(lines)


def describe_layout(option: PlanOption) -> str:
    """``dp8 x tp2, micro-batch 4 x 2, selective recompute, bf16``."""
    parts = [str(option.layout) + (", zero1" if option.layout.zero1 else "")]
    parts.append(f"micro-batch {option.micro_batch} x {option.accumulation}")
    if option.recompute != "none":
        parts.append(f"{option.recompute} recompute")
    parts.append(option.precision)
    return ", ".join(parts)


def show_interval(interval: Interval, show: object) -> str:
    """``3.1 h (2.6 h to 3.8 h)``."""
    show_value = show if callable(show) else str
    return (
        f"{show_value(interval.value)} ({show_value(interval.low)} to {show_value(interval.high)})"
    )


def main_wait(option: PlanOption) -> str:
    """Largest component of a step besides compute, if it is large; else empty."""
    step_s = max(option.step_s.value, 1e-12)
    lost = {name: option.step_parts.get(name, 0.0) / step_s for name in _WAITS}
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
