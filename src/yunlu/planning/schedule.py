"""Learning-rate schedule: share of the peak rate at a step. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yunlu.spec.train import ScheduleSpec


def rate(spec: ScheduleSpec, step: float, *, steps: int, warmup_steps: int) -> float:
    """The share of the peak used by ``step`` (counted from 0) of ``steps``."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    span = max(steps - warmup_steps, 1)
    done = min((step - warmup_steps) / span, 1.0)
    match spec.name:
        case "constant" | "plateau":
            return 1.0
        case "linear":
            return 1 - (1 - spec.final) * done
        case "cosine":
            return spec.final + (1 - spec.final) * (1 + math.cos(math.pi * done)) / 2
        case "wsd":  # warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395): linear decay
            falling = max((done - (1 - spec.decay)) / spec.decay, 0.0)
            return 1 - (1 - spec.final) * falling
