"""The states of a run and the table of legal moves between them."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """Where a run stands. The last four are resting states."""

    PENDING = "pending"
    PLANNING = "planning"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"

    @property
    def is_active(self) -> bool:
        """Whether a worker should be alive."""
        return self in ACTIVE

    @property
    def can_resume(self) -> bool:
        """Whether ``yunlu resume`` may start another life."""
        return RunState.PENDING in LEGAL_MOVES[self]


LEGAL_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset(
        {RunState.PLANNING, RunState.STOPPED, RunState.FAILED, RunState.LOST}
    ),
    RunState.PLANNING: frozenset(
        {RunState.RUNNING, RunState.STOPPING, RunState.STOPPED, RunState.FAILED, RunState.LOST}
    ),
    RunState.RUNNING: frozenset(
        {RunState.STOPPING, RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.LOST}
    ),
    RunState.STOPPING: frozenset(
        {RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.LOST}
    ),
    RunState.FINISHED: frozenset(),
    RunState.STOPPED: frozenset({RunState.PENDING}),
    RunState.FAILED: frozenset({RunState.PENDING}),
    RunState.LOST: frozenset({RunState.PENDING}),
}

ACTIVE = frozenset({RunState.PENDING, RunState.PLANNING, RunState.RUNNING, RunState.STOPPING})
