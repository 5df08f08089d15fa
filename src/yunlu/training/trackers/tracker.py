"""The ``Tracker`` door: where metrics go besides the run's own files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job


@runtime_checkable
class Tracker(Protocol):
    """Receives what a run logs. A tracker that fails is dropped with a warning; the run goes on.

    Built with no arguments. Called from one thread that is not the training loop's.
    """

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        """Open the tracker for this run; ``resumed`` is true for a later life of the same run."""
        ...

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Take named numbers of one step, such as ``train/loss`` or ``validation/accuracy``."""
        ...

    def finish(self, *, state: str, summary: dict[str, Any]) -> None:
        """Close: the run rests in ``state`` (a ``RunState`` value) with these final figures."""
        ...
