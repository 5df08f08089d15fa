"""Who does which ticket: each is done once, whoever comes and goes; nobody runs too far ahead.

Pure: it is told what happens and says what follows; the first shard keeps one, and writes down what
must outlive it (``claim`` and ``complete``).
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
    """What is known of a worker."""

    held: set[Ticket] = field(default_factory=set[Ticket])
    is_working: bool = False
    """Others wait for it: it asked for work, and not for a pause since."""


class Dispatcher:
    """Hands out the tickets of all steps."""

    def __init__(self, rules: ServerRules) -> None:
        self.rules = rules
        self.workers: dict[str, WorkerProgress] = {}
        self.over = TicketSet(rules.first_step * rules.shares)
        """Completed, or dropped: nobody needs to do them."""
        self.completed = 0
        self.dropped = 0
        self.is_stopping = False
        self._claimed: set[int] = set()
        """Of the step under way, where some shares need not come: those that count."""
        self._next = self.over.below
        self._lost: list[Ticket] = []
        self._pausing: set[str] = set()

    def join(self, worker: str, held: Iterable[Ticket] = ()) -> None:
        """A worker comes, or comes back with tickets it still has."""
        standing = self.workers.setdefault(worker, WorkerProgress())
        kept = {each for each in held if self.may_claim(each)}
        self._release(standing.held - kept)
        standing.held = kept
        self._lost = sorted(set(self._lost) - kept)
        standing.is_working = standing.is_working or bool(kept)

    def leave(self, worker: str) -> None:
        """A worker is gone: nobody waits for it, and others do its tickets."""
        self._pausing.discard(worker)
        standing = self.workers.pop(worker, None)
        if standing is not None:
            self._release(standing.held)

    def take(self, worker: str) -> Ticket | Wait | End:
        """The next piece of work for this worker."""
        if self._is_over():
            return "end"
        standing = self.workers[worker]
        standing.is_working = True
        ticket = self._find()
        if ticket is None:
            return "wait"
        standing.held.add(ticket)
        return ticket

    def may_claim(self, ticket: Ticket) -> bool:
        """Whether the gradient of this ticket still counts."""
        number = self._number(ticket)
        if not ticket.exists(self.rules):
            return False
        if number in self.over or not self.rules.backups:
            return number not in self.over
        return number in self._claimed or len(self._claimed) < self.rules.needed

    def claim(self, ticket: Ticket) -> None:
        """It counts: whatever becomes of the worker, the step does not end without it."""
        self._claimed.add(self._number(ticket))

    def complete(self, worker: str, ticket: Ticket) -> None:
        """Every shard has this ticket's gradient."""
        standing = self.workers.get(worker)
        if standing is not None and ticket in standing.held:
            standing.held.remove(ticket)
        number = self._number(ticket)
        if number in self.over:
            return
        self.completed += 1
        self.over.add(number)
        if self.rules.backups:
            self._end_step(ticket.step)

    def forget(self, worker: str, ticket: Ticket) -> None:
        """A worker found that its ticket does not count: it came late."""
        standing = self.workers.get(worker)
        if standing is not None and ticket in standing.held:
            standing.held.remove(ticket)

    def pause(self, worker: str) -> bool:
        """Hand out nothing new until this worker resumes; not while it has work of its own."""
        standing = self.workers[worker]
        if all(self._number(each) in self.over for each in standing.held):
            self._pausing.add(worker)
            standing.is_working = False
        return worker in self._pausing

    def resume(self, worker: str) -> None:
        """Go on."""
        self._pausing.discard(worker)

    def is_drained(self) -> bool:
        """Whether all shards have had the same tickets: none is under way."""
        held = [each for other in self.workers.values() for each in other.held]
        return not self._lost_needed() and all(self._number(each) in self.over for each in held)

    def can_drain(self) -> bool:
        """Whether somebody is left to end what is under way."""
        return bool(self._working())

    def state(self) -> dict[str, Any]:
        """What outlives this process, as JSON; the rest the workers tell when they come back."""
        return {
            "over": self.over.pack(),
            "claimed": sorted(self._claimed),
            "completed": self.completed,
            "dropped": self.dropped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.over = TicketSet.unpack(state["over"])
        self._claimed = set(state["claimed"])
        self.completed, self.dropped = state["completed"], state["dropped"]
        self._next = self.over.below

    def _is_over(self) -> bool:
        if self.over.below >= self.rules.steps * self.rules.shares:
            return True
        return self.is_stopping and self.is_drained()

    def _working(self) -> list[WorkerProgress]:
        return [each for each in self.workers.values() if each.is_working]

    def _find(self) -> Ticket | None:
        if self._lost_needed():
            return heapq.heappop(self._lost)
        if self._pausing or self.is_stopping:
            return None
        held = {self._number(each) for other in self.workers.values() for each in other.held}
        while self._next in self.over or self._next in held:
            self._next += 1
        ticket = self._ticket(self._next)
        if ticket.step >= self.rules.steps or not self._is_open(ticket.step):
            return None
        self._next += 1
        return ticket

    def _is_open(self, step: int) -> bool:
        """Whether tickets of this step may be begun."""
        oldest = self.over.below // self.rules.shares
        if self.rules.mode != "bsp":
            # All but the newest steps are in the weights (Ho et al. 2013), whoever did them: one who
            # is slow does fewer tickets, and holds the others back only by the one it has.
            return self.rules.mode == "asp" or step - oldest <= self.rules.staleness
        # With shares that need not come, those claimed end the step: no more is to be begun.
        return step == oldest and (not self.rules.backups or len(self._claimed) < self.rules.needed)

    def _end_step(self, step: int) -> None:
        numbers = range(step * self.rules.shares, (step + 1) * self.rules.shares)
        if sum(number in self.over for number in numbers) < self.rules.needed:
            return
        for number in numbers:
            if number not in self.over:
                self.dropped += 1
                self.over.add(number)
        self._claimed.clear()
        self._next = max(self._next, self.over.below)

    def _release(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            heapq.heappush(self._lost, ticket)

    def _lost_needed(self) -> bool:
        """Whether a ticket waits for somebody else to do it; those that were done meanwhile go."""
        while self._lost and not self.may_claim(self._lost[0]):
            heapq.heappop(self._lost)
        return bool(self._lost)

    def _number(self, ticket: Ticket) -> int:
        return ticket.number(self.rules)

    def _ticket(self, number: int) -> Ticket:
        return Ticket(*divmod(number, self.rules.shares))
