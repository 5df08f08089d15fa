"""Run registry: the runs of the pool, rebuilt from their stores at every observation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError
from yunlu.runs.run_store import Document, Log
from yunlu.runs.states import RunState
from yunlu.scheduler.allocation_record import read_allocation, reconcile, write_allocation
from yunlu.scheduler.queue import QueueEntry, read_entry, scan
from yunlu.scheduler.run_progress import RunProgress
from yunlu.scheduler.run_status import (
    Phase,
    ResourceRequest,
    RunObservation,
    ScheduledRun,
    find_phase,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.allocation_record import AllocationRecord
    from yunlu.scheduler.executor_adapter import RunControl
    from yunlu.scheduler.loop import SteadyClock


class RunRegistry:
    """Scheduled runs that are not over."""

    def __init__(
        self, home: Path, control: RunControl, clock: SteadyClock, *, name: str = ""
    ) -> None:
        self.home, self.control, self.clock, self.name = home, control, clock, name
        self.scheduled_runs: dict[str, ScheduledRun] = {}
        self.troubles: dict[str, str] = {}
        """Errors of the last observation, by run id."""
        self._over: dict[str, tuple[int, ...]] = {}
        self._unkept: set[str] = set()
        """Runs whose record on disk is out of date."""
        self._has_looked = False

    def refresh(self, types: Mapping[str, str]) -> None:
        """Observe every run that is not over.

        Args:
            types: Machines that are there, and the type of their devices.
        """
        result = {run.id: run for run in scan(self.home)}
        for run_id in [run_id for run_id in self.scheduled_runs if run_id not in result]:
            # Its directory is gone. Its processes may still run: its devices stay reserved.
            if not self.scheduled_runs[run_id].allocation.claims:
                del self.scheduled_runs[run_id]
        fresh = [d for d in result.values() if self._over.get(d.id) != _age(d)]
        if not self._has_looked:
            self._has_looked = True
            starting = [d for d in fresh if _was_starting(read_allocation(d))]
            self.control.find_strays(starting)
        for run in fresh:
            self._update(run, types)

    def ordered(self) -> list[ScheduledRun]:
        """Scheduling order: by priority, then by submission."""
        return sorted(
            self.scheduled_runs.values(),
            key=lambda s: (-s.entry.priority, s.entry.submitted_at, s.id),
        )

    def put(
        self, scheduled: ScheduledRun, allocation: AllocationRecord, *, is_pending: bool = False
    ) -> None:
        """Change the record of a run; a pending action that cannot be written must not be executed."""
        if is_pending:
            write_allocation(scheduled.run, allocation, is_pending=True)
            self._unkept.discard(scheduled.id)
        else:
            self._keep(scheduled, allocation)
        scheduled.allocation = allocation
        scheduled.phase = find_phase(
            scheduled.entry, allocation, scheduled.observation, now=self.clock.now()
        )

    def charge(self, scheduled: ScheduledRun, *, device_s: float, dollars: float) -> None:
        """Account for usage of a run; written with the next change, or periodically."""
        allocation = scheduled.allocation
        scheduled.allocation = allocation.model_copy(
            update={
                "served_device_s": allocation.served_device_s + device_s,
                "spent_dollars": allocation.spent_dollars + dollars,
            }
        )
        self._unkept.add(scheduled.id)

    def keep_all(self) -> None:
        """Write all records that are out of date."""
        for run_id in [*self._unkept]:
            if run_id in self.scheduled_runs:
                self._keep(self.scheduled_runs[run_id], self.scheduled_runs[run_id].allocation)
            else:
                self._unkept.discard(run_id)

    def drop_over(self) -> list[str]:
        """Stop observing runs that are over, until their files change. Paused ones stay visible."""
        ends = {phase for phase in Phase if phase.is_over} - {Phase.PAUSED}
        over = [
            s for s in self.scheduled_runs.values() if s.phase in ends and not s.allocation.claims
        ]
        over = [s for s in over if not s.problem and s.id not in self._unkept]
        # One that is given up is marked as failed first.
        over = [
            s for s in over if not s.allocation.given_up or s.observation.state is RunState.FAILED
        ]
        for scheduled in over:
            self._over[scheduled.id] = scheduled.age
            del self.scheduled_runs[scheduled.id]
        return [scheduled.id for scheduled in over]

    def _update(self, run: RunStore, types: Mapping[str, str]) -> None:
        self._over.pop(run.id, None)
        before = self.scheduled_runs.get(run.id)
        allocation = before.allocation if before is not None else read_allocation(run)
        progress = before.progress if before is not None else RunProgress(run)
        now, age = self.clock.now(), _age(run)
        try:
            entry = read_entry(run)
            if entry is None:  # withdrawn by a user between two observations
                return
            observation = self.control.observe(run)
            progress.take()
        except (YunluError, OSError, ValueError) as error:
            self._hold(run, allocation, progress, before, str(error))
            return
        after = reconcile(
            entry, allocation, observation, now=now, nodes=types.keys(), service=self.name
        )
        if observation.is_alive and (seen := progress.seen(_type_of(after, types))):
            after = after.model_copy(update={"seen": seen})
        phase = find_phase(entry, after, observation, now=now)
        scheduled = ScheduledRun(
            run=run,
            entry=entry,
            allocation=after,
            observation=observation,
            progress=progress,
            phase=phase,
            age=age,
        )
        self.scheduled_runs[run.id] = scheduled
        self.troubles.pop(run.id, None)
        if _gist(after) != _gist(allocation):
            self._keep(scheduled, after)
        elif after != allocation:
            self._unkept.add(run.id)
        elif run.id in self._unkept and phase.is_over:
            self._keep(scheduled, after)

    def _hold(
        self,
        run: RunStore,
        allocation: AllocationRecord,
        progress: RunProgress,
        before: ScheduledRun | None,
        problem: str,
    ) -> None:
        """A run that cannot be read keeps its devices and gets no more."""
        self.troubles[run.id] = problem
        if before is not None:
            before.problem, before.phase = problem, Phase.TROUBLED
            return
        devices = max(allocation.placement.devices, 1)
        self.scheduled_runs[run.id] = ScheduledRun(
            run=run,
            entry=QueueEntry(
                submitted_at=self.clock.now(),
                request=ResourceRequest(least=devices, most=devices, requested=devices),
            ),
            allocation=allocation,
            observation=RunObservation(state=RunState.PENDING, is_alive=bool(allocation.shares)),
            progress=progress,
            phase=Phase.TROUBLED,
            problem=problem,
        )

    def _keep(self, scheduled: ScheduledRun, allocation: AllocationRecord) -> None:
        try:
            write_allocation(scheduled.run, allocation)
            self._unkept.discard(scheduled.id)
        except OSError as error:  # kept in memory; the next service rebuilds it from the run
            scheduled.problem = f"its notes cannot be written: {error}"
            self.troubles[scheduled.id] = scheduled.problem
            self._unkept.add(scheduled.id)


def _gist(allocation: AllocationRecord) -> object:
    """The fields that must be on disk at once: all except counters and measurements."""
    return allocation.model_dump(exclude={"seen", "served_device_s", "spent_dollars"})


def _was_starting(allocation: AllocationRecord) -> bool:
    return allocation.pending is not None and allocation.pending.kind == "start"


def _type_of(allocation: AllocationRecord, types: Mapping[str, str]) -> str:
    names = [name for name, _ in allocation.shares] or [*types]
    return types.get(names[0], "device") if names else "device"


def _age(run: RunStore) -> tuple[int, ...]:
    """Changes when a file is written that makes the run active again."""
    stats = (run.stat(Document.QUEUE_ENTRY), run.stat(Log.EVENTS))
    return tuple(number for stat in stats for number in (stat.version if stat else (0, 0, 0)))
