"""The coordinator of a worker group: message handlers, generations, and the end of the run."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from yunlu.runs.events import StateChanged, WarningRaised
from yunlu.runs.states import RunState
from yunlu.training.elastic.group_coordinator import GroupCoordinator
from yunlu.training.elastic.membership import (
    LOCAL,
    GenerationPlan,
    NodeRecord,
    WorkerRecord,
    is_stopped,
    plan_generation,
)
from yunlu.training.elastic.messages import (
    Assignment,
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
    Message,
    NodeHello,
    Pause,
    Paused,
    Prepared,
    RankAssignment,
    Ready,
    Reply,
    Stop,
    StoreHosted,
    StoreLocated,
    WorkerHello,
)
from yunlu.training.elastic.watchdog import Deadlines, Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.core.value import Value
    from yunlu.planning.layouts import Layout
    from yunlu.training.elastic.control_channel import ControlConnection, ControlServer
    from yunlu.training.elastic.event_reporter import EventReporter
    from yunlu.training.elastic.watchdog import HealthVerdict

_START_S = 300.0
"""Time for a forked worker to report ready."""
_NODE_RESTART_S = 5.0
ADOPT_S = 8.0
"""Time for the old supervisor's workers to report to a new supervisor."""
_HALT_S = 10.0
_HALT_LONG_S = 120.0
_REMEMBERED = 100
"""Generations whose state replicas may still be held by some worker."""
_MAX_ATTEMPTS_WITHOUT_STEP, _MAX_ATTEMPTS_WITHOUT_PROGRESS = 5, 30
"""Consecutive generations without a completed step, or without a new one, after which the run fails."""
MAX_START_FAILURES = 5
"""Consecutive workers, or nodes, that end before they are ready."""
_DETAIL_CHARACTERS = 500

Stage = Literal["planning", "gathering", "running", "pausing", "halting", "adopting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Final state of the run."""

    state: RunState
    reason: str = ""
    switches_to_async: bool = False
    """The run continues with asynchronous workers."""


class Coordinator(GroupCoordinator):
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
        super().__init__(reporter.run, server, devices=devices)
        self.reporter = reporter
        self.spares = spares
        self.plan_only = plan_only
        self.start_node = start_node
        self.save = save
        """Writes the journal."""
        self.is_dirty = False
        """The journal is out of date; it is written at the next tick."""
        self.watchdog = Watchdog(Deadlines().scaled(self._patience))
        self.stage: Stage = "planning"
        self.generation = 0
        self.layouts: dict[int, Layout] = {}
        self.history: dict[int, Layout] = {}
        self.outcome: RunOutcome | None = None
        self.is_stopping = False
        self._reason = "started"
        self._changed_at: float | None = None
        self._has_stepped = False
        self._max_step = 0
        self._attempts_without_step = self._attempts_without_progress = self._max_step_before = 0
        self._detail = ""
        """Cause of the last halt, from the first worker that reported one."""
        self._start_failures = 0
        self._stage_at = time.monotonic()
        self._watched_at = 0.0
        self._ticked_at = self._stage_at
        self._node_failures = 0
        """Consecutive exits of the local node before it was ready."""
        self._node_due_at: float | None = None

    # Events.

    def handle_message(self, connection: ControlConnection, message: Message) -> None:
        """Handle one message, and what follows from it."""
        if isinstance(message, WorkerHello):
            self._register_worker(connection, message)
        else:
            super().handle_message(connection, message)
        self._advance()

    def connection_lost(self, connection: ControlConnection) -> None:
        """Handle a closed connection, and what follows from it."""
        super().connection_lost(connection)
        self._advance()

    def tick(self) -> None:
        """Run everything that depends on time; called about ten times a second."""
        now = time.monotonic()
        self._discount_own_delay(now)
        if now - self._watched_at >= 0.25:
            self._watched_at = now
            self._check_health(now)
        if self.ping(now):
            self.reporter.write_metrics(self.membership, self.generation)
        self.reporter.flush_faults(now)
        self._restart_node(now)
        self._readmit_excluded(now)
        self._advance()
        self._enforce_halt(now)
        if self.is_dirty:
            self.is_dirty = False
            self.save()

    def _discount_own_delay(self, now: float) -> None:
        """Do not count time in which this process was not scheduled as a worker's delay."""
        late_s = now - self._ticked_at
        self._ticked_at = now
        if late_s > self.watchdog.deadlines.late_s:
            self._stage_at = min(now, self._stage_at + late_s)

    def stop(self) -> None:
        """Save and stop at the next step boundary."""
        if self.is_stopping:
            return
        self.is_stopping = True
        # Every holder of a state part is needed to save, including workers about to leave.
        for worker in self.membership.with_status("busy", "paused"):
            worker.is_leaving = worker.is_excluded = False
        for node in self.membership.nodes.values():
            here = len(self.membership.with_status("busy", "paused", node=node.name))
            node.wanted, node.excluded = max(node.wanted, here), 0
        if self.stage in {"planning", "gathering"} and not self.membership.with_status(
            "busy", "paused"
        ):
            self._end(RunState.STOPPED, "asked to stop before the first step")
            return
        self.reporter.emit(StateChanged(state=RunState.STOPPING, reason="asked to stop"))
        for worker in self.membership.with_status("busy"):
            self.server.send(worker.connection, Stop())

    # Workers.

    def _register_worker(self, connection: ControlConnection, hello: WorkerHello) -> None:
        now = time.monotonic()
        worker = self.membership.workers.get(hello.worker)
        if worker is None and self.stage == "adopting" and hello.node in self.membership.nodes:
            # Forked by the previous supervisor, which did not get to record it.
            worker = self.membership.add(hello.node, at=now, number=hello.worker)
        if worker is None or not worker.is_present or worker.pid not in {0, hello.pid}:
            # Declared lost and replaced: it must not rejoin.
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
        self._max_step = max(self._max_step, hello.step)
        worker.move(("paused" if hello.is_ready else "busy") if is_current else "idle", at=now)

    def _handle_worker(self, worker: WorkerRecord, message: Message) -> None:
        now = time.monotonic()
        match message:
            case Ready():
                self._start_failures = 0
                if worker.status in {"starting", "busy"}:
                    worker.rank = None
                    worker.move("idle", at=now)
                if worker.is_leaving and self._has_stepped:
                    self._dismiss(worker)
            case Heartbeat():
                self._handle_heartbeat(worker, message, now)
            case StoreHosted() if message.generation == self.generation:
                address = StoreLocated(
                    generation=message.generation, host=message.host, port=message.port
                )
                for other in self.membership.with_status("busy"):
                    self.server.send(other.connection, address)
            case Paused() if message.generation == self.generation and worker.status == "busy":
                self._handle_paused(worker, message, now)
            case Done() if message.generation == self.generation and worker.status == "busy":
                worker.live, worker.replicas, worker.ending = message.live, (), message.ending
                worker.move("paused", at=now)
            case LeaveNotice() if message.is_excluded:
                self._exclude_straggler(worker, now)
            case LeaveNotice():
                self._handle_leave(worker)
            case Failed():
                self._fail(message, worker)
            case _:
                pass

    def _handle_heartbeat(self, worker: WorkerRecord, heartbeat: Heartbeat, now: float) -> None:
        worker.heartbeat = heartbeat
        for verdict in self.watchdog.observe(worker.number, heartbeat, at=now):
            self.reporter.report_straggler(worker, verdict)
        if heartbeat.steps:
            worker.last_step = heartbeat.steps[-1]
            if heartbeat.generation == self.generation and not self._has_stepped:
                self._record_first_step(heartbeat.steps[0][0], now)
            self._max_step = max(self._max_step, heartbeat.step)

    def _handle_paused(self, worker: WorkerRecord, message: Paused, now: float) -> None:
        if message.detail and (self.stage == "running" or not self._detail):
            self._detail = message.detail
        if self.stage == "running" and worker.rank is not None:
            # Its connections broke before the loss was reported here.
            self._begin_halt(f"rank {worker.rank} lost its peers", now)
        if self.stage == "pausing" and self._changed_at is None:
            self._changed_at = now
        worker.live, worker.replicas, worker.ending = message.live, message.replicas, None
        worker.move("paused", at=now)
        self._max_step = max(self._max_step, message.step)

    def _handle_leave(self, worker: WorkerRecord) -> None:
        if worker.is_leaving or not worker.is_present or self.is_stopping:
            return
        worker.is_leaving = True
        node = self.membership.nodes.get(worker.node)
        is_spare = worker.status in {"idle", "starting"}
        if node is not None and not is_spare:
            node.wanted = max(0, node.wanted - 1)  # its device goes with it
        self.reporter.report_fault(worker, "left", "asked to go (SIGTERM)")
        if is_spare:
            self._dismiss(worker)
        elif self.membership.target == 0:
            self.stop()

    def _exclude_straggler(self, worker: WorkerRecord, now: float) -> None:
        """Continue without a straggler; readmit it later, when its link may be faster."""
        node = self.membership.nodes.get(worker.node)
        is_busy = worker.status == "busy" and not worker.is_leaving and not self.is_stopping
        if node is not None and is_busy and self.membership.active_target > 1:
            worker.is_leaving = worker.is_excluded = True
            node.exclude_worker(at=now)

    def _readmit_excluded(self, now: float) -> None:
        """Readmit workers after their exclusion time, or all of them if no worker is left."""
        is_empty = not self.membership.active_target
        for node in self.membership.nodes.values():
            if node.excluded and (now >= node.excluded_until or is_empty):
                node.readmit()

    # Nodes.

    def _observe_node(self, node: NodeRecord) -> None:
        self.watchdog.observe_node(node.name, at=time.monotonic())

    def _admit(self, node: NodeRecord, hello: NodeHello) -> None:  # noqa: ARG002
        self.is_dirty = True

    def _handle_node(self, node: NodeRecord, message: Message) -> None:
        now = time.monotonic()
        match message:
            case Prepared():
                node.is_ready = True
                if node.is_local:
                    self._node_failures = 0
                if not self.layouts:
                    self.server.send(node.connection, Fork(worker=-1, is_planner=True))
            case LayoutsPlanned():
                self._accept_layouts(message, now)
            case Forked() if message.worker in self.membership.workers:
                worker = self.membership.workers[message.worker]
                worker.pid, worker.host = message.pid, node.host
                worker.process_started_at = message.process_started_at
                self.is_dirty = True
            case Exited() if message.worker in self.membership.workers:
                worker = self.membership.workers[message.worker]
                text = self.reporter.explain_exit(worker.number, message.code)
                if worker.is_present:
                    self._lose_worker(worker, "left" if worker.is_leaving else "killed", text)
            case LeaveNotice():
                self._handle_node_leave(node)
            case Failed():
                self._handle_node_failure(node, message)
            case _:
                pass

    def _handle_node_failure(self, node: NodeRecord, failure: Failed) -> None:
        """Fail the run only if no worker is up: a training worker does not need its node."""
        has_begun = self.layouts and self.membership.with_status("idle", "busy", "paused")
        if node.is_local and not has_begun:
            self._fail(failure, None)
        else:
            text = f"node {node.name} cannot start workers: {failure.message}"
            self.reporter.emit(WarningRaised(message=text))

    def _accept_layouts(self, plan: LayoutsPlanned, now: float) -> None:
        self.layouts = dict(plan.layouts)
        if self.plan_only:
            self._end(RunState.STOPPED, "only the plan was asked for")
        elif self.stage == "planning":
            self._enter("gathering", now)

    def _handle_node_leave(self, node: NodeRecord) -> None:
        if node.is_local:
            self.stop()
            return
        for worker in self.membership.with_status(
            "starting", "idle", "busy", "paused", node=node.name
        ):
            self._handle_leave(worker)
        if not self.is_stopping:
            node.wanted = 0

    def _lose_node(self, node: NodeRecord) -> None:
        node.connection, node.is_ready = None, False
        self.watchdog.forget_node(node.name)
        if node.is_local:
            if not self.layouts:
                self._end_with_error(
                    "the node process ended without an error message while loading", None
                )
            else:
                # A node that had been ready is restarted at once; others with exponential back-off.
                delay_s = _NODE_RESTART_S * (2**self._node_failures - 1)
                self._node_due_at = time.monotonic() + delay_s
                self._node_failures += 1
        else:
            del self.membership.nodes[node.name]
            self.is_dirty = True

    def _restart_node(self, now: float) -> None:
        """Restart the local node when due, a limited number of times."""
        if self._node_due_at is None or now < self._node_due_at or self.outcome is not None:
            return
        if self._node_failures < MAX_START_FAILURES:
            self._node_due_at = None
            self.start_node()
        elif self._node_failures == MAX_START_FAILURES:
            self._node_failures += 1  # warn once
            text = "the node process ended repeatedly; lost workers are not replaced"
            self.reporter.emit(WarningRaised(message=text))
        elif not self.membership.with_status("starting", "idle", "busy", "paused"):
            self._end_with_error("no worker is left, and none can be started", None)

    def _check_health(self, now: float) -> None:
        workers = self.membership.workers
        is_training = self.stage in {"running", "pausing"}
        verdicts = self.watchdog.find_lost(
            at=now,
            is_stopped=lambda n: workers[n].node == LOCAL and is_stopped(workers[n].pid),
            is_remote=lambda node: node != LOCAL,
            busy=[m.number for m in self.membership.with_status("busy")] if is_training else [],
        )
        for verdict in verdicts:
            self._act_on_verdict(verdict, now)
        for worker in self.membership.with_status("starting"):
            if now - worker.since > _START_S:
                self._lose_worker(worker, "hung", "did not become ready")

    def _act_on_verdict(self, verdict: HealthVerdict, now: float) -> None:
        worker = self.membership.workers[verdict.worker]
        if verdict.what == "stalled":
            self._begin_halt(f"all workers are waiting: {verdict.detail}", now)
        elif worker.is_present:
            self._lose_worker(worker, verdict.what, verdict.detail)
            node = self.membership.nodes.get(worker.node)
            if verdict.what == "cut off" and node is not None and node.connection is not None:
                self.server.close(node.connection)
                self._lose_node(node)

    def _resize(self, devices: int) -> Reply:
        """Change the number of workers at the next step boundary."""
        if devices < 1:
            return Reply(is_accepted=False, text="at least one worker is needed")
        if self.is_stopping or self.stage in {"planning", "adopting"}:
            text = "is stopping" if self.is_stopping else "is starting; try again in a moment"
            return Reply(is_accepted=False, text=f"the run {text}")
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
        text = f"{before} to {devices} workers at the next step boundary"
        if layout.world < devices:
            text += f"; {layout.world} of them can be used"
        return Reply(is_accepted=True, text=text, layout=str(layout))

    # Generations.

    def _advance(self) -> None:
        now = time.monotonic()
        if self.outcome is not None:
            return
        busy, paused = self.membership.with_status("busy"), self.membership.with_status("paused")
        if self._has_ended(busy, paused):
            return
        match self.stage:
            case "adopting":
                self._try_finish_adoption(now)
            case "running":
                self._adjust_workers(now)
                if reason := self._pause_reason():
                    self._begin_pause(reason, now)
                elif not busy:
                    self._enter("gathering", now)
            case "pausing" | "halting":
                if not busy:
                    self._form_generation(now)
            case "gathering":
                self._adjust_workers(now)
                staying, _ = self.membership.candidates()
                if staying and (
                    len(staying) >= self.membership.active_target
                    or not self.membership.with_status("starting")
                ):
                    self._form_generation(now)
            case "planning":
                pass

    def _has_ended(self, busy: list[WorkerRecord], paused: list[WorkerRecord]) -> bool:
        if busy or self.stage == "adopting":
            return False
        if paused and all(worker.ending for worker in paused):
            endings = {worker.ending for worker in paused}
            if endings == {"async"}:
                self.outcome = RunOutcome(state=RunState.RUNNING, switches_to_async=True)
            else:
                self._end(RunState.FINISHED if "finished" in endings else RunState.STOPPED, "")
        elif self.is_stopping and not paused:
            self._end(RunState.STOPPED, "no worker was left to save")
        return self.outcome is not None

    def _pause_reason(self) -> str | None:
        """Why to end the generation at the next step boundary; None to go on."""
        if not self._has_stepped or self.is_stopping:
            return None
        ranked = [
            worker for worker in self.membership.with_status("busy") if worker.rank is not None
        ]
        leaving = [worker for worker in ranked if worker.is_leaving]
        if leaving:
            names = ", ".join(str(worker.number) for worker in leaving)
            is_excluded = all(worker.is_excluded for worker in leaving)
            return f"worker {names} {'is excluded as a straggler' if is_excluded else 'leaves'}"
        staying, _ = self.membership.candidates()
        if not staying:
            return None
        wanted = self._layout_for(min(len(staying), self.membership.active_target))
        now = self.history[self.generation]
        if wanted.world == now.world:
            return None
        is_growing = wanted.world > now.world
        # Admit several starting workers together.
        if (
            is_growing
            and len(staying) < self.membership.active_target
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
        self._attempts_without_step += not self._has_stepped
        self._attempts_without_progress = (
            self._attempts_without_progress + 1 if self._max_step <= self._max_step_before else 0
        )
        self._enter("halting", now)
        for worker in self.membership.with_status("busy", "paused"):
            worker.ending = None  # not all workers ended: the end is retried
            self.server.send(worker.connection, Halt(generation=self.generation))

    def _enforce_halt(self, now: float) -> None:
        """Declare workers lost that do not leave a halted generation in time."""
        if self.stage != "halting":
            return
        # A computing worker notices the halt at its next exchange, at worst a whole step later.
        limit_s = max(_HALT_S * self._patience, 3 * self.watchdog.usual_step_s)
        for worker in self.membership.with_status("busy"):
            phase = worker.heartbeat.phase if worker.heartbeat else "starting"
            is_short = phase in {"step", "sync", "forming", "starting"}
            if now - self._stage_at > (limit_s if is_short else _HALT_LONG_S):
                self._lose_worker(worker, "hung", f"did not leave {phase!r} after a halt")

    def _form_generation(self, now: float) -> None:
        if (
            self._attempts_without_step >= _MAX_ATTEMPTS_WITHOUT_STEP
            or self._attempts_without_progress >= _MAX_ATTEMPTS_WITHOUT_PROGRESS
        ):
            count = max(self._attempts_without_step, self._attempts_without_progress)
            text = f"{count} attempts in a row failed before one new step was completed"
            text += f"; the last: {self._detail[:_DETAIL_CHARACTERS]}" if self._detail else ""
            self._end_with_error(text, None)
            return
        staying, departing = self.membership.candidates()
        reports = [
            *(worker.report(may_stay=True) for worker in staying),
            *(worker.report(may_stay=False) for worker in departing),
        ]
        plan = plan_generation(
            reports,
            layouts=self.history,
            current=self.generation,
            target=self.membership.active_target,
            replan=self._layout_for,
        )
        if plan is None:
            self._enter("gathering", now)
            self._adjust_workers(now)
            return
        self._apply(plan, now)

    def _apply(self, plan: GenerationPlan, now: float) -> None:
        workers = self.membership.workers
        self.generation += 1
        self.history[self.generation] = plan.layout
        self._has_stepped, self._max_step_before = False, self._max_step
        for worker in self.membership.with_status("paused"):
            if worker.number not in plan.workers:
                worker.rank = None
                worker.move("idle", at=now)
        self._assign_slots(plan)
        for rank, number in enumerate([*plan.workers, *plan.departing]):
            workers[number].rank = rank if number in plan.workers else None
            workers[number].ending = None
            workers[number].move("busy", at=now)
        self._enter("running", now)
        self.save()  # before it is sent: the next supervisor must know this generation
        assignments = tuple(
            RankAssignment(worker=number, host=workers[number].host, pid=workers[number].pid)
            for number in plan.workers
        )
        for rank, number in enumerate([*plan.workers, *plan.departing]):
            self._send(
                number,
                Assignment(
                    generation=self.generation,
                    layout=plan.layout,
                    rank=workers[number].rank,
                    slot=workers[number].slot,
                    workers=assignments,
                    departing=plan.departing,
                    handoff_rank=rank,
                    source_layout=plan.source_layout,
                    restore=plan.restore,
                    reason=self._reason,
                ),
            )
            if self.is_stopping:
                self._send(number, Stop())
        self._adjust_workers(now)

    def _assign_slots(self, plan: GenerationPlan) -> None:
        """Workers keep their device; new ones take the lowest free slot of their node."""
        taken: dict[str, set[int]] = {}
        ranked = [self.membership.workers[number] for number in plan.workers]
        for worker in sorted(ranked, key=lambda worker: worker.rank is None):
            here = taken.setdefault(worker.node, set())
            if worker.rank is None or worker.slot in here:
                worker.slot = next(slot for slot in range(len(here) + 1) if slot not in here)
            here.add(worker.slot)

    def _record_first_step(self, step: int, now: float) -> None:
        """The generation trains: report it, and release state kept for its recovery."""
        self._has_stepped, self._attempts_without_step, self._detail = True, 0, ""
        layout = self.history[self.generation]
        from_step = step - 1
        self.reporter.report_group(
            self.generation,
            layout,
            [worker for worker in self.membership.with_status("busy") if worker.rank is not None],
            reason=self._reason,
            from_step=from_step,
            redone_steps=max(0, self._max_step - from_step) if self.generation > 1 else 0,
            lost_s=None if self._changed_at is None else now - self._changed_at,
        )
        self._changed_at = None
        for worker in self.membership.with_status("idle"):
            worker.live, worker.replicas = None, ()
            if worker.is_leaving:
                self._dismiss(worker)
        for generation in [g for g in self.history if g < self.generation - _REMEMBERED]:
            del self.history[generation]

    def _adjust_workers(self, now: float) -> None:
        """Start missing workers, dismiss surplus spares."""
        if not self.layouts or self.is_stopping or self.outcome is not None:
            return
        for node in self.membership.nodes.values():
            here = self.membership.with_status("starting", "idle", "busy", "paused", node=node.name)
            here = [worker for worker in here if not worker.is_leaving]
            wanted = node.active_target + (self.spares if node.is_local else 0)
            if node.is_ready:
                for _ in range(wanted - len(here)):
                    worker = self.membership.add(node.name, at=now)
                    self.server.send(node.connection, Fork(worker=worker.number))
            idle = self.membership.with_status("idle", node=node.name)
            if self.stage == "running" and self._has_stepped and not self._pause_reason():
                for worker in idle[: max(0, len(here) - wanted)]:
                    self._dismiss(worker)

    def _try_finish_adoption(self, now: float) -> None:
        """Wait for the previous supervisor's workers to report, then resume their generation."""
        missing = [
            m for m in self.membership.with_status("busy", "idle", "paused") if m.connection is None
        ]
        absent = [node for node in self.membership.nodes.values() if node.connection is None]
        if (missing or absent) and now - self._stage_at < ADOPT_S * self._patience:
            return
        for worker in missing:
            self._lose_worker(worker, "killed", "did not report to the new supervisor")
        for node in absent:
            if not node.is_local:
                del self.membership.nodes[node.name]
        busy, paused = self.membership.with_status("busy"), self.membership.with_status("paused")
        world_size = self.history[self.generation].world if self.generation in self.history else 0
        self._has_stepped = True
        self._reason = "the supervisor was replaced"
        if not self.layouts:
            self._enter("planning", now)
        elif not busy and not paused:
            self._enter("gathering", now)
        elif not busy and all(worker.ending for worker in paused):
            self._enter("running", now)  # all have ended: detected at the next call
        elif paused or len([m for m in busy if m.rank is not None]) < world_size:
            self._enter("running", now)
            self._begin_halt("the supervisor was replaced during a change of generation", now)
        else:
            self._enter("running", now)
        if self.membership.nodes[LOCAL].connection is None and self._node_due_at is None:
            self._node_due_at = now

    def _lose_worker(self, worker: WorkerRecord, what: str, detail: str) -> None:
        now = time.monotonic()
        was = worker.status
        worker.move("gone", at=now)
        self.is_dirty = True
        self.watchdog.forget(worker.number)
        request = Kill(worker=worker.number)
        if (node := self.membership.nodes.get(worker.node)) is not None:
            self.server.send(node.connection, request)
        if worker.node == LOCAL:
            worker.process.send_signal(signal.SIGKILL)
        if worker.connection is not None:
            self.server.close(worker.connection)
            worker.connection = None
        if was in {"busy", "paused"} and worker.ending is None:
            self.reporter.report_fault(worker, what, detail)
        if was == "starting":
            self._start_failures += 1
            if self._start_failures >= MAX_START_FAILURES:
                self._end_with_error(
                    f"{MAX_START_FAILURES} workers in a row ended before they were ready", worker
                )
        elif was == "busy" and self.stage != "adopting":
            self._begin_halt(f"worker {worker.number} (rank {worker.rank}) was {what}", now)

    def _lose_worker_link(self, worker: WorkerRecord) -> None:
        if worker.is_present:
            self._lose_worker(worker, "left" if worker.is_leaving else "killed", "")

    def _dismiss(self, worker: WorkerRecord) -> None:
        """Ask a worker to exit; its exit is not a fault."""
        self.server.send(worker.connection, Leave())
        worker.move("gone", at=time.monotonic())
        self.watchdog.forget(worker.number)

    def _layout_for(self, devices: int) -> Layout:
        fitting = [count for count in self.layouts if count <= devices]
        return self.layouts[max(fitting) if fitting else min(self.layouts)]

    def _enter(self, stage: Stage, now: float) -> None:
        self.stage, self._stage_at = stage, now

    def begin_adoption(self) -> None:
        """Take over the workers of a previous supervisor."""
        self._enter("adopting", time.monotonic())

    def _send(self, number: int, message: Value) -> None:
        self.server.send(self.membership.workers[number].connection, message)

    # Outcome.

    def _fail(self, failure: Failed, worker: WorkerRecord | None) -> None:
        """Fail the run with its first failure; later ones are consequences."""
        if self.outcome is None:
            self.reporter.report_failure(failure, worker)
            self._end(RunState.FAILED, "")

    def _end_with_error(self, text: str, worker: WorkerRecord | None) -> None:
        if self.outcome is None:
            self.reporter.report_hopeless(text, worker)
            self._end(RunState.FAILED, "")

    def _end(self, state: RunState, reason: str) -> None:
        self.outcome = RunOutcome(state=state, reason=reason)
