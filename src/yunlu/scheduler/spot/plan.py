"""The cheapest plan to the deadline under the spot model: exact dynamic programming.

A job that has ``left`` work and ``time`` to go has ``slack = time - left``. Running keeps the slack,
waiting spends it, and so does every start. The table holds, for every time to go, slack and state of
spot, what to do when idle and when on on-demand; on spot one stays (nothing is cheaper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.spot.model import up_states
from yunlu.scheduler.spot.values import HOUR_S, Mode

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

    from yunlu.scheduler.spot.model import SpotModel
    from yunlu.scheduler.spot.values import DeadlineJob

LEVELS = 300
"""Steps to the deadline; a start may divide them further."""
_MOST_STARTING = 4
"""Most steps that a start is divided into."""
_NEVER = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPlan:
    """Action in every state, and the expected cost."""

    step_s: float
    actions: NDArray[np.uint8]
    """By steps to go, state of spot and steps of slack: 3 x (when idle) + (when on on-demand)."""
    expected_dollars: NDArray[np.float64]
    """By state of spot: from the start, idle, to the end."""

    def choose(self, mode: Mode, *, time_left_s: float, left_s: float, state: int) -> Mode:
        """What to run on now."""
        slack = (time_left_s - left_s) / self.step_s
        levels, _, slacks = self.actions.shape
        level = min(max(round(time_left_s / self.step_s), 0), levels - 1)
        column = min(max(int(slack + 1e-9), 0), slacks - 1)
        packed = int(self.actions[level, state, column])
        return Mode(packed // 3 if mode is Mode.IDLE else packed % 3)


@dataclass(slots=True)
class _Level:
    """Expected costs to go, for one time to go: states x slacks."""

    idle: NDArray[np.float64]
    spot: NDArray[np.float64]
    on_demand: NDArray[np.float64]
    spot_starting: list[NDArray[np.float64]]
    """With one, two, ... steps of its start to come."""
    on_demand_starting: list[NDArray[np.float64]]


def make_spot_plan(
    job: DeadlineJob,
    model: SpotModel,
    *,
    spot_dollars_per_hour: float,
    on_demand_dollars_per_hour: float,
    levels: int = LEVELS,
) -> SpotPlan:
    """Plan one job."""
    step_s, starting = _choose_step(job, levels)
    work, slacks = math.ceil(job.work_s / step_s), int((job.deadline_s - job.work_s) / step_s) + 2
    sweep = _Sweep(
        moves=model.transitions(step_s),
        is_up=up_states()[:, None],
        spot=spot_dollars_per_hour * step_s / HOUR_S,
        on_demand=on_demand_dollars_per_hour * step_s / HOUR_S,
        starting=starting,
        fraction=0.0 if starting else job.restart_s / step_s,
        slacks=slacks,
    )
    last = work + slacks - 1
    states = sweep.is_up.shape[0]
    actions = np.zeros((last + 1, states, slacks), dtype=np.uint8)
    level = sweep.last()
    for number in range(1, last + 1):
        level = sweep.before(level, number, actions[number])
    return SpotPlan(step_s=step_s, actions=actions, expected_dollars=level.idle[:, -1].copy())


def _choose_step(job: DeadlineJob, levels: int) -> tuple[float, int]:
    """The length of a step, and of how many whole steps a start consists; 0 if of less than one."""
    coarse_s = job.deadline_s / levels
    if job.restart_s < coarse_s:
        return coarse_s, 0
    starting = min(_MOST_STARTING, max(1, int(job.restart_s / coarse_s)))
    return job.restart_s / starting, starting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """One backward step of the dynamic programme."""

    moves: csr_array
    is_up: NDArray[np.bool_]
    spot: float
    on_demand: float
    """Cost of a step."""
    starting: int
    fraction: float
    """Share of a step that a start takes, where it takes less than one."""
    slacks: int

    def last(self) -> _Level:
        """At the deadline: no cost to go."""
        zero = np.zeros((self.is_up.shape[0], self.slacks))
        return _Level(zero, zero, zero, [zero] * self.starting, [zero] * self.starting)

    def before(self, after: _Level, number: int, actions: NDArray[np.uint8]) -> _Level:
        """One step earlier; records the actions."""
        held_on_spot = [after.spot, *after.spot_starting[:-1]]
        held_on_demand = [after.on_demand, *after.on_demand_starting[:-1]]
        expected = self._expect(
            [
                after.idle,
                *(np.where(self.is_up, value, after.idle) for value in held_on_spot),
                *held_on_demand,
            ]
        )
        lost = [_spend(value) for value in expected]
        wait = self._safe(lost[0], 1)
        count = len(held_on_spot)
        spot = self.spot + expected[1]
        on_demand = self.on_demand + expected[1 + count]
        spot_starting = [self.spot + value for value in lost[1 : 1 + self.starting]]
        on_demand_starting = [
            self.on_demand + value for value in lost[1 + count : 1 + count + self.starting]
        ]
        if self.starting:
            start_spot, start_on_demand = spot_starting[-1], on_demand_starting[-1]
        else:
            part = self.fraction
            start_spot = part * self.spot + (1 - part) * spot + part * _spend(after.spot)
            start_on_demand = (
                part * self.on_demand + (1 - part) * on_demand + part * _spend(after.on_demand)
            )
        need = self.starting or self.fraction
        start_spot = np.where(self.is_up, self._safe(start_spot, need), _NEVER)
        choices_idle = np.stack([wait, start_spot, start_on_demand])
        # Leaving on-demand to wait never paid in replays, and near a tie it would oscillate.
        never = np.full_like(wait, _NEVER)
        choices_on_demand = np.stack([never, start_spot, on_demand])
        actions[:] = 3 * choices_idle.argmin(0) + choices_on_demand.argmin(0)
        level = _Level(
            choices_idle.min(0), spot, choices_on_demand.min(0), spot_starting, on_demand_starting
        )
        self._finish(level, number)
        return level

    def _expect(self, values: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        return np.split(self.moves @ np.hstack(values), len(values), axis=1)

    def _safe(self, value: NDArray[np.float64], spent: float) -> NDArray[np.float64]:
        """Forbidden where too little slack would be left to start on-demand afterwards."""
        need = (self.starting or self.fraction) + spent
        value = value.copy()
        value[:, : math.ceil(need - 1e-9)] = _NEVER
        return value

    def _finish(self, level: _Level, number: int) -> None:
        """Where slack is all that is left of the time, the work is done."""
        for value in (
            level.idle, level.spot, level.on_demand,
            *level.spot_starting, *level.on_demand_starting,
        ):  # fmt: skip
            value[:, number:] = 0.0


def _spend(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """The value with one step of slack less."""
    shifted = np.empty_like(value)
    shifted[:, 1:] = value[:, :-1]
    shifted[:, 0] = _NEVER
    return shifted
