"""Two safety nets that hold whatever spot does next: in time, and at most one restart above on-demand.

Both are kept step by step. As long as a job is not on on-demand, enough time *and* enough money are
left to start on-demand now and finish there. A step that could break this is not taken, so nothing
about the future has to be guessed for the promise to hold (the idea of a safety net: Wu et al.,
"Can't Be Late", NSDI'24, section 3.3; theirs holds back two restarts, here the next step is checked).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.scheduler.spot.values import HOUR_S, Mode

if TYPE_CHECKING:
    from yunlu.scheduler.spot.values import DeadlineJob, SpotObservation

_SPARE_S = 1e-6
"""Tolerance for rounding of sums over thousands of ticks."""


def apply_safety_net(job: DeadlineJob, observed: SpotObservation, wanted: Mode) -> Mode:
    """The wanted mode, or the nearest one that keeps both guarantees."""
    if wanted is Mode.SPOT and not observed.is_spot_up:
        wanted = Mode.IDLE
    for mode in (wanted, Mode.ON_DEMAND if observed.mode is Mode.ON_DEMAND else Mode.IDLE):
        if is_in_time(job, observed, mode) and is_within_cost(job, observed, mode):
            return mode
    return Mode.ON_DEMAND


def is_in_time(job: DeadlineJob, observed: SpotObservation, mode: Mode) -> bool:
    """Whether on-demand, started after one step of ``mode``, still meets the deadline."""
    if mode is Mode.ON_DEMAND:
        return True
    time_left_s = job.deadline_s - observed.elapsed_s
    lost_s = _lost_s(job, observed, mode)
    return time_left_s - lost_s >= observed.left_s + job.restart_s - _SPARE_S


def is_within_cost(job: DeadlineJob, observed: SpotObservation, mode: Mode) -> bool:
    """Whether finishing on on-demand after one step of ``mode`` costs at most one restart too many.

    The most that may be spent is what on-demand alone costs, its one start included, and one start
    on on-demand more.
    """
    if mode is Mode.ON_DEMAND:
        return True
    price = observed.on_demand_dollars_per_hour
    step_dollars = 0.0
    left_s = observed.left_s
    if mode is Mode.SPOT:
        run_s = min(observed.step_s, left_s + _lost_s(job, observed, mode))
        step_dollars = observed.spot_dollars_per_hour * run_s / HOUR_S
        left_s -= run_s - min(run_s, _lost_s(job, observed, mode))
    most = price * (job.work_s + 2 * job.restart_s) / HOUR_S
    back = price * (left_s + job.restart_s) / HOUR_S
    return observed.spent_dollars + step_dollars + back <= most * (1 + 1e-12)


def _lost_s(job: DeadlineJob, observed: SpotObservation, mode: Mode) -> float:
    """Part of the next step that does no work."""
    if mode is Mode.IDLE:
        return observed.step_s
    starting_s = observed.starting_s if observed.mode is mode else job.restart_s
    return min(observed.step_s, starting_s)
