"""The coordinator of a worker group: message handlers, generations, and the end of the run."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from yunlu.runs.events import StateChanged, WarningRaised
from yunlu.runs.states import RunState
from yunlu.training.elastic.generations import GenerationPlan, plan_generation
from yunlu.training.elastic.membership import (
    LOCAL,
    Membership,
    NodeRecord,
    WorkerRecord,
    is_stopped,
    kill,
)
from yunlu.training.elastic.messages import (
    Assignment,
    ClientHello,
    Done,
    Exited,
    Failed,
    Fork,
    Forked,
    Halt,
    Heartbeat,
    Kill,
    LayoutsPlanned,
    Leave,
    LeaveNotice,
    LocateRun,
    Message,
    NodeHello,
    Pause,
    Paused,
    Ping,
    Prepared,
    RankAssignment,
    Ready,
    Reply,
    Resize,
    Stop,
    StoreHosted,
    StoreLocated,
    WorkerHello,
)
from yunlu.training.elastic.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.core.value import Value
    from yunlu.planning.layout import Layout
    from yunlu.training.elastic.control_server import ControlConnection, ControlServer
    from yunlu.training.elastic.event_reporter import EventReporter
    from yunlu.training.elastic.watchdog import HealthVerdict

_START_S = 300.0
_NODE_AGAIN_S = 5.0
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


class Coordinator:
    """Assign ranks, start and replace workers, and form one generation after another.

    ``Supervisor`` owns the process, the lock and the loop; it passes on messages, lost connections and ticks.
    """

    def __init__(
        self,
        server: ControlServer,
        reporter: EventReporter,
        *,
        devices: int,
        spares: int,
        plan_only: bool = False,
        start_node: Callable[[], None],
        save: Callable[[], None],
    ) -> None:
        self.server = server
        self.reporter = reporter
        self.spares = spares
        self.plan_only = plan_only
        self.start_node = start_node
        self.save = save
        """Writes the journal."""
        self.is_dirty = False
        """The journal is to be written, when there is time."""
        self.membership = Membership(nodes={LOCAL: NodeRecord(name=LOCAL, wanted=devices)})
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

    # What comes in.

    def handle_message(self, connection: ControlConnection, message: Message) -> None:
        """Take in one message."""
        sender = self.membership.by_link(connection)
        match message:
            case WorkerHello():
                self._greet_member(connection, message)
            case NodeHello():
                self._greet_node(connection, message)
            case ClientHello() | Ping():
                if isinstance(sender, NodeRecord):
                    self.watchdog.observe_node(sender.name, at=time.monotonic())
            case Resize():
                self.server.send(connection, self._resize(message.devices))
            case LocateRun():
                path = self.reporter.run.address
                self.server.send(connection, Reply(is_accepted=True, text=path))
            case _ if isinstance(sender, WorkerRecord):
                self._hear_member(sender, message)
            case _ if isinstance(sender, NodeRecord):
                self._hear_node(sender, message)
            case _:
                self.server.close(connection)
        self._go_on()

    def connection_lost(self, connection: ControlConnection) -> None:
        """A connection is gone."""
        sender = self.membership.by_link(connection)
        if isinstance(sender, WorkerRecord):
            sender.connection = None
            if sender.is_present:
                self._lose_member(sender, "left" if sender.is_leaving else "killed", "")
        elif isinstance(sender, NodeRecord):
            self._lose_node(sender)
        self._go_on()

    def tick(self) -> None:
        """What time brings."""
        now = time.monotonic()
        self._excuse_lateness(now)
        if now - self._looked_at >= 0.25:
            self._looked_at = now
            self._watch(now)
        if now - self._told_at >= 1:
            self._told_at = now
            for each in [*self.membership.workers.values(), *self.membership.nodes.values()]:
                self.server.send(each.connection, Ping())
            self.reporter.write_figures(self.membership, self.generation)
        self.reporter.flush_faults(now)
        self._tend_node(now)
        self._recall(now)
        self._go_on()
        self._hurry(now)
        if self.is_dirty:
            self.is_dirty = False
            self.save()

    def _excuse_lateness(self, now: float) -> None:
        """Time in which we ourselves were not run is nobody's delay."""
        late_s = now - self._ticked_at
        self._ticked_at = now
        if late_s > self.watchdog.deadlines.late_s:
            self._stage_at = min(now, self._stage_at + late_s)

    def stop(self) -> None:
        """Save and stop at the next step boundary."""
        if self.is_stopping:
            return
        self.is_stopping = True
        # To save takes everyone who holds a part, those too who were about to leave.
        for worker in self.membership.with_status("busy", "settled"):
            worker.is_leaving = worker.is_excluded = False
        for node in self.membership.nodes.values():
            here = len(self.membership.with_status("busy", "settled", node=node.name))
            node.wanted, node.excluded = max(node.wanted, here), 0
        if self.stage in {"planning", "gathering"} and not self.membership.with_status(
            "busy", "settled"
        ):
            self._end(RunState.STOPPED, "asked to stop before the first step")
            return
        self.reporter.emit(StateChanged(state=RunState.STOPPING, reason="asked to stop"))
        for worker in self.membership.with_status("busy"):
            self.server.send(worker.connection, Stop())

    # Members.

    def _greet_member(self, connection: ControlConnection, hello: WorkerHello) -> None:
        now = time.monotonic()
        worker = self.membership.workers.get(hello.worker)
        if worker is None and self.stage == "adopting" and hello.node in self.membership.nodes:
            # Started by the supervisor before us, which had no time to write it down.
            worker = self.membership.add(hello.node, at=now, number=hello.worker)
        if worker is None or not worker.is_present or worker.pid not in {0, hello.pid}:
            # Declared lost, and replaced: it must not come back.
            self.server.send(connection, Halt(generation=self.generation))
            self.server.send(connection, Leave())
            return
        worker.connection, worker.host, worker.pid = connection, hello.host, hello.pid
        worker.process_started_at = hello.process_started_at
        self.watchdog.watch(worker.number, node=worker.node, at=now)
        if self.stage != "adopting":
            return
        is_current = hello.generation == self.generation and hello.rank is not None
        worker.rank = hello.rank if is_current else None
        worker.live, worker.replicas, worker.ending = hello.live, hello.replicas, hello.ending
        self._furthest = max(self._furthest, hello.step)
        worker.move(("settled" if hello.is_ready else "busy") if is_current else "idle", at=now)

    def _hear_member(self, worker: WorkerRecord, message: Message) -> None:
        now = time.monotonic()
        match message:
            case Ready():
                self._stillborn = 0
                if worker.status in {"starting", "busy"}:
                    worker.rank = None
                    worker.move("idle", at=now)
                if worker.is_leaving and self._has_stepped:
                    self._dismiss(worker)
            case Heartbeat():
                self._hear_beat(worker, message, now)
            case StoreHosted() if message.generation == self.generation:
                meet = StoreLocated(
                    generation=message.generation, host=message.host, port=message.port
                )
                for other in self.membership.with_status("busy"):
                    self.server.send(other.connection, meet)
            case Paused() if message.generation == self.generation and worker.status == "busy":
                self._settle(worker, message, now)
            case Done() if message.generation == self.generation and worker.status == "busy":
                worker.live, worker.replicas, worker.ending = message.live, (), message.ending
                worker.move("settled", at=now)
            case LeaveNotice() if message.is_excluded:
                self._set_aside(worker, now)
            case LeaveNotice():
                self._let_leave(worker)
            case Failed():
                self._fail(message, worker)
            case _:
                pass

    def _hear_beat(self, worker: WorkerRecord, heartbeat: Heartbeat, now: float) -> None:
        worker.heartbeat = heartbeat
        for verdict in self.watchdog.observe(worker.number, heartbeat, at=now):
            self.reporter.tell_straggler(worker, verdict)
        if heartbeat.steps:
            worker.last_step = heartbeat.steps[-1]
            if heartbeat.generation == self.generation and not self._has_stepped:
                self._first_step(heartbeat.steps[0][0], now)
            self._furthest = max(self._furthest, heartbeat.step)

    def _settle(self, worker: WorkerRecord, message: Paused, now: float) -> None:
        if message.detail and (self.stage == "running" or not self._detail):
            self._detail = message.detail
        if self.stage == "running" and worker.rank is not None:
            # Its connections to the others broke before we heard of anybody's end.
            self._begin_halt(f"rank {worker.rank} lost the others", now)
        if self.stage == "pausing" and self._changed_at is None:
            self._changed_at = now
        worker.live, worker.replicas, worker.ending = message.live, message.replicas, None
        worker.move("settled", at=now)
        self._furthest = max(self._furthest, message.step)

    def _let_leave(self, worker: WorkerRecord) -> None:
        if worker.is_leaving or not worker.is_present or self.is_stopping:
            return
        worker.is_leaving = True
        node = self.membership.nodes.get(worker.node)
        is_spare = worker.status in {"idle", "starting"}
        if node is not None and not is_spare:
            node.wanted = max(0, node.wanted - 1)  # its device goes with it
        self.reporter.tell_fault(worker, "left", "asked to go (SIGTERM)")
        if is_spare:
            self._dismiss(worker)
        elif self.membership.target == 0:
            self.stop()

    def _set_aside(self, worker: WorkerRecord, now: float) -> None:
        """The others go on without it, and try it again later: its link may be a better one by then."""
        node = self.membership.nodes.get(worker.node)
        is_busy = worker.status == "busy" and not worker.is_leaving and not self.is_stopping
        if node is not None and is_busy and self.membership.active_target > 1:
            worker.is_leaving = worker.is_excluded = True
            node.exclude_worker(at=now)

    def _recall(self, now: float) -> None:
        """Try again those who stood aside long enough; and all where nobody else is left."""
        is_empty = not self.membership.active_target
        for node in self.membership.nodes.values():
            if node.excluded and (now >= node.excluded_until or is_empty):
                node.readmit()

    # Nodes.

    def _greet_node(self, connection: ControlConnection, hello: NodeHello) -> None:
        node = self.membership.nodes.get(hello.node)
        if words := self._refuse(node, hello):
            self.server.send(connection, Reply(is_accepted=False, text=words))
            self.server.send(connection, Leave())
            return
        if node is None:
            node = NodeRecord(name=hello.node, wanted=hello.devices)
            self.membership.nodes[node.name] = node
        node.connection, node.host, node.pid, node.is_ready = (
            connection,
            hello.host,
            hello.pid,
            False,
        )
        for worker in self.membership.with_status("gone", node=node.name):
            # Given up while the node was cut off: it may still hold its device, and wait for others.
            self.server.send(connection, Kill(worker=worker.number))
        self.is_dirty = True

    def _refuse(self, node: NodeRecord | None, hello: NodeHello) -> str | None:
        """Why a node cannot be taken, if it cannot. One that comes back is the same process."""
        is_local = hello.node == LOCAL
        if is_local and hello.host != socket.gethostname():
            return f"{LOCAL!r} is the name of the supervisor's own node"
        if hello.devices < 1 and not is_local:
            return f"{hello.devices} devices are none"
        if node is None or node.connection is None or node.connection.is_closed:
            return None
        is_same = (node.host, node.pid) == (hello.host, hello.pid)
        return None if is_same else f"the run has a node called {hello.node!r} already"

    def _hear_node(self, node: NodeRecord, message: Message) -> None:
        now = time.monotonic()
        self.watchdog.observe_node(node.name, at=now)
        match message:
            case Prepared():
                node.is_ready = True
                if node.is_local:
                    self._node_losses = 0
                if not self.layouts:
                    self.server.send(node.connection, Fork(worker=-1, is_planner=True))
            case LayoutsPlanned():
                self._take_plan(message, now)
            case Forked() if message.worker in self.membership.workers:
                worker = self.membership.workers[message.worker]
                worker.pid, worker.host = message.pid, node.host
                worker.process_started_at = message.process_started_at
                self.is_dirty = True
            case Exited() if message.worker in self.membership.workers:
                worker = self.membership.workers[message.worker]
                words = self.reporter.explain_exit(worker.number, message.code)
                if worker.is_present:
                    self._lose_member(worker, "left" if worker.is_leaving else "killed", words)
            case LeaveNotice():
                self._let_node_leave(node)
            case Failed():
                self._fail_node(node, message)
            case _:
                pass

    def _fail_node(self, node: NodeRecord, failure: Failed) -> None:
        """Who trains needs no node; only who is to be started does."""
        has_begun = self.layouts and self.membership.with_status("idle", "busy", "settled")
        if node.is_local and not has_begun:
            self._fail(failure, None)
        else:
            words = f"node {node.name} cannot start workers: {failure.message}"
            self.reporter.emit(WarningRaised(message=words))

    def _take_plan(self, plan: LayoutsPlanned, now: float) -> None:
        self.layouts = dict(plan.layouts)
        if self.plan_only:
            self._end(RunState.STOPPED, "only the plan was asked for")
        elif self.stage == "planning":
            self._enter("gathering", now)

    def _let_node_leave(self, node: NodeRecord) -> None:
        if node.is_local:
            self.stop()
            return
        for worker in self.membership.with_status(
            "starting", "idle", "busy", "settled", node=node.name
        ):
            self._let_leave(worker)
        if not self.is_stopping:
            node.wanted = 0

    def _lose_node(self, node: NodeRecord) -> None:
        node.connection, node.is_ready = None, False
        self.watchdog.forget_node(node.name)
        if node.is_local:
            if not self.layouts:
                self._end_badly("the process that loads the data ended without a word", None)
            else:
                # One that had worked is replaced at once; one that never did, later and later.
                delay_s = _NODE_AGAIN_S * (2**self._node_losses - 1)
                self._node_due_at = time.monotonic() + delay_s
                self._node_losses += 1
        else:
            del self.membership.nodes[node.name]
            self.is_dirty = True

    def _tend_node(self, now: float) -> None:
        """Start our own node again in its time, and not for ever."""
        if self._node_due_at is None or now < self._node_due_at or self.outcome is not None:
            return
        if self._node_losses < MAX_START_FAILURES:
            self._node_due_at = None
            self.start_node()
        elif self._node_losses == MAX_START_FAILURES:
            self._node_losses += 1  # told once
            words = (
                "the process that starts workers ended again and again: the lost are not replaced"
            )
            self.reporter.emit(WarningRaised(message=words))
        elif not self.membership.with_status("starting", "idle", "busy", "settled"):
            self._end_badly("no worker is left, and none can be started", None)

    def _watch(self, now: float) -> None:
        workers = self.membership.workers
        is_moving = self.stage in {"running", "pausing"}
        verdicts = self.watchdog.find_lost(
            at=now,
            is_stopped=lambda n: workers[n].node == LOCAL and is_stopped(workers[n].pid),
            is_remote=lambda node: node != LOCAL,
            busy=[m.number for m in self.membership.with_status("busy")] if is_moving else [],
        )
        for verdict in verdicts:
            self._judge(verdict, now)
        for worker in self.membership.with_status("starting"):
            if now - worker.since > _START_S:
                self._lose_member(worker, "hung", "did not become ready")

    def _judge(self, verdict: HealthVerdict, now: float) -> None:
        worker = self.membership.workers[verdict.worker]
        if verdict.what == "stalled":
            self._begin_halt(f"everybody waits: {verdict.detail}", now)
        elif worker.is_present:
            self._lose_member(worker, verdict.what, verdict.detail)
            node = self.membership.nodes.get(worker.node)
            if verdict.what == "cut off" and node is not None and node.connection is not None:
                self.server.close(node.connection)
                self._lose_node(node)

    def _resize(self, devices: int) -> Reply:
        """Another number of workers, from the next step boundary on."""
        if devices < 1:
            return Reply(is_accepted=False, text="at least one worker is needed")
        if self.is_stopping or self.stage in {"planning", "adopting"}:
            words = "stops" if self.is_stopping else "is just being started; try again in a moment"
            return Reply(is_accepted=False, text=f"the run {words}")
        layout, before = self._layout_for(devices), self.membership.target
        local = self.membership.nodes[LOCAL]
        remote = [node for node in self.membership.nodes.values() if not node.is_local]
        excess = devices - self.membership.target
        for node in [local, *reversed(remote)]:
            change = excess if node is local else min(0, excess)
            change = max(change, -node.wanted)
            node.wanted += change
            excess -= change
        self.save()
        words = f"{before} to {devices} workers at the next step boundary"
        if layout.world < devices:
            words += f"; {layout.world} of them can be used"
        return Reply(is_accepted=True, text=words, layout=str(layout))

    # One generation after another.

    def _go_on(self) -> None:
        now = time.monotonic()
        if self.outcome is not None:
            return
        busy, settled = self.membership.with_status("busy"), self.membership.with_status("settled")
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
                stay, _ = self.membership.candidates()
                if stay and (
                    len(stay) >= self.membership.active_target
                    or not self.membership.with_status("starting")
                ):
                    self._form(now)
            case "planning":
                pass

    def _has_ended(self, busy: list[WorkerRecord], settled: list[WorkerRecord]) -> bool:
        if busy or self.stage == "adopting":
            return False
        if settled and all(worker.ending for worker in settled):
            endings = {worker.ending for worker in settled}
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
        seated = [
            worker for worker in self.membership.with_status("busy") if worker.rank is not None
        ]
        leaving = [worker for worker in seated if worker.is_leaving]
        if leaving:
            names = ", ".join(str(worker.number) for worker in leaving)
            is_excluded = all(worker.is_excluded for worker in leaving)
            return f"member {names} {'steps aside' if is_excluded else 'leaves'}"
        stay, _ = self.membership.candidates()
        if not stay:
            return None
        wanted = self._layout_for(min(len(stay), self.membership.active_target))
        now = self.history[self.generation]
        if wanted.world == now.world:
            return None
        is_growing = wanted.world > now.world
        # Several that come at once are taken in together.
        if (
            is_growing
            and len(stay) < self.membership.active_target
            and self.membership.with_status("starting")
        ):
            return None
        return f"{now.world} to {wanted.world} workers"

    def _begin_pause(self, reason: str, now: float) -> None:
        self._reason, self._changed_at = reason, None
        self._enter("pausing", now)
        for worker in self.membership.with_status("busy"):
            self.server.send(worker.connection, Pause(generation=self.generation))

    def _begin_halt(self, reason: str, now: float) -> None:
        if self.stage == "halting":
            return
        self._reason, self._changed_at = reason, now
        self._barren += not self._has_stepped
        self._vain = self._vain + 1 if self._furthest <= self._reached else 0
        self._enter("halting", now)
        for worker in self.membership.with_status("busy", "settled"):
            worker.ending = None  # the others' end was not reached: it is to be tried again
            self.server.send(worker.connection, Halt(generation=self.generation))

    def _hurry(self, now: float) -> None:
        """Whoever does not get out of a broken generation is lost; asked after all was heard."""
        if self.stage != "halting":
            return
        # Who computes hears of it only at the next exchange, a whole step later at worst.
        settle_s = max(_SETTLE_S, 3 * self.watchdog.usual_step_s)
        for worker in self.membership.with_status("busy"):
            phase = worker.heartbeat.phase if worker.heartbeat else "starting"
            is_short = phase in {"step", "sync", "forming", "starting"}
            if now - self._stage_at > (settle_s if is_short else _SETTLE_LONG_S):
                self._lose_member(worker, "hung", f"did not leave {phase!r} when told to")

    def _form(self, now: float) -> None:
        if self._barren >= _BARREN or self._vain >= _VAIN:
            count = max(self._barren, self._vain)
            words = f"{count} attempts in a row failed before one new step was completed"
            words += f"; the last: {self._detail[:_DETAIL_CHARACTERS]}" if self._detail else ""
            self._end_badly(words, None)
            return
        stay, give = self.membership.candidates()
        reports = [
            *(worker.report(may_stay=True) for worker in stay),
            *(worker.report(may_stay=False) for worker in give),
        ]
        decision = plan_generation(
            reports,
            layouts=self.history,
            current=self.generation,
            target=self.membership.active_target,
            replan=self._layout_for,
        )
        if decision is None:
            self._enter("gathering", now)
            self._refill(now)
            return
        self._apply(decision, now)

    def _apply(self, decision: GenerationPlan, now: float) -> None:
        workers = self.membership.workers
        self.generation += 1
        self.history[self.generation] = decision.layout
        self._has_stepped, self._reached = False, self._furthest
        for worker in self.membership.with_status("settled"):
            if worker.number not in decision.workers:
                worker.rank = None
                worker.move("idle", at=now)
        self._give_slots(decision)
        for rank, number in enumerate([*decision.workers, *decision.departing]):
            workers[number].rank = rank if number in decision.workers else None
            workers[number].ending = None
            workers[number].move("busy", at=now)
        self._enter("running", now)
        self.save()  # before anybody acts on it: the next supervisor must know this generation
        seats = tuple(
            RankAssignment(worker=number, host=workers[number].host, pid=workers[number].pid)
            for number in decision.workers
        )
        for rank, number in enumerate([*decision.workers, *decision.departing]):
            self._say(
                number,
                Assignment(
                    generation=self.generation,
                    layout=decision.layout,
                    rank=workers[number].rank,
                    slot=workers[number].slot,
                    workers=seats,
                    departing=decision.departing,
                    handoff_rank=rank,
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
        seated = [self.membership.workers[number] for number in decision.workers]
        for worker in sorted(seated, key=lambda worker: worker.rank is None):
            here = taken.setdefault(worker.node, set())
            if worker.rank is None or worker.slot in here:
                worker.slot = next(slot for slot in range(len(here) + 1) if slot not in here)
            here.add(worker.slot)

    def _first_step(self, step: int, now: float) -> None:
        """The generation works: what was kept for its sake can go."""
        self._has_stepped, self._barren, self._detail = True, 0, ""
        layout = self.history[self.generation]
        from_step = step - 1
        self.reporter.tell_crew(
            self.generation,
            layout,
            [worker for worker in self.membership.with_status("busy") if worker.rank is not None],
            reason=self._reason,
            from_step=from_step,
            redone_steps=max(0, self._furthest - from_step) if self.generation > 1 else 0,
            lost_s=None if self._changed_at is None else now - self._changed_at,
        )
        self._changed_at = None
        for worker in self.membership.with_status("idle"):
            worker.live, worker.replicas = None, ()
            if worker.is_leaving:
                self._dismiss(worker)
        for generation in [g for g in self.history if g < self.generation - _REMEMBERED]:
            del self.history[generation]

    def _refill(self, now: float) -> None:
        """Start workers that are missing; send those away that are too many."""
        if not self.layouts or self.is_stopping or self.outcome is not None:
            return
        for node in self.membership.nodes.values():
            here = self.membership.with_status(
                "starting", "idle", "busy", "settled", node=node.name
            )
            here = [worker for worker in here if not worker.is_leaving]
            wanted = node.active_target + (self.spares if node.is_local else 0)
            if node.is_ready:
                for _ in range(wanted - len(here)):
                    worker = self.membership.add(node.name, at=now)
                    self.server.send(node.connection, Fork(worker=worker.number))
            idle = self.membership.with_status("idle", node=node.name)
            if self.stage == "running" and self._has_stepped and not self._find_reason():
                for worker in idle[: max(0, len(here) - wanted)]:
                    self._dismiss(worker)

    def _adopt(self, now: float) -> None:
        """The workers of the supervisor before us report one by one."""
        missing = [
            m
            for m in self.membership.with_status("busy", "idle", "settled")
            if m.connection is None
        ]
        absent = [node for node in self.membership.nodes.values() if node.connection is None]
        if (missing or absent) and now - self._stage_at < ADOPT_S:
            return
        for worker in missing:
            self._lose_member(worker, "killed", "did not report to the new supervisor")
        for node in absent:
            if not node.is_local:
                del self.membership.nodes[node.name]
        busy, settled = self.membership.with_status("busy"), self.membership.with_status("settled")
        seats = self.history[self.generation].world if self.generation in self.history else 0
        self._has_stepped = True
        self._reason = "the supervisor was replaced"
        if not self.layouts:
            self._enter("planning", now)
        elif not busy and not settled:
            self._enter("gathering", now)
        elif not busy and all(worker.ending for worker in settled):
            self._enter("running", now)  # all is done: the end is found at the next look
        elif settled or len([m for m in busy if m.rank is not None]) < seats:
            self._enter("running", now)
            self._begin_halt("the supervisor was replaced in the middle of a change", now)
        else:
            self._enter("running", now)
        if self.membership.nodes[LOCAL].connection is None and self._node_due_at is None:
            self._node_due_at = now

    def _lose_member(self, worker: WorkerRecord, what: str, detail: str) -> None:
        now = time.monotonic()
        was = worker.status
        worker.move("gone", at=now)
        self.is_dirty = True
        self.watchdog.forget(worker.number)
        kill_it = Kill(worker=worker.number)
        if (node := self.membership.nodes.get(worker.node)) is not None:
            self.server.send(node.connection, kill_it)
        if worker.node == LOCAL:
            kill(worker.pid, worker.process_started_at)
        if worker.connection is not None:
            self.server.close(worker.connection)
            worker.connection = None
        if was in {"busy", "settled"} and worker.ending is None:
            self.reporter.tell_fault(worker, what, detail)
        if was == "starting":
            self._stillborn += 1
            if self._stillborn >= MAX_START_FAILURES:
                self._end_badly(
                    f"{MAX_START_FAILURES} workers in a row ended before they were ready", worker
                )
        elif was == "busy" and self.stage != "adopting":
            self._begin_halt(f"member {worker.number} (rank {worker.rank}) was {what}", now)

    def _dismiss(self, worker: WorkerRecord) -> None:
        """It is not needed any more, and no fault when it goes."""
        self.server.send(worker.connection, Leave())
        worker.move("gone", at=time.monotonic())
        self.watchdog.forget(worker.number)

    def _layout_for(self, devices: int) -> Layout:
        fitting = [count for count in self.layouts if count <= devices]
        return self.layouts[max(fitting) if fitting else min(self.layouts)]

    def _enter(self, stage: Stage, now: float) -> None:
        self.stage, self._stage_at = stage, now

    def begin_adoption(self) -> None:
        """Take over what a supervisor before us left."""
        self._enter("adopting", time.monotonic())

    def _say(self, number: int, message: Value) -> None:
        self.server.send(self.membership.workers[number].connection, message)

    # Ends.

    def _fail(self, failure: Failed, worker: WorkerRecord | None) -> None:
        """The first failure is the run's; what follows from it is not told."""
        if self.outcome is None:
            self.reporter.tell_failure(failure, worker)
            self._end(RunState.FAILED, "")

    def _end_badly(self, words: str, worker: WorkerRecord | None) -> None:
        if self.outcome is None:
            self.reporter.tell_hopeless(words, worker)
            self._end(RunState.FAILED, "")

    def _end(self, state: RunState, reason: str) -> None:
        self.outcome = RunOutcome(state=state, reason=reason)
