"""State and progress of a run in a few numbers: what a list of runs shows."""

from __future__ import annotations

from yunlu.core.value import Value
from yunlu.runs.states import RunState


class RunSummary(Value):
    """State and progress of a run in a few numbers."""

    state: RunState = RunState.PENDING
    created_at: float = 0.0
    updated_at: float = 0.0
    pid: int | None = None
    process_started_at: float | None = None
    step: int | None = None
    steps: int | None = None
    metric: str | None = None
    """Name of the metric that people quote for this task."""
    metric_value: float | None = None
    error: str | None = None
    layout: str | None = None
    """How several workers split the work; None where one worker trains."""
    workers: int | None = None
