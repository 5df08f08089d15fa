"""Spot with fallback to on-demand for a live job with a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.scheduler.spot.plan import LEVELS
from yunlu.scheduler.spot.policy import PlannedSpotPolicy, SpotPlanCache
from yunlu.scheduler.spot.prior import PRIOR
from yunlu.scheduler.spot.values import DeadlineJob, Mode, SpotObservation

if TYPE_CHECKING:
    from yunlu.scheduler.policy.values import Demand
    from yunlu.scheduler.spot.model import SpotModel


class DeadlineWatch:
    """Watches one job with a deadline: takes its progress, returns spot, on-demand or idle.

    Work is counted in seconds at ``goodput``, the useful samples a second of the size it would fall
    back to on on-demand (an efficient one that makes it); until then it may run at any size.
    Keeps what it learns of spot between calls; rebuilt after a restart, it only knows less of the past.
    Asked every ``step_s`` or sooner: that a machine is gone may go unnoticed for as long, once, before
    the job is on on-demand for good, so as much is held back of the deadline.

    It needs machines of both kinds on offer, as in simulations, and in live pools that have both.
    """

    def __init__(
        self,
        demand: Demand,
        *,
        now: float,
        goodput: float,
        step_s: float,
        model: SpotModel = PRIOR,
        levels: int = LEVELS,
    ) -> None:
        if demand.deadline_at is None or demand.remaining is None or goodput <= 0:
            raise ValueError(f"{demand.id}: a watch needs a deadline, a length and a speed")
        self.began_at = now
        self.goodput = goodput
        work_s = demand.remaining / goodput
        job = DeadlineJob(
            work_s=work_s,
            # With less slack there is nothing to plan: on-demand from now on.
            deadline_s=max(demand.deadline_at - now - step_s, work_s, 1.0),
            restart_s=demand.restart_s,
        )
        self.step_s = step_s
        self._policy = PlannedSpotPolicy(SpotPlanCache(job, model, levels))

    def choose(
        self,
        demand: Demand,
        *,
        now: float,
        mode: Mode,
        starting_s: float,
        is_spot_up: bool,
        spot_dollars_per_hour: float,
        on_demand_dollars_per_hour: float,
        spent_dollars: float,
    ) -> Mode:
        """What to run on until the next call."""
        return self._policy.choose(
            SpotObservation(
                elapsed_s=now - self.began_at,
                left_s=(demand.remaining or 0.0) / self.goodput,
                mode=mode,
                starting_s=starting_s,
                is_spot_up=is_spot_up,
                spot_dollars_per_hour=spot_dollars_per_hour,
                on_demand_dollars_per_hour=on_demand_dollars_per_hour,
                spent_dollars=spent_dollars,
                step_s=self.step_s,
            )
        )
