"""The runs the pool looks after: found again at every look, from nothing but their directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError
from yunlu.runs.run_store import Document, Log
from yunlu.runs.states import RunState
from yunlu.scheduler.allocation_record import read_allocation, reconcile, write_allocation
from yunlu.scheduler.observation import RunObservation
from yunlu.scheduler.queue import QueueEntry, read_entry, scan
from yunlu.scheduler.resource_request import ResourceRequest
from yunlu.scheduler.run_progress import RunProgress
from yunlu.scheduler.run_status import Phase, ScheduledRun, find_phase

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.allocation_record import AllocationRecord
    from yunlu.scheduler.clock import SteadyClock
    from yunlu.scheduler.executor_adapter import RunControl


class RunRegistry:
    """Stands of all runs that are not over."""

    def __init__(self, home: Path, hands: RunControl, clock: SteadyClock, *, name: str = "") -> None:
        self.home, self.hands, self.clock, self.name = home, hands, clock, name
        self.stands: dict[str, ScheduledRun] = {}
        self.troubles: dict[str, str] = {}
        """Of runs, by their id: what could not be read or written at the last look."""
        self._over: dict[str, tuple[int, ...]] = {}
        self._unkept: set[str] = set()
        """Runs whose notes on disk are older than ours."""
        self._has_looked = False

    def refresh(self, types: Mapping[str, str]) -> None:
        """Look at every run that is not over.

        Args:
            types: Machines that are there, and the type of their devices.
        """
        found = {run.id: run for run in scan(self.home)}
        for run_id in [run_id for run_id in self.stands if run_id not in found]:
            # Its directory is gone. What still runs of it we cannot know; nothing is given away.
            if not self.stands[run_id].notes.claims:
                del self.stands[run_id]
        fresh = [d for d in found.values() if self._over.get(d.id) != _age(d)]
        if not self._has_looked:
            self._has_looked = True
            starting = [d for d in fresh if _was_starting(read_allocation(d))]
            self.hands.find_strays(starting)
        for run in fresh:
            self._look(run, types)

    def ordered(self) -> list[ScheduledRun]:
        """In the order in which they are served: by priority, then as they came."""
        return sorted(
            self.stands.values(), key=lambda s: (-s.entry.priority, s.entry.submitted_at, s.id)
        )

    def put(self, stand: ScheduledRun, notes: AllocationRecord, *, is_intention: bool = False) -> None:
        """Change the notes on a run; an intention that cannot be written must not be acted on."""
        if is_intention:
            write_allocation(stand.run, notes, is_intention=True)
            self._unkept.discard(stand.id)
        else:
            self._keep(stand, notes)
        stand.notes = notes
        stand.phase = find_phase(stand.entry, notes, stand.sight, now=self.clock.now())

    def charge(self, stand: ScheduledRun, *, device_s: float, dollars: float) -> None:
        """Count what a run has had; written down with the next change, or now and then."""
        notes = stand.notes
        stand.notes = notes.model_copy(
            update={
                "served_device_s": notes.served_device_s + device_s,
                "spent_dollars": notes.spent_dollars + dollars,
            }
        )
        self._unkept.add(stand.id)

    def keep_all(self) -> None:
        """Write down what has not been."""
        for run_id in [*self._unkept]:
            if run_id in self.stands:
                self._keep(self.stands[run_id], self.stands[run_id].notes)
            else:
                self._unkept.discard(run_id)

    def drop_over(self) -> list[str]:
        """Stop looking at runs that are over, until somebody changes them. Paused ones are shown."""
        ends = {phase for phase in Phase if phase.is_over} - {Phase.PAUSED}
        over = [s for s in self.stands.values() if s.phase in ends and not s.notes.claims]
        over = [s for s in over if not s.problem and s.id not in self._unkept]
        # One that is given up is told so first.
        over = [s for s in over if not s.notes.given_up or s.sight.state is RunState.FAILED]
        for stand in over:
            self._over[stand.id] = stand.age
            del self.stands[stand.id]
        return [stand.id for stand in over]

    def _look(self, run: RunStore, types: Mapping[str, str]) -> None:
        self._over.pop(run.id, None)
        before = self.stands.get(run.id)
        notes = before.notes if before is not None else read_allocation(run)
        course = before.course if before is not None else RunProgress(run)
        now, age = self.clock.now(), _age(run)
        try:
            entry = read_entry(run)
            if entry is None:  # withdrawn by hand between two looks
                return
            sight = self.hands.look(run)
            course.take()
        except (YunluError, OSError, ValueError) as error:
            self._hold(run, notes, course, before, str(error))
            return
        after = reconcile(entry, notes, sight, now=now, nodes=types.keys(), service=self.name)
        if sight.is_alive and (seen := course.seen(_type_of(after, types))):
            after = after.model_copy(update={"seen": seen})
        phase = find_phase(entry, after, sight, now=now)
        stand = ScheduledRun(
            run=run,
            entry=entry,
            notes=after,
            sight=sight,
            course=course,
            phase=phase,
            age=age,
        )
        self.stands[run.id] = stand
        self.troubles.pop(run.id, None)
        if _gist(after) != _gist(notes):
            self._keep(stand, after)
        elif after != notes:
            self._unkept.add(run.id)
        elif run.id in self._unkept and phase.is_over:
            self._keep(stand, after)

    def _hold(
        self, run: RunStore, notes: AllocationRecord, course: RunProgress, before: ScheduledRun | None, problem: str
    ) -> None:
        """What cannot be read keeps what it has, and gets nothing."""
        self.troubles[run.id] = problem
        if before is not None:
            before.problem, before.phase = problem, Phase.TROUBLED
            return
        devices = max(notes.placement.devices, 1)
        self.stands[run.id] = ScheduledRun(
            run=run,
            entry=QueueEntry(
                submitted_at=self.clock.now(),
                needs=ResourceRequest(least=devices, most=devices, asked=devices),
            ),
            notes=notes,
            sight=RunObservation(state=RunState.PENDING, is_alive=bool(notes.shares)),
            course=course,
            phase=Phase.TROUBLED,
            problem=problem,
        )

    def _keep(self, stand: ScheduledRun, notes: AllocationRecord) -> None:
        try:
            write_allocation(stand.run, notes)
            self._unkept.discard(stand.id)
        except (
            OSError
        ) as error:  # kept in mind; from the run itself the next service finds the same
            stand.problem = f"its notes cannot be written: {error}"
            self.troubles[stand.id] = stand.problem
            self._unkept.add(stand.id)


def _gist(notes: AllocationRecord) -> object:
    """What must be on disk at once: all that is not counted or measured."""
    return notes.model_dump(exclude={"seen", "served_device_s", "spent_dollars"})


def _was_starting(notes: AllocationRecord) -> bool:
    return notes.intention is not None and notes.intention.kind == "start"


def _type_of(notes: AllocationRecord, types: Mapping[str, str]) -> str:
    names = [name for name, _ in notes.shares] or [*types]
    return types.get(names[0], "device") if names else "device"


def _age(run: RunStore) -> tuple[int, ...]:
    """Changes when anybody writes what would wake the run."""
    stats = (run.stat(Document.QUEUE_ENTRY), run.stat(Log.EVENTS))
    return tuple(number for stat in stats for number in (stat.version if stat else (0, 0, 0)))
