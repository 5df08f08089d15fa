"""Direction of a metric, from its name."""

from __future__ import annotations

_FALLING = ("loss", "error", "mse", "mae", "rmse", "wer", "cer", "perplexity", "bits")


def lower_is_better(metric: str) -> bool:
    """Losses and error rates fall when a model improves; the rest rises."""
    return any(word in metric.lower() for word in _FALLING)
