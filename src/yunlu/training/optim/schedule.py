"""The learning rate as a share of its peak: pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(slots=True, kw_only=True)
class Plateau:
    """Lowers the rate when the metric stands still."""

    factor: float
    patience: int
    scale: float = 1.0
    waited: int = 0

    def observe(self, *, improved: bool) -> bool:
        """Take one evaluation; true if the rate was lowered."""
        self.waited = 0 if improved else self.waited + 1
        if self.waited < self.patience:
            return False
        self.scale *= self.factor
        self.waited = 0
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.scale, self.waited = state["scale"], state["waited"]
