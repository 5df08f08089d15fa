"""Simulated interruptions for a price history, which has prices but no preemptions."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.spot.model import up_states

if TYPE_CHECKING:
    from yunlu.scheduler.spot.model import SpotModel
    from yunlu.scheduler.spot.values import SpotMarket


def interrupt(market: SpotMarket, model: SpotModel, *, random: np.random.Generator) -> SpotMarket:
    """The same prices, with spells drawn from the model; spot is up only where it was offered."""
    moves = np.cumsum(model.transitions(market.step_s).toarray(), axis=1).tolist()
    is_up = up_states()
    last = len(is_up) - 1
    state = int(random.integers(len(is_up)))
    states: list[int] = []
    for chance in random.random(len(market)).tolist():
        states.append(state)
        state = min(bisect_left(moves[state], chance), last)
    return replace(market, is_up=market.is_up & is_up[states])
