"""What the supervisor does about what it hears."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from yunlu.runs.run_dir import EventKind
from yunlu.runs.states import RunState
from yunlu.training.elastic.helm import MAX_START_FAILURES, Helm
from yunlu.training.elastic.membership import (
    LOCAL,
    NodeRecord,
    WorkerRecord,
    is_stopped,
)
from yunlu.training.elastic.messages import (
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
    Paused,
    Ping,
    Prepared,
    Ready,
    Reply,
    Resize,
    Stop,
    StoreHosted,
    StoreLocated,
    WorkerHello,
)

if TYPE_CHECKING:
    from yunlu.training.elastic.control_server import ControlConnection
    from yunlu.training.elastic.watchdog import HealthVerdict

_START_S = 300.0
_NODE_AGAIN_S = 5.0


class Captain(Helm):
    """Hears everything. The shell around it keeps the process, the lock and the loop."""

    # What comes in.

    def hear(self, link: ControlConnection, message: Message) -> None:
        """Take in one message."""
        sender = self.roster.by_link(link)
        match message:
            case WorkerHello():
                self._greet_member(link, message)
            case NodeHello():
                self._greet_node(link, message)
            case ClientHello() | Ping():
                if isinstance(sender, NodeRecord):
                    self.watchdog.hear_node(sender.name, at=time.monotonic())
            case Resize():
                self.links.send(link, self._resize(message.devices))
            case LocateRun():
                path = str(self.logbook.run.path.absolute())
                self.links.send(link, Reply(is_accepted=True, text=path))
            case _ if isinstance(sender, WorkerRecord):
                self._hear_member(sender, message)
            case _ if isinstance(sender, NodeRecord):
                self._hear_node(sender, message)
            case _:
                self.links.close(link)
        self._go_on()

    def lose(self, link: ControlConnection) -> None:
        """A connection is gone."""
        sender = self.roster.by_link(link)
        if isinstance(sender, WorkerRecord):
            sender.link = None
            if sender.is_there:
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
            for each in [*self.roster.members.values(), *self.roster.nodes.values()]:
                self.links.send(each.link, Ping())
            self.logbook.write_figures(self.roster, self.generation)
        self.logbook.flush_faults(now)
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
        for member in self.roster.having("busy", "settled"):
            member.is_leaving = member.is_aside = False
        for node in self.roster.nodes.values():
            here = len(self.roster.having("busy", "settled", node=node.name))
            node.wanted, node.aside = max(node.wanted, here), 0
        if self.stage in {"planning", "gathering"} and not self.roster.having("busy", "settled"):
            self._end(RunState.STOPPED, "asked to stop before the first step")
            return
        self.logbook.emit(EventKind.STATE, state=RunState.STOPPING, reason="asked to stop")
        for member in self.roster.having("busy"):
            self.links.send(member.link, Stop())

    # Members.

    def _greet_member(self, link: ControlConnection, hello: WorkerHello) -> None:
        now = time.monotonic()
        member = self.roster.members.get(hello.member)
        if member is None and self.stage == "adopting" and hello.node in self.roster.nodes:
            # Started by the supervisor before us, which had no time to write it down.
            member = self.roster.add(hello.node, at=now, number=hello.member)
        if member is None or not member.is_there or member.pid not in {0, hello.pid}:
            # Declared lost, and replaced: it must not come back.
            self.links.send(link, Halt(generation=self.generation))
            self.links.send(link, Leave())
            return
        member.link, member.host, member.pid = link, hello.host, hello.pid
        member.process_started_at = hello.process_started_at
        self.watchdog.watch(member.number, node=member.node, at=now)
        if self.stage != "adopting":
            return
        is_current = hello.generation == self.generation and hello.rank is not None
        member.rank = hello.rank if is_current else None
        member.live, member.copies, member.ending = hello.live, hello.copies, hello.ending
        self._furthest = max(self._furthest, hello.step)
        member.move(("settled" if hello.is_ready else "busy") if is_current else "idle", at=now)

    def _hear_member(self, member: WorkerRecord, message: Message) -> None:
        now = time.monotonic()
        match message:
            case Ready():
                self._stillborn = 0
                if member.status in {"starting", "busy"}:
                    member.rank = None
                    member.move("idle", at=now)
                if member.is_leaving and self._has_stepped:
                    self._dismiss(member)
            case Heartbeat():
                self._hear_beat(member, message, now)
            case StoreHosted() if message.generation == self.generation:
                meet = StoreLocated(
                    generation=message.generation, host=message.host, port=message.port
                )
                for other in self.roster.having("busy"):
                    self.links.send(other.link, meet)
            case Paused() if message.generation == self.generation and member.status == "busy":
                self._settle(member, message, now)
            case Done() if message.generation == self.generation and member.status == "busy":
                member.live, member.copies, member.ending = message.live, (), message.ending
                member.move("settled", at=now)
            case LeaveNotice() if message.is_aside:
                self._set_aside(member, now)
            case LeaveNotice():
                self._let_leave(member)
            case Failed():
                self._fail(message, member)
            case _:
                pass

    def _hear_beat(self, member: WorkerRecord, beat: Heartbeat, now: float) -> None:
        member.beat = beat
        for verdict in self.watchdog.hear(member.number, beat, at=now):
            self.logbook.tell_straggler(member, verdict)
        if beat.steps:
            member.last_step = beat.steps[-1]
            if beat.generation == self.generation and not self._has_stepped:
                self._first_step(beat.steps[0][0], now)
            self._furthest = max(self._furthest, beat.step)

    def _settle(self, member: WorkerRecord, message: Paused, now: float) -> None:
        if message.detail and (self.stage == "running" or not self._detail):
            self._detail = message.detail
        if self.stage == "running" and member.rank is not None:
            # Its connections to the others broke before we heard of anybody's end.
            self._begin_halt(f"rank {member.rank} lost the others", now)
        if self.stage == "pausing" and self._changed_at is None:
            self._changed_at = now
        member.live, member.copies, member.ending = message.live, message.copies, None
        member.move("settled", at=now)
        self._furthest = max(self._furthest, message.step)

    def _let_leave(self, member: WorkerRecord) -> None:
        if member.is_leaving or not member.is_there or self.is_stopping:
            return
        member.is_leaving = True
        node = self.roster.nodes.get(member.node)
        is_spare = member.status in {"idle", "starting"}
        if node is not None and not is_spare:
            node.wanted = max(0, node.wanted - 1)  # its device goes with it
        self.logbook.tell_fault(member, "left", "asked to go (SIGTERM)")
        if is_spare:
            self._dismiss(member)
        elif self.roster.target == 0:
            self.stop()

    def _set_aside(self, member: WorkerRecord, now: float) -> None:
        """The others go on without it, and try it again later: its link may be a better one by then."""
        node = self.roster.nodes.get(member.node)
        is_busy = member.status == "busy" and not member.is_leaving and not self.is_stopping
        if node is not None and is_busy and self.roster.seats > 1:
            member.is_leaving = member.is_aside = True
            node.set_aside(at=now)

    def _recall(self, now: float) -> None:
        """Try again those who stood aside long enough; and all where nobody else is left."""
        is_empty = not self.roster.seats
        for node in self.roster.nodes.values():
            if node.aside and (now >= node.aside_until or is_empty):
                node.recall()

    # Nodes.

    def _greet_node(self, link: ControlConnection, hello: NodeHello) -> None:
        node = self.roster.nodes.get(hello.node)
        if words := self._refuse(node, hello):
            self.links.send(link, Reply(is_accepted=False, text=words))
            self.links.send(link, Leave())
            return
        if node is None:
            node = NodeRecord(name=hello.node, wanted=hello.devices)
            self.roster.nodes[node.name] = node
        node.link, node.host, node.pid, node.is_ready = link, hello.host, hello.pid, False
        for member in self.roster.having("gone", node=node.name):
            # Given up while the node was cut off: it may still hold its device, and wait for others.
            self.links.send(link, Kill(member=member.number))
        self.is_dirty = True

    def _refuse(self, node: NodeRecord | None, hello: NodeHello) -> str | None:
        """Why a node cannot be taken, if it cannot. One that comes back is the same process."""
        is_local = hello.node == LOCAL
        if is_local and hello.host != socket.gethostname():
            return f"{LOCAL!r} is the name of the supervisor's own node"
        if hello.devices < 1 and not is_local:
            return f"{hello.devices} devices are none"
        if node is None or node.link is None or node.link.is_closed:
            return None
        is_same = (node.host, node.pid) == (hello.host, hello.pid)
        return None if is_same else f"the run has a node called {hello.node!r} already"

    def _hear_node(self, node: NodeRecord, message: Message) -> None:
        now = time.monotonic()
        self.watchdog.hear_node(node.name, at=now)
        match message:
            case Prepared():
                node.is_ready = True
                if node.is_local:
                    self._node_losses = 0
                if not self.layouts:
                    self.links.send(node.link, Fork(member=-1, is_planner=True))
            case LayoutsPlanned():
                self._take_plan(message, now)
            case Forked() if message.member in self.roster.members:
                member = self.roster.members[message.member]
                member.pid, member.host = message.pid, node.host
                member.process_started_at = message.process_started_at
                self.is_dirty = True
            case Exited() if message.member in self.roster.members:
                member = self.roster.members[message.member]
                words = self.logbook.explain_exit(member.number, message.code)
                if member.is_there:
                    self._lose_member(member, "left" if member.is_leaving else "killed", words)
            case LeaveNotice():
                self._let_node_leave(node)
            case Failed():
                self._fail_node(node, message)
            case _:
                pass

    def _fail_node(self, node: NodeRecord, failure: Failed) -> None:
        """Who trains needs no node; only who is to be started does."""
        has_begun = self.layouts and self.roster.having("idle", "busy", "settled")
        if node.is_local and not has_begun:
            self._fail(failure, None)
        else:
            words = f"node {node.name} cannot start workers: {failure.message}"
            self.logbook.emit(EventKind.WARNING, message=words)

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
        for member in self.roster.having("starting", "idle", "busy", "settled", node=node.name):
            self._let_leave(member)
        if not self.is_stopping:
            node.wanted = 0

    def _lose_node(self, node: NodeRecord) -> None:
        node.link, node.is_ready = None, False
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
            del self.roster.nodes[node.name]
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
            self.logbook.emit(EventKind.WARNING, message=words)
        elif not self.roster.having("starting", "idle", "busy", "settled"):
            self._end_badly("no worker is left, and none can be started", None)

    def _watch(self, now: float) -> None:
        members = self.roster.members
        is_moving = self.stage in {"running", "pausing"}
        verdicts = self.watchdog.look(
            at=now,
            is_stopped=lambda n: members[n].node == LOCAL and is_stopped(members[n].pid),
            is_remote=lambda node: node != LOCAL,
            busy=[m.number for m in self.roster.having("busy")] if is_moving else [],
        )
        for verdict in verdicts:
            self._judge(verdict, now)
        for member in self.roster.having("starting"):
            if now - member.since > _START_S:
                self._lose_member(member, "hung", "did not become ready")

    def _judge(self, verdict: HealthVerdict, now: float) -> None:
        member = self.roster.members[verdict.member]
        if verdict.what == "stalled":
            self._begin_halt(f"everybody waits: {verdict.detail}", now)
        elif member.is_there:
            self._lose_member(member, verdict.what, verdict.detail)
            node = self.roster.nodes.get(member.node)
            if verdict.what == "cut off" and node is not None and node.link is not None:
                self.links.close(node.link)
                self._lose_node(node)

    def _resize(self, devices: int) -> Reply:
        """Another number of workers, from the next step boundary on."""
        if devices < 1:
            return Reply(is_accepted=False, text="at least one worker is needed")
        if self.is_stopping or self.stage in {"planning", "adopting"}:
            words = "stops" if self.is_stopping else "is just being started; try again in a moment"
            return Reply(is_accepted=False, text=f"the run {words}")
        layout, before = self._layout_for(devices), self.roster.target
        local = self.roster.nodes[LOCAL]
        remote = [node for node in self.roster.nodes.values() if not node.is_local]
        excess = devices - self.roster.target
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
