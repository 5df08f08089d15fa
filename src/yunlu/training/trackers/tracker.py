"""The ``Tracker`` extension point: destinations of metrics besides the run's own files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run. A failing tracker is disabled with a warning; the run goes on.

    Built with no arguments. Called from one thread that is not the training loop's.
    """

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        """Start tracking this run; ``resumed`` is true for a later attempt of the same run."""
        ...

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Log metrics of one step, such as ``train/loss`` or ``validation/accuracy``."""
        ...

    def finish(self, *, state: str, summary: dict[str, Any]) -> None:
        """Close: the run ended in ``state`` (a ``RunState`` value) with these final metrics."""
        ...
