"""Observed state of a run: process, devices, step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.jobs.run import MEMORY
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOPELESS = frozenset({"job", "data", "model", "missing", MEMORY})
"""Errors that every attempt would repeat: the request cannot be satisfied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """One observation of a run."""

    state: RunState
    is_alive: bool
    """Whether any process works on it; its devices are in use as long as one does."""
    has_begun: bool = False
    """Whether a worker was started since it was last queued."""
    devices: int = 0
    """Devices its workers use, or will use once joining workers are there; 0 where unknown."""
    shares: tuple[tuple[str, int], ...] = ()
    """The same by node, where it may be on several."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes it lost; its cluster may still list them."""
    is_settled: bool = False
    """Whether no worker of it is joining or leaving."""
    waits_for: str = ""
    """Why no process of it has started yet, although its cluster was asked to; empty if one has."""
    usable: int | None = None
    """The most devices its model and batch can be split over, once known."""
    is_resizable: bool = False
    """Whether it accepts a resize now."""
    node: str = "local"
    """Its node, if it runs on one node."""
    step: int = 0
    steps: int | None = None
    error: str | None = None
    error_code: str | None = None
    usage: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def is_hopeless(self) -> bool:
        """Whether another attempt would end in the same way."""
        return self.state is RunState.FAILED and self.error_code in _HOPELESS
