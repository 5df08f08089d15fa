"""Being replaced by ``yunlu.runs.events`` and ``yunlu.runs.step_metrics``."""

from __future__ import annotations

from yunlu.runs.events import Event

__all__ = ["WORKERS", "Event", "EventKind"]


class EventKind:
    """Being replaced by the classes of ``yunlu.runs.events``."""

    STATE = "state"
    LIFE = "attempt"
    ENVIRONMENT = "environment"
    DATA = "data"
    MODEL = "model"
    PLAN = "plan"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    WARNING = "warning"
    ERROR = "error"
    EXPORT = "export"
    MEASURED = "measured"
    SKIP = "skip"
    ROLLBACK = "rollback"
    PRECISION = "precision"
    OUT_OF_MEMORY = "out_of_memory"
    TRACE = "trace"
    CREW = "worker_group"
    FAULT = "fault"
    STRAGGLER = "straggler"
    COMMUNICATION = "communication"
    BATCH = "batch"
    PROGRESS = "progress"


WORKERS = "workers"
"""In the servers' directory: how many workers there are to be, where that was changed."""
