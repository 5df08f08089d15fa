"""Dispatcher of tickets: each is done once, whichever workers come and go, within the staleness bound.

Pure: events in, tickets out; the first shard has one, and logs what
must be durable (``claim`` and ``complete``).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from yunlu.training.communication.servers.rules import Ticket, TicketSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.training.communication.servers.rules import ServerRules

Wait = Literal["wait"]
End = Literal["end"]


@dataclass(slots=True)
class WorkerProgress:
    """State of a worker."""

    held: set[Ticket] = field(default_factory=set[Ticket])
    is_working: bool = False
    """Other workers wait for it: it takes tickets and has not paused since."""


class Dispatcher:
    """Hands out the tickets of all steps."""

    def __init__(self, rules: ServerRules) -> None:
        self.rules = rules
        self.workers: dict[str, WorkerProgress] = {}
        self.done = TicketSet(rules.first_step * rules.shares)
        """Numbers of tickets that are completed or dropped."""
        self.completed = 0
        self.dropped = 0
        self.is_stopping = False
        self._claimed: set[int] = set()
        """Claimed shares of the current step, if some shares are backups."""
        self._next = self.done.below
        self._lost: list[Ticket] = []
        self._pausing: set[str] = set()

    def join(self, worker: str, held: Iterable[Ticket] = ()) -> None:
        """A worker joins, or reconnects with tickets it still holds."""
        progress = self.workers.setdefault(worker, WorkerProgress())
        still_held = {ticket for ticket in held if self.may_claim(ticket)}
        self._release(progress.held - still_held)
        progress.held = still_held
        self._lost = sorted(set(self._lost) - still_held)
        progress.is_working = progress.is_working or bool(still_held)

    def leave(self, worker: str) -> None:
        """A worker left: its tickets are handed out again."""
        self._pausing.discard(worker)
        progress = self.workers.pop(worker, None)
        if progress is not None:
            self._release(progress.held)

    def take(self, worker: str) -> Ticket | Wait | End:
        """Next ticket for this worker."""
        if self._is_over():
            return "end"
        progress = self.workers[worker]
        progress.is_working = True
        ticket = self._next_ticket()
        if ticket is None:
            return "wait"
        progress.held.add(ticket)
        return ticket

    def may_claim(self, ticket: Ticket) -> bool:
        """Whether a gradient of this ticket still counts."""
        number = self._number(ticket)
        if not ticket.exists(self.rules):
            return False
        if number in self.done or not self.rules.backups:
            return number not in self.done
        return number in self._claimed or len(self._claimed) < self.rules.needed

    def claim(self, ticket: Ticket) -> None:
        """The gradient counts: the step does not end without it."""
        self._claimed.add(self._number(ticket))

    def complete(self, worker: str, ticket: Ticket) -> None:
        """Every shard has the gradient of this ticket."""
        progress = self.workers.get(worker)
        if progress is not None and ticket in progress.held:
            progress.held.remove(ticket)
        number = self._number(ticket)
        if number in self.done:
            return
        self.completed += 1
        self.done.add(number)
        if self.rules.backups:
            self._end_step(ticket.step)

    def forget(self, worker: str, ticket: Ticket) -> None:
        """A worker's ticket no longer counts: it was late."""
        progress = self.workers.get(worker)
        if progress is not None and ticket in progress.held:
            progress.held.remove(ticket)

    def pause(self, worker: str) -> bool:
        """Hand out no tickets until this worker resumes; refused while it holds tickets."""
        progress = self.workers[worker]
        if all(self._number(ticket) in self.done for ticket in progress.held):
            self._pausing.add(worker)
            progress.is_working = False
        return worker in self._pausing

    def resume(self, worker: str) -> None:
        """Hand out tickets again."""
        self._pausing.discard(worker)

    def is_drained(self) -> bool:
        """Whether all shards have applied the same tickets."""
        held = [ticket for other in self.workers.values() for ticket in other.held]
        return not self._lost_needed() and all(self._number(ticket) in self.done for ticket in held)

    def can_drain(self) -> bool:
        """Whether a worker is left to complete the tickets in progress."""
        return bool(self._working())

    def state(self) -> dict[str, Any]:
        """Durable state as JSON; workers report the rest when they reconnect."""
        return {
            "over": self.done.pack(),
            "claimed": sorted(self._claimed),
            "completed": self.completed,
            "dropped": self.dropped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.done = TicketSet.unpack(state["over"])
        self._claimed = set(state["claimed"])
        self.completed, self.dropped = state["completed"], state["dropped"]
        self._next = self.done.below

    def _is_over(self) -> bool:
        if self.done.below >= self.rules.steps * self.rules.shares:
            return True
        return self.is_stopping and self.is_drained()

    def _working(self) -> list[WorkerProgress]:
        return [progress for progress in self.workers.values() if progress.is_working]

    def _next_ticket(self) -> Ticket | None:
        if self._lost_needed():
            return heapq.heappop(self._lost)
        if self._pausing or self.is_stopping:
            return None
        held = {self._number(ticket) for other in self.workers.values() for ticket in other.held}
        while self._next in self.done or self._next in held:
            self._next += 1
        ticket = self._ticket(self._next)
        if ticket.step >= self.rules.steps or not self._is_open(ticket.step):
            return None
        self._next += 1
        return ticket

    def _is_open(self, step: int) -> bool:
        """Whether tickets of this step may start."""
        oldest = self.done.below // self.rules.shares
        if self.rules.mode != "bsp":
            # All but the newest steps are in the weights (Ho et al. 2013), whichever worker did them: a
            # slow worker does fewer tickets, and holds the others back only by its current one.
            return self.rules.mode == "asp" or step - oldest <= self.rules.staleness
        # With backups, the claimed shares complete the step: start no more.
        return step == oldest and (not self.rules.backups or len(self._claimed) < self.rules.needed)

    def _end_step(self, step: int) -> None:
        numbers = range(step * self.rules.shares, (step + 1) * self.rules.shares)
        if sum(number in self.done for number in numbers) < self.rules.needed:
            return
        for number in numbers:
            if number not in self.done:
                self.dropped += 1
                self.done.add(number)
        self._claimed.clear()
        self._next = max(self._next, self.done.below)

    def _release(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            heapq.heappush(self._lost, ticket)

    def _lost_needed(self) -> bool:
        """Whether a lost ticket must be done by another worker; forgets those done meanwhile."""
        while self._lost and not self.may_claim(self._lost[0]):
            heapq.heappop(self._lost)
        return bool(self._lost)

    def _number(self, ticket: Ticket) -> int:
        return ticket.number(self.rules)

    def _ticket(self, number: int) -> Ticket:
        return Ticket(*divmod(number, self.rules.shares))
