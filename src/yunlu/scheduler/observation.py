"""Observed state of a run: process, devices, step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.jobs.run import MEMORY
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOPELESS = frozenset({"job", "data", "model", "missing", MEMORY})
"""Errors that come again with every attempt: what was asked for cannot be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """One look at a run."""

    state: RunState
    is_alive: bool
    """Whether any process works on it; its devices are taken as long as one does."""
    has_begun: bool = False
    """Whether a worker was started since it was last queued."""
    devices: int = 0
    """Devices its workers take, or will take when those that come have come; 0 where unknown."""
    shares: tuple[tuple[str, int], ...] = ()
    """The same by machine, where it may be on several."""
    lost_nodes: tuple[str, ...] = ()
    """Machines that were lost under it; its cluster may list them still."""
    is_settled: bool = False
    """Whether nobody of it is known to be on the way, neither in nor out."""
    waits_for: str = ""
    """Why nothing of it has started yet, though its cluster was asked to; empty where it has."""
    usable: int | None = None
    """The most that its model and batch can be split over, once that is known."""
    is_resizable: bool = False
    """Whether it can be asked now for another number of workers."""
    node: str = "local"
    """Where it runs, if on one machine."""
    step: int = 0
    steps: int | None = None
    error: str | None = None
    error_code: str | None = None
    usage: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def is_hopeless(self) -> bool:
        """Whether another attempt would end in the same way."""
        return self.state is RunState.FAILED and self.error_code in _HOPELESS
