"""Input and output of policies for spot with a deadline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HOUR_S = 3600.0


class Mode(IntEnum):
    """What the job runs on."""

    IDLE = 0
    SPOT = 1
    ON_DEMAND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineJob:
    """Work that must be done in time; spans in seconds from its start."""

    work_s: float
    """Run time without interruption."""
    deadline_s: float
    restart_s: float
    """Cost of every start: getting a node, loading, and unsaved work."""

    @property
    def is_feasible(self) -> bool:
        """Whether on-demand alone, started at once, is in time."""
        return self.deadline_s >= self.work_s + self.restart_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotMarket:
    """Availability and price of spot, tick by tick."""

    name: str
    step_s: float
    is_up: NDArray[np.bool_]
    spot_dollars_per_hour: NDArray[np.float64]
    on_demand_dollars_per_hour: float

    def __len__(self) -> int:
        return len(self.is_up)

    def cut(self, ticks: int) -> SpotMarket:
        """Its first ticks."""
        return replace(
            self, is_up=self.is_up[:ticks], spot_dollars_per_hour=self.spot_dollars_per_hour[:ticks]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotObservation:
    """What a policy observes at one tick: its progress, and spot now."""

    elapsed_s: float
    left_s: float
    """Work still to be done."""
    mode: Mode
    """What it runs on; already idle if spot has just been taken away."""
    starting_s: float
    """Rest of the current start; no work is done until then."""
    is_spot_up: bool
    spot_dollars_per_hour: float
    on_demand_dollars_per_hour: float
    spent_dollars: float
    step_s: float
    """Seconds until the next call."""


class DeadlinePolicy(Protocol):
    """A policy that meets a deadline cheaply; one object per job, called every tick."""

    name: str

    def choose(self, observed: SpotObservation) -> Mode:
        """What to run on until asked again. ``SPOT`` only while spot is up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotOutcome:
    """Cost and time of one job."""

    cost_dollars: float
    on_demand_cost_dollars: float
    """What on-demand would have cost for the work alone."""
    finished_s: float | None
    """None where the trace ended first."""
    is_late: bool
    spot_s: float
    on_demand_s: float
    starts: int
    modes: NDArray[np.int8]
    """What it ran on in each tick."""
    work_done_s: NDArray[np.float64]
    """Work done at the end of each tick."""

    @property
    def ratio(self) -> float:
        """Cost against on-demand."""
        return self.cost_dollars / self.on_demand_cost_dollars
