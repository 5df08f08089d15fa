"""The states of a run and the table of legal moves between them."""

from __future__ import annotations

from enum import StrEnum

from yunlu.core.errors import StoreError


class RunState(StrEnum):
    """State of a run. In the last four it has ended."""

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
    def is_failure(self) -> bool:
        """Whether an error ended the run."""
        return self in {RunState.FAILED, RunState.LOST}

    @property
    def can_resume(self) -> bool:
        """Whether ``yunlu resume`` may start another attempt."""
        return RunState.PENDING in LEGAL_MOVES[self]


LEGAL_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset(
        {RunState.PLANNING, RunState.STOPPING, RunState.STOPPED, RunState.FAILED, RunState.LOST}
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


def check_move(current: RunState, wanted: RunState) -> None:
    """Refuse a move that the table does not allow."""
    if wanted not in LEGAL_MOVES[current]:
        allowed = ", ".join(sorted(LEGAL_MOVES[current])) or "nothing: it has ended for good"
        raise StoreError(
            f"a run that is {current} cannot become {wanted} (it can become {allowed})"
        )


def replay_move(current: RunState, logged: RunState) -> RunState:
    """State after the log says ``logged``, even where a crash tore lines out of the log.

    What the worker itself reports, and the start of a new attempt, are believed although a line before
    them may be missing. What others infer from outside (stopping, lost) never restarts a run that has
    ended, and a finished run stays finished.
    """
    if logged in LEGAL_MOVES[current]:
        return logged
    if current is RunState.FINISHED:
        return current
    if logged in {RunState.STOPPING, RunState.LOST}:
        # Lost is our verdict, not the worker's: if it writes again it was alive after all.
        return logged if current is RunState.LOST else current
    return logged
