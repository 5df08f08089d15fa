"""Expected loss of time to spot interruptions. Pure.

The rates are assumptions, not measurements: clouds publish none by the hour. Those of the large clouds
are of the order of the monthly and daily shares that they tell; where capacity is resold, more.
"""

from __future__ import annotations

RATES_PER_HOUR = {"aws": 0.01, "gcp": 0.01, "azure": 0.01, "runpod": 0.03, "vast": 0.05}
"""Preemptions of one node per hour."""
USUAL_RATE_PER_HOUR = 0.02
RECOVERY_S = 420.0
"""Until another node is there and the last checkpoint is loaded."""
START_S = 300.0
"""From requesting a node in a cloud to the first step: found, booted, set up."""
START_HERE_S = 15.0
RATE_FACTOR = 3.0
"""80 % interval of the rates, as a factor: as much as they differ between regions."""
START_FACTOR = 2.0
"""Likewise of the start: images may be cached, or a node hard to find."""


def lost_share(cloud: str, *, nodes: float, checkpoint_s: float) -> float:
    """Share of each hour lost to interruptions: recovery, and half of a checkpoint interval."""
    rate = RATES_PER_HOUR.get(cloud, USUAL_RATE_PER_HOUR) * nodes
    return rate * (RECOVERY_S + checkpoint_s / 2) / 3600.0
