"""The states of a run and the table of legal moves between them."""

from __future__ import annotations

from enum import StrEnum

from yunlu.core.errors import StoreError


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
    def is_failure(self) -> bool:
        """Whether an error ended the run."""
        return self in {RunState.FAILED, RunState.LOST}

    @property
    def can_resume(self) -> bool:
        """Whether ``yunlu resume`` may start another life."""
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
        allowed = ", ".join(sorted(LEGAL_MOVES[current])) or "nothing: it rests for good"
        raise StoreError(
            f"a run that is {current} cannot become {wanted} (it can become {allowed})"
        )


def replay_move(current: RunState, told: RunState) -> RunState:
    """Where a run stands after its log says ``told``, even where a crash tore lines out of the log.

    The worker's own word, and the start of a new life, are believed although a line before them
    may be missing. What others infer from outside (stopping, lost) never wakes a run that rests,
    and a finished run stays finished.
    """
    if told in LEGAL_MOVES[current]:
        return told
    if current is RunState.FINISHED:
        return current
    if told in {RunState.STOPPING, RunState.LOST}:
        # Lost is our verdict, not the worker's: if it speaks again it was alive after all.
        return told if current is RunState.LOST else current
    return told
