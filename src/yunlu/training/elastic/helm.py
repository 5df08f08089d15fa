"""One generation after another: when it ends, who is in the next, who is started or sent away."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from yunlu.runs.states import RunState
from yunlu.training.elastic.generations import GenerationPlan, plan_generation
from yunlu.training.elastic.membership import (
    LOCAL,
    Membership,
    NodeRecord,
    WorkerRecord,
    kill,
)
from yunlu.training.elastic.messages import (
    Assignment,
    Failed,
    Fork,
    Halt,
    Kill,
    Leave,
    Pause,
    RankAssignment,
    Stop,
)
from yunlu.training.elastic.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.core.value import Value
    from yunlu.planning.layout import Layout
    from yunlu.training.elastic.control_server import ControlServer
    from yunlu.training.elastic.event_reporter import EventReporter

ADOPT_S = 8.0
"""How long a new supervisor waits for the workers of the old one to report."""
_SETTLE_S = 10.0
_SETTLE_LONG_S = 120.0
_REMEMBERED = 100
"""Generations in which somebody may still hold a copy."""
_BARREN, _VAIN = 5, 30
"""So many generations in a row without a completed step, or without a new one: it will not get better."""
MAX_START_FAILURES = 5
_DETAIL_CHARACTERS = 500

Stage = Literal["planning", "gathering", "running", "pausing", "halting", "adopting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How the run ends."""

    state: RunState
    reason: str = ""
    is_changing: bool = False
    """It does not: asynchronous workers go on with it."""


class Helm:
    """Keeps the crew at work; ``Captain`` tells it what happens."""

    def __init__(
        self,
        links: ControlServer,
        logbook: EventReporter,
        *,
        devices: int,
        spares: int,
        plan_only: bool = False,
        start_node: Callable[[], None],
        save: Callable[[], None],
    ) -> None:
        self.links = links
        self.logbook = logbook
        self.spares = spares
        self.plan_only = plan_only
        self.start_node = start_node
        self.save = save
        """Writes the journal."""
        self.is_dirty = False
        """The journal is to be written, when there is time."""
        self.roster = Membership(nodes={LOCAL: NodeRecord(name=LOCAL, wanted=devices)})
        self.watchdog = Watchdog()
        self.stage: Stage = "planning"
        self.generation = 0
        self.layouts: dict[int, Layout] = {}
        self.history: dict[int, Layout] = {}
        self.outcome: RunOutcome | None = None
        self.is_stopping = False
        self._reason = "started"
        self._changed_at: float | None = None
        self._has_stepped = False
        self._furthest = 0
        self._barren = self._vain = self._reached = 0
        self._detail = ""
        """What broke the last generation off, in the words of who noticed it first."""
        self._stillborn = 0
        self._stage_at = time.monotonic()
        self._looked_at = 0.0
        self._told_at = 0.0
        self._ticked_at = self._stage_at
        self._node_losses = 0
        """Ends of our own node in a row, without its having become ready."""
        self._node_due_at: float | None = None

    # One generation after another.

    def _go_on(self) -> None:
        now = time.monotonic()
        if self.outcome is not None:
            return
        busy, settled = self.roster.having("busy"), self.roster.having("settled")
        if self._has_ended(busy, settled):
            return
        match self.stage:
            case "adopting":
                self._adopt(now)
            case "running":
                self._refill(now)
                if reason := self._find_reason():
                    self._begin_pause(reason, now)
                elif not busy:
                    self._enter("gathering", now)
            case "pausing" | "halting":
                if not busy:
                    self._form(now)
            case "gathering":
                self._refill(now)
                stay, _ = self.roster.candidates()
                if stay and (len(stay) >= self.roster.seats or not self.roster.having("starting")):
                    self._form(now)
            case "planning":
                pass

    def _has_ended(self, busy: list[WorkerRecord], settled: list[WorkerRecord]) -> bool:
        if busy or self.stage == "adopting":
            return False
        if settled and all(member.ending for member in settled):
            endings = {member.ending for member in settled}
            if endings == {"changed"}:
                self.outcome = RunOutcome(state=RunState.RUNNING, is_changing=True)
            else:
                self._end(RunState.FINISHED if "finished" in endings else RunState.STOPPED, "")
        elif self.is_stopping and not settled:
            self._end(RunState.STOPPED, "no worker was left to save")
        return self.outcome is not None

    def _find_reason(self) -> str | None:
        """Why the generation should end at the next step boundary, if it should."""
        if not self._has_stepped or self.is_stopping:
            return None
        seated = [member for member in self.roster.having("busy") if member.rank is not None]
        leaving = [member for member in seated if member.is_leaving]
        if leaving:
            names = ", ".join(str(member.number) for member in leaving)
            is_aside = all(member.is_aside for member in leaving)
            return f"member {names} {'steps aside' if is_aside else 'leaves'}"
        stay, _ = self.roster.candidates()
        if not stay:
            return None
        wanted = self._layout_for(min(len(stay), self.roster.seats))
        now = self.history[self.generation]
        if wanted.world == now.world:
            return None
        is_growing = wanted.world > now.world
        # Several that come at once are taken in together.
        if is_growing and len(stay) < self.roster.seats and self.roster.having("starting"):
            return None
        return f"{now.world} to {wanted.world} workers"

    def _begin_pause(self, reason: str, now: float) -> None:
        self._reason, self._changed_at = reason, None
        self._enter("pausing", now)
        for member in self.roster.having("busy"):
            self.links.send(member.link, Pause(generation=self.generation))

    def _begin_halt(self, reason: str, now: float) -> None:
        if self.stage == "halting":
            return
        self._reason, self._changed_at = reason, now
        self._barren += not self._has_stepped
        self._vain = self._vain + 1 if self._furthest <= self._reached else 0
        self._enter("halting", now)
        for member in self.roster.having("busy", "settled"):
            member.ending = None  # the others' end was not reached: it is to be tried again
            self.links.send(member.link, Halt(generation=self.generation))

    def _hurry(self, now: float) -> None:
        """Whoever does not get out of a broken generation is lost; asked after all was heard."""
        if self.stage != "halting":
            return
        # Who computes hears of it only at the next exchange, a whole step later at worst.
        settle_s = max(_SETTLE_S, 3 * self.watchdog.usual_step_s)
        for member in self.roster.having("busy"):
            phase = member.beat.phase if member.beat else "starting"
            is_short = phase in {"step", "sync", "forming", "starting"}
            if now - self._stage_at > (settle_s if is_short else _SETTLE_LONG_S):
                self._lose_member(member, "hung", f"did not leave {phase!r} when told to")

    def _form(self, now: float) -> None:
        if self._barren >= _BARREN or self._vain >= _VAIN:
            count = max(self._barren, self._vain)
            words = f"{count} attempts in a row failed before one new step was completed"
            words += f"; the last: {self._detail[:_DETAIL_CHARACTERS]}" if self._detail else ""
            self._end_badly(words, None)
            return
        stay, give = self.roster.candidates()
        reports = [
            *(member.report(may_stay=True) for member in stay),
            *(member.report(may_stay=False) for member in give),
        ]
        decision = plan_generation(
            reports,
            layouts=self.history,
            current=self.generation,
            target=self.roster.seats,
            replan=self._layout_for,
        )
        if decision is None:
            self._enter("gathering", now)
            self._refill(now)
            return
        self._apply(decision, now)

    def _apply(self, decision: GenerationPlan, now: float) -> None:
        members = self.roster.members
        self.generation += 1
        self.history[self.generation] = decision.layout
        self._has_stepped, self._reached = False, self._furthest
        for member in self.roster.having("settled"):
            if member.number not in decision.seats:
                member.rank = None
                member.move("idle", at=now)
        self._give_slots(decision)
        for rank, number in enumerate([*decision.seats, *decision.guests]):
            members[number].rank = rank if number in decision.seats else None
            members[number].ending = None
            members[number].move("busy", at=now)
        self._enter("running", now)
        self.save()  # before anybody acts on it: the next supervisor must know this generation
        seats = tuple(
            RankAssignment(member=number, host=members[number].host, pid=members[number].pid)
            for number in decision.seats
        )
        for rank, number in enumerate([*decision.seats, *decision.guests]):
            self._say(
                number,
                Assignment(
                    generation=self.generation,
                    layout=decision.layout,
                    rank=members[number].rank,
                    slot=members[number].slot,
                    seats=seats,
                    guests=decision.guests,
                    meeting_rank=rank,
                    before=decision.before,
                    restore=decision.restore,
                    reason=self._reason,
                ),
            )
            if self.is_stopping:
                self._say(number, Stop())
        self._refill(now)

    def _give_slots(self, decision: GenerationPlan) -> None:
        """Each keeps its device; who comes takes the lowest that is free on its node."""
        taken: dict[str, set[int]] = {}
        seated = [self.roster.members[number] for number in decision.seats]
        for member in sorted(seated, key=lambda member: member.rank is None):
            here = taken.setdefault(member.node, set())
            if member.rank is None or member.slot in here:
                member.slot = next(slot for slot in range(len(here) + 1) if slot not in here)
            here.add(member.slot)

    def _first_step(self, step: int, now: float) -> None:
        """The generation works: what was kept for its sake can go."""
        self._has_stepped, self._barren, self._detail = True, 0, ""
        layout = self.history[self.generation]
        from_step = step - 1
        self.logbook.tell_crew(
            self.generation,
            layout,
            [member for member in self.roster.having("busy") if member.rank is not None],
            reason=self._reason,
            from_step=from_step,
            redone_steps=max(0, self._furthest - from_step) if self.generation > 1 else 0,
            lost_s=None if self._changed_at is None else now - self._changed_at,
        )
        self._changed_at = None
        for member in self.roster.having("idle"):
            member.live, member.copies = None, ()
            if member.is_leaving:
                self._dismiss(member)
        for generation in [g for g in self.history if g < self.generation - _REMEMBERED]:
            del self.history[generation]

    def _refill(self, now: float) -> None:
        """Start workers that are missing; send those away that are too many."""
        if not self.layouts or self.is_stopping or self.outcome is not None:
            return
        for node in self.roster.nodes.values():
            here = self.roster.having("starting", "idle", "busy", "settled", node=node.name)
            here = [member for member in here if not member.is_leaving]
            wanted = node.seats + (self.spares if node.is_local else 0)
            if node.is_ready:
                for _ in range(wanted - len(here)):
                    member = self.roster.add(node.name, at=now)
                    self.links.send(node.link, Fork(member=member.number))
            idle = self.roster.having("idle", node=node.name)
            if self.stage == "running" and self._has_stepped and not self._find_reason():
                for member in idle[: max(0, len(here) - wanted)]:
                    self._dismiss(member)

    def _adopt(self, now: float) -> None:
        """The workers of the supervisor before us report one by one."""
        missing = [m for m in self.roster.having("busy", "idle", "settled") if m.link is None]
        absent = [node for node in self.roster.nodes.values() if node.link is None]
        if (missing or absent) and now - self._stage_at < ADOPT_S:
            return
        for member in missing:
            self._lose_member(member, "killed", "did not report to the new supervisor")
        for node in absent:
            if not node.is_local:
                del self.roster.nodes[node.name]
        busy, settled = self.roster.having("busy"), self.roster.having("settled")
        seats = self.history[self.generation].world if self.generation in self.history else 0
        self._has_stepped = True
        self._reason = "the supervisor was replaced"
        if not self.layouts:
            self._enter("planning", now)
        elif not busy and not settled:
            self._enter("gathering", now)
        elif not busy and all(member.ending for member in settled):
            self._enter("running", now)  # all is done: the end is found at the next look
        elif settled or len([m for m in busy if m.rank is not None]) < seats:
            self._enter("running", now)
            self._begin_halt("the supervisor was replaced in the middle of a change", now)
        else:
            self._enter("running", now)
        if self.roster.nodes[LOCAL].link is None and self._node_due_at is None:
            self._node_due_at = now

    def _lose_member(self, member: WorkerRecord, what: str, detail: str) -> None:
        now = time.monotonic()
        was = member.status
        member.move("gone", at=now)
        self.is_dirty = True
        self.watchdog.forget(member.number)
        kill_it = Kill(member=member.number)
        if (node := self.roster.nodes.get(member.node)) is not None:
            self.links.send(node.link, kill_it)
        if member.node == LOCAL:
            kill(member.pid, member.process_started_at)
        if member.link is not None:
            self.links.close(member.link)
            member.link = None
        if was in {"busy", "settled"} and member.ending is None:
            self.logbook.tell_fault(member, what, detail)
        if was == "starting":
            self._stillborn += 1
            if self._stillborn >= MAX_START_FAILURES:
                self._end_badly(
                    f"{STILLBORN} workers in a row ended before they were ready", member
                )
        elif was == "busy" and self.stage != "adopting":
            self._begin_halt(f"member {member.number} (rank {member.rank}) was {what}", now)

    def _dismiss(self, member: WorkerRecord) -> None:
        """It is not needed any more, and no fault when it goes."""
        self.links.send(member.link, Leave())
        member.move("gone", at=time.monotonic())
        self.watchdog.forget(member.number)

    def _layout_for(self, devices: int) -> Layout:
        fitting = [count for count in self.layouts if count <= devices]
        return self.layouts[max(fitting) if fitting else min(self.layouts)]

    def _enter(self, stage: Stage, now: float) -> None:
        self.stage, self._stage_at = stage, now

    def begin_adoption(self) -> None:
        """Take over what a supervisor before us left."""
        self._enter("adopting", time.monotonic())

    def _say(self, number: int, message: Value) -> None:
        self.links.send(self.roster.members[number].link, message)

    # Ends.

    def _fail(self, failure: Failed, member: WorkerRecord | None) -> None:
        """The first failure is the run's; what follows from it is not told."""
        if self.outcome is None:
            self.logbook.tell_failure(failure, member)
            self._end(RunState.FAILED, "")

    def _end_badly(self, words: str, member: WorkerRecord | None) -> None:
        if self.outcome is None:
            self.logbook.tell_hopeless(words, member)
            self._end(RunState.FAILED, "")

    def _end(self, state: RunState, reason: str) -> None:
        self.outcome = RunOutcome(state=state, reason=reason)
