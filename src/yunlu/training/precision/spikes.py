"""Detection of loss spikes."""

from __future__ import annotations

import math

_DECAY = 0.95
_WARM = 20
_DEVIATIONS = 8.0


class SpikeDetector:
    """Detects losses far above the running mean."""

    def __init__(self) -> None:
        self._mean = self._square = 0.0
        self._count = 0

    def add(self, loss: float) -> bool:
        """Add one loss; true if it is a spike. Spikes do not enter the statistics."""
        if not math.isfinite(loss):
            return False
        deviation = math.sqrt(max(self._square - self._mean**2, 0.0))
        if self._count >= _WARM and loss > self._mean + _DEVIATIONS * deviation + abs(self._mean):
            return True
        weight = max(1 - _DECAY, 1 / (self._count + 1))
        self._mean += weight * (loss - self._mean)
        self._square += weight * (loss**2 - self._square)
        self._count += 1
        return False

    def state(self) -> list[float]:
        """State for a checkpoint."""
        return [self._mean, self._square, self._count]

    def restore(self, state: list[float]) -> None:
        """Continue from a checkpoint."""
        self._mean, self._square, count = state
        self._count = int(count)
