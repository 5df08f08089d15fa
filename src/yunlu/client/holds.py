"""Who needs a run besides other runs: the queue of the pool, and studies. Clean-up asks before it removes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError
from yunlu.jobs.cleanup import RunHold
from yunlu.runs.run_store import Document, read_json

if TYPE_CHECKING:
    from yunlu.jobs.run import RunRecord
    from yunlu.runs.run_store import RunStore


class HoldFinder:
    """Finds who needs a run; a study is opened once."""

    def __init__(self) -> None:
        self._best_runs: dict[str, set[str] | None] = {}

    def __call__(self, run: RunStore, record: RunRecord) -> RunHold | None:
        """Who needs a run that has ended; None where nobody does."""
        if record.state.can_resume and run.has(Document.QUEUE_ENTRY) and _is_queued(run):
            return RunHold(reason="queued", by="pool")
        study = (read_json(run, Document.TRIAL) or {}).get("study")
        return self._ask_study(study, run.id) if isinstance(study, str) else None

    def _ask_study(self, name: str, run_id: str) -> RunHold | None:
        from yunlu.tuning.study_dir import find_study, list_studies  # noqa: PLC0415 (slow to import)

        if name not in list_studies():  # deleted
            return None
        study = find_study(name)
        try:
            state = study.read_status().state
        except (YunluError, OSError):
            state = "stopped"
        if state in {"running", "stopped"}:  # a stopped study continues with its trials
            return RunHold(reason="study", by=name, is_live=state == "running")
        best = self._find_best(name)
        if best is None or run_id in best:
            return RunHold(reason="study-best", by=name, is_live=False)
        return None

    def _find_best(self, name: str) -> set[str] | None:
        """Runs of the best trials of a study; None where it cannot be read, so that any may be."""
        if name not in self._best_runs:
            try:
                from yunlu.tuning.records import read_view  # noqa: PLC0415 (slow to import: Optuna)

                view = read_view(name)
                best = {facts.run for facts in (*view.front, view.best) if facts is not None}
                self._best_runs[name] = {run for run in best if run is not None}
            except (YunluError, OSError, ImportError):
                self._best_runs[name] = None
        return self._best_runs[name]


def _is_queued(run: RunStore) -> bool:
    """Whether the pool will start the run again: nobody withdrew it, and it is not given up."""
    from yunlu.scheduler.allocation_record import read_allocation  # noqa: PLC0415 (slow to import)
    from yunlu.scheduler.queue import read_entry  # noqa: PLC0415

    try:
        entry = read_entry(run)
    except YunluError:  # of another version, perhaps: not for us to judge
        return True
    if entry is None or entry.wish == "stop":
        return False
    allocation = read_allocation(run)
    return not (allocation.given_up and allocation.ticket == entry.ticket)
