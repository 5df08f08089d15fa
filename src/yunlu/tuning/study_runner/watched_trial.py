"""A trial whose run the runner watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yunlu.jobs.run import RunRecord
    from yunlu.runs.run_store import RunStore
    from yunlu.tuning.study_runner.trial_events import TrialEvents


@dataclass(slots=True, kw_only=True)
class WatchedTrial:
    """A started trial and the events read so far."""

    number: int
    """Of its trial."""
    run: RunStore
    record: RunRecord
    events: TrialEvents
    verdict_sent: str = ""
    """``hold`` or ``prune``, once sent."""
    checked_at: float = 0.0
    lost: int = 0
    """Times that its worker was lost since its last evaluation."""
