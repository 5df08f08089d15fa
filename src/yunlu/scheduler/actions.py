"""Moves carried out, one at a time. Each is written down before it is done."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError
from yunlu.executors.worker_process import launch_lock, record_worker, this_process
from yunlu.jobs.run import move as move_state
from yunlu.jobs.service import read_record
from yunlu.runs.states import RunState
from yunlu.scheduler.allocation_record import STALLED, PendingAction
from yunlu.scheduler.executor_adapter import NotNowError
from yunlu.scheduler.queue import change_entry

if TYPE_CHECKING:
    from yunlu.scheduler.clock import SteadyClock
    from yunlu.scheduler.executor_adapter import RunControl
    from yunlu.scheduler.moves import AllocationMove
    from yunlu.scheduler.run_registry import RunRegistry
    from yunlu.scheduler.run_status import ScheduledRun

_AGAIN_S = 10.0
_STALLED_S = 60.0


class ActionRunner:
    """What is done to runs."""

    def __init__(
        self, register: RunRegistry, hands: RunControl, clock: SteadyClock, *, name: str = ""
    ) -> None:
        self.register, self.hands, self.clock, self.name = register, hands, clock, name
        self._asked: dict[str, tuple[float, float]] = {}
        """When a run was first and last asked to stop, on the monotonic clock."""

    def do(self, stand: ScheduledRun, move: AllocationMove) -> str | None:
        """Carry out one move; the words say why it was not."""
        intention = PendingAction(
            kind=move.kind, shares=move.placement.shares, reason=move.reason, by=self.name
        )
        try:
            self._intend(stand, intention)
        except OSError as error:
            return f"not done, because it could not be written down: {error}"
        try:
            match move.kind:
                case "start":
                    self.hands.start(stand.run, move.placement)
                case "resize":
                    if not self.hands.resize(stand.run, move.placement):
                        self._intend(stand, PendingAction(kind="stop", reason="moved", by=self.name))
                        self._ask_to_stop(stand)
                case "stop":
                    self._ask_to_stop(stand)
        except NotNowError as error:
            self._drop(stand)
            return str(error)
        except (YunluError, OSError) as error:
            if move.kind == "resize":
                self._drop(stand)
            elif move.kind == "start":
                # What has become of it is seen at the next look. If nothing has, that is not the
                # run's fault: somebody else was just busy with it.
                nobodys = intention.model_copy(update={"by": ""})
                self.register.put(stand, stand.notes.model_copy(update={"intention": nobodys}))
            return f"{move.kind}: {error}"
        return None

    def hurry(self, stand: ScheduledRun) -> None:
        """Remind a run that is to stop; it may not have listened when it was asked."""
        if not stand.sight.is_alive:
            return
        now, intention = time.monotonic(), stand.notes.intention
        first, last = self._asked.get(stand.id, (now, -math.inf))
        is_stalled = intention is not None and intention.reason == STALLED
        is_saving = stand.sight.state is RunState.STOPPING and last > -math.inf
        is_saving = is_saving and not stand.sight.waits_for  # nothing of it runs that could save
        if now - last < _AGAIN_S or (is_saving and not is_stalled):
            return
        self._asked[stand.id] = (first, now)
        try:
            self.hands.stop(stand.run, now=is_stalled and now - first > _STALLED_S)
        except (YunluError, OSError) as error:
            self.register.troubles[stand.id] = f"it cannot be stopped: {error}"

    def dismiss(self, stand: ScheduledRun, reason: str) -> None:
        """Stop a run that may not go on, until its owner says otherwise."""
        try:
            change_entry(stand.run, wish="pause")
            self._ask_to_stop(stand)
        except (YunluError, OSError) as error:
            self.register.troubles[stand.id] = f"{reason}, but it cannot be paused: {error}"

    def end_stalled(self, stand: ScheduledRun) -> None:
        """Take devices back from a run that does nothing with them."""
        try:
            self._intend(stand, PendingAction(kind="stop", reason=STALLED, by=self.name))
            self._ask_to_stop(stand)
        except (YunluError, OSError) as error:
            self.register.troubles[stand.id] = f"it is stalled, and cannot be stopped: {error}"

    def call_off(self, stand: ScheduledRun, reason: str) -> None:
        """Take a run out of the queue of its cluster, to be started elsewhere. That is no fault of its own."""
        try:
            self._intend(stand, PendingAction(kind="stop", reason=reason, by=self.name))
            self._ask_to_stop(stand)
        except (YunluError, OSError) as error:
            self.register.troubles[stand.id] = f"{reason}, but it cannot be called off: {error}"

    def give_up(self, stand: ScheduledRun) -> str | None:
        """Let a run that failed too often rest as failed, with the reason; what was said, if anything."""
        if stand.sight.is_alive or stand.sight.state is RunState.FAILED:
            return None
        words = stand.notes.given_up
        try:
            with launch_lock(stand.run, wait=False):
                record = read_record(stand.run)
                if record.state in {RunState.LOST, RunState.STOPPED}:
                    record_worker(stand.run, this_process())
                    record = move_state(
                        stand.run, record, RunState.PENDING, reason="looked at by the pool"
                    )
                if record.state is RunState.PENDING:
                    move_state(stand.run, record, RunState.FAILED, reason=words)
        except (YunluError, OSError):
            return None  # tried again at the next look
        return words

    def _ask_to_stop(self, stand: ScheduledRun) -> None:
        now = time.monotonic()
        self._asked[stand.id] = (self._asked.get(stand.id, (now, now))[0], now)
        self.hands.stop(stand.run)

    def _intend(self, stand: ScheduledRun, intention: PendingAction) -> None:
        notes = stand.notes.model_copy(update={"intention": intention})
        if intention.kind == "start":
            self._asked.pop(stand.id, None)
            notes = notes.model_copy(update={"shares": intention.shares})
        self.register.put(stand, notes, is_intention=True)

    def _drop(self, stand: ScheduledRun) -> None:
        self.register.put(stand, stand.notes.model_copy(update={"intention": None}))
