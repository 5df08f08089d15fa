"""Learning rate reduction on a plateau of the metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Plateau:
    """Lowers the rate when the metric stops improving."""

    factor: float
    patience: int
    scale: float = 1.0
    waited: int = 0

    def observe(self, *, improved: bool) -> bool:
        """Record one evaluation; true if the rate was lowered."""
        self.waited = 0 if improved else self.waited + 1
        if self.waited < self.patience:
            return False
        self.scale *= self.factor
        self.waited = 0
        return True

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"scale": self.scale, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.scale, self.waited = state["scale"], state["waited"]
