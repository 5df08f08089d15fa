"""Total duration from requesting the nodes to the finished model, with its interval. Pure."""

from __future__ import annotations

from math import hypot
from typing import TYPE_CHECKING

from yunlu.hardware.offer import HERE
from yunlu.planning.plan import Interval
from yunlu.planning.search.spot import (
    RATE_FACTOR,
    START_FACTOR,
    START_HERE_S,
    START_S,
    lost_share,
)

if TYPE_CHECKING:
    from yunlu.planning.search.hardware_configs import Price

MOST_LOST = 0.9
"""Most of an hour lost to interruptions: beyond, nothing is predicted."""


def start_seconds(price: Price, *, here_s: float = START_HERE_S) -> float:
    """Seconds until the first step; ``here_s`` on this machine."""
    return here_s if price.offer.cloud == HERE else START_S


def sum_up(
    price: Price,
    *,
    nodes: int,
    steps: int,
    step: Interval,
    evaluating: float,
    checkpoint_s: float,
    start_s: float,
) -> tuple[dict[str, float], Interval]:
    """Seconds by component, and in total.

    Step, start and interruptions err independently, so their errors add up as squares do.
    """
    lost = lost_share(price.offer.cloud, nodes=nodes, checkpoint_s=checkpoint_s) * price.spot
    run = step.times(steps * (1.0 + evaluating))
    whole = run.times(_longer(lost))
    start = _around(start_s, START_FACTOR)
    parts = {
        "start_up": start.value,
        "steps": steps * step.value,
        "evaluation": steps * step.value * evaluating,
        "interruptions": whole.value - run.value,
    }
    taken_back = Interval(
        value=whole.value,
        low=run.value * _longer(lost / RATE_FACTOR),
        high=run.value * _longer(lost * RATE_FACTOR),
    )
    return parts, _add(whole.value + start.value, (whole, start, taken_back))


def _add(value: float, parts: tuple[Interval, ...]) -> Interval:
    below = hypot(*(part.value - part.low for part in parts))
    above = hypot(*(part.high - part.value for part in parts))
    return Interval(value=value, low=value - below, high=value + above)


def _around(value: float, factor: float) -> Interval:
    return Interval(value=value, low=value / factor, high=value * factor)


def _longer(lost: float) -> float:
    return 1.0 / (1.0 - min(lost, MOST_LOST))
