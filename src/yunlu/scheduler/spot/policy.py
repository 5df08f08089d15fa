"""The policy for spot with a deadline: follows the plan; the safety net guarantees the deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.scheduler.spot.model import SpotHistory
from yunlu.scheduler.spot.plan import LEVELS, make_spot_plan
from yunlu.scheduler.spot.prior import PRIOR
from yunlu.scheduler.spot.safety_net import apply_safety_net
from yunlu.scheduler.spot.values import Mode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from yunlu.scheduler.spot.model import SpotModel
    from yunlu.scheduler.spot.plan import SpotPlan
    from yunlu.scheduler.spot.values import DeadlineJob, SpotObservation

_PRICE_STEP = 0.05
"""Prices that differ by less than this share of on-demand have one plan."""
_FACTOR_STEP = 0.5
"""Zones whose spells end at similar rates (within this power of two) have one plan."""
_MOST_FACTOR_STEPS = 4


@dataclass(slots=True)
class SpotPlanCache:
    """Plans of one job by spot price and zone; made on demand, and shared."""

    job: DeadlineJob
    model: SpotModel = PRIOR
    levels: int = LEVELS
    made: dict[tuple[int, int, int], SpotPlan] = field(
        default_factory=dict[tuple[int, int, int], "SpotPlan"], init=False
    )

    def at(self, price_share: float, *, up: float = 1.0, down: float = 1.0) -> SpotPlan:
        """The plan where spot costs this share of on-demand (which costs 1 an hour).

        ``up`` and ``down`` say how many times as fast as in the model spells end there.
        """
        price = min(max(round(price_share / _PRICE_STEP), 1), round(1 / _PRICE_STEP) - 1)
        key = (price, _factor_steps(up), _factor_steps(down))
        if key not in self.made:
            self.made[key] = make_spot_plan(
                self.job,
                self.model.scaled(
                    up=2 ** (key[1] * _FACTOR_STEP), down=2 ** (key[2] * _FACTOR_STEP)
                ),
                spot_dollars_per_hour=price * _PRICE_STEP,
                on_demand_dollars_per_hour=1.0,
                levels=self.levels,
            )
        return self.made[key]


def _factor_steps(factor: float) -> int:
    steps = round(math.log2(factor) / _FACTOR_STEP)
    return min(max(steps, -_MOST_FACTOR_STEPS), _MOST_FACTOR_STEPS)


class PlannedSpotPolicy:
    """Follows the plan from the history of the zone, within the safety net."""

    name = "planned"

    def __init__(self, plans: SpotPlanCache, *, price_share: float = 0.3) -> None:
        self.job = plans.job
        self.memory = SpotHistory(plans.model)
        self._plans = plans
        self._price_share = price_share
        """Price of spot relative to on-demand, where known."""

    def recall(self, was_up: NDArray[np.bool_], step_s: float) -> None:
        """Learn from the history of the zone before the job began."""
        for is_up in was_up.tolist():
            self.memory.observe(is_up, step_s)

    def choose(self, observed: SpotObservation) -> Mode:
        """The plan's choice, or the nearest one that is safe."""
        self.memory.observe(observed.is_spot_up, observed.step_s)
        if observed.is_spot_up:
            self._price_share = observed.spot_dollars_per_hour / observed.on_demand_dollars_per_hour
        return apply_safety_net(self.job, observed, self._choose_by_plan(observed))

    def _choose_by_plan(self, observed: SpotObservation) -> Mode:
        if observed.mode is Mode.SPOT:
            return Mode.SPOT
        plan = self._plans.at(
            self._price_share, up=self.memory.factor(True), down=self.memory.factor(False)
        )
        return plan.choose(
            observed.mode,
            time_left_s=self.job.deadline_s - observed.elapsed_s - observed.starting_s,
            left_s=observed.left_s,
            state=self.memory.state,
        )
