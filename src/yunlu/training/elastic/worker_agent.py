"""Worker side of the control protocol: a control thread, and the calls of the training loop."""

from __future__ import annotations

import faulthandler
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from yunlu.core.processes import SignalPipe, start_time
from yunlu.core.secure_link import derive_secret
from yunlu.core.settings import read_settings
from yunlu.training.attempt import as_user_error
from yunlu.training.elastic.control_channel import GIVE_UP_S, ControlClient, ControlLostError
from yunlu.training.elastic.messages import (
    Assignment,
    Done,
    Ending,
    Halt,
    Heartbeat,
    HeldState,
    Leave,
    LeaveNotice,
    Message,
    Pause,
    Paused,
    Ready,
    Stop,
    StoreHosted,
    StoreLocated,
    WorkerHello,
    as_failure,
)
from yunlu.training.parallel.gloo_tunnel import secure_gloo
from yunlu.training.parallel.group_store import GroupStore, StoreServer
from yunlu.training.parallel.sockets import (
    Socket,
    close_listeners,
    is_connection_error,
    open_sockets,
    shut_since,
)
from yunlu.training.parallel.world import World, form_world

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.core.value import Value
    from yunlu.runs.run_store import RunStore

HEARTBEAT_S = 0.2
_SHUT_RETRY_S = 0.05
_STORE_S = 20.0
"""Rendezvous at the store takes milliseconds; a worker that is later than this is lost."""
_FLUSH_S = 5.0
_STUCK_S = 3.0
_EXCLUSION_RETRY_S = 30.0


class HaltedError(Exception):
    """The supervisor halted the generation: a worker in it was lost."""


class WorkerAgent:
    """Control agent of one worker process. Its methods are called by the main thread."""

    def __init__(self, number: int, *, node: str, run: RunStore) -> None:
        self.number = number
        self.node = node
        self.run = run
        self.assignment: Assignment | None = None
        """Current or last assignment."""
        self.dismissed: Literal["leave", "lost"] | None = None
        self.leaving = False
        """SIGTERM was received."""
        self.wants_pause = False
        """Pause at the next step boundary, together with all other workers."""
        self.wants_stop = False
        """Save and stop at the next step boundary, together with all other workers."""
        self.trusts_network = False
        """Whether process groups may be open to anybody on the network between the machines."""
        self._client = ControlClient(run)
        self._changed = threading.Condition()
        self._outbox: deque[Value] = deque()
        self._pending: Assignment | None = None
        self._store_address: StoreLocated | None = None
        self._halted = -1
        self._exclusion_due_at = 0.0
        self._is_waiting = False
        self._ending: Ending | None = None
        self._restored: Assignment | None = None
        self._live: HeldState | None = None
        self._copies: tuple[HeldState, ...] = ()
        self._heartbeat = Heartbeat(phase="starting")
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=10_000)
        self._has_stepped = False
        self._is_urgent = False
        self._world: World | None = None
        self._store: GroupStore | None = None
        self._store_server: StoreServer | None = None
        self._sockets_before: set[Socket] | None = None
        self._is_over = False
        self._shut_at: float | None = None
        self._signals = SignalPipe()
        self._thread = threading.Thread(target=self._run_control, name="control", daemon=True)

    def start(self) -> None:
        """Install the signal handler and start the control thread."""
        self._signals.listen(signal.SIGTERM)
        self._thread.start()

    # Called by the training loop.

    def wait_assignment(self) -> Assignment | None:
        """Wait for the next assignment; None when the worker is dismissed."""
        with self._changed:
            if not self._is_waiting:
                self._is_waiting = True
                self._enqueue(Ready())
            self._heartbeat = self._heartbeat.model_copy(update={"phase": "idle"})
            self._changed.wait_for(lambda: self._pending is not None or self.dismissed)
            if self._pending is None:
                return None
            self.assignment, self._pending = self._pending, None
            self._is_waiting, self._ending = False, None
            self.wants_pause = False
            self._steps.clear()  # steps of the previous generation must not count for this one
        self.report_progress(phase="forming")
        return self.assignment

    def join_world(self, assignment: Assignment, device: torch.device | None = None) -> World:
        """Form the world of this generation; called by every worker with a rank."""
        assert assignment.rank is not None
        self._begin_forming()
        store = None if assignment.layout.is_single else self._open_store(assignment, "train")
        where = device or torch.device("cpu")
        self._world = form_world(
            assignment.layout,
            assignment.rank,
            store,
            device=where,
            secret=self._secret(assignment.generation),
            trusts_network=self.trusts_network,
            host=self._client.local_host,
            check=self.check,
        )
        self._sockets_before = None
        self.check()  # a halt during forming shut only the sockets that existed then
        return self._world

    @contextmanager
    def handoff_group(self, assignment: Assignment) -> Generator[None]:
        """Default process group of ranked and departing workers, for the state handoff; all of them call it."""
        self._begin_forming()
        base = self._open_store(assignment, "handoff")
        before = open_sockets()
        store, tunnel = secure_gloo(
            base,
            assignment.handoff_rank,
            assignment.handoff_size,
            self._client.local_host,
            derive_secret(self._secret(assignment.generation), "handoff"),
            trusts_network=self.trusts_network,
        )
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=assignment.handoff_rank,
                world_size=assignment.handoff_size,
            )
            close_listeners(before, keep=tunnel.listeners if tunnel is not None else ())
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            if tunnel is not None:
                tunnel.close()

    def state_restored(self, assignment: Assignment, step: int) -> None:
        """The worker holds the complete state after ``step`` steps, split as in this generation."""
        self._restored, self._has_stepped = assignment, False
        self.report_progress(step=step, phase="first step")

    def held_state(self, step: int) -> HeldState | None:
        """The state part this worker holds after ``step`` steps; None before it has any."""
        restored = self._restored
        if restored is None or restored.rank is None:
            return None
        coordinates = restored.layout.place_of(restored.rank)
        return HeldState(step=step, generation=restored.generation, coordinates=coordinates)

    def report_progress(
        self,
        *,
        step: int | None = None,
        phase: str | None = None,
        step_s: float | None = None,
        wait_s: float = 0.0,
        memory_bytes: int | None = None,
    ) -> None:
        """Report progress of the main thread: completed steps, and the phase that begins now.

        ``phase``: ``step`` while computing, ``sync`` while waiting for others, and the long ones
        (``first step``, ``evaluate``, ``checkpoint``, ``export``, ``loading``); see ``watchdog``.
        """
        update: dict[str, Any] = {"progress": self._heartbeat.progress + 1}
        update |= {} if step is None else {"step": step}
        update |= {} if phase is None else {"phase": phase}
        update |= {} if memory_bytes is None else {"memory_bytes": memory_bytes}
        if self.assignment is not None:
            update["generation"] = self.assignment.generation
        self._heartbeat = self._heartbeat.model_copy(update=update)
        if step is not None and step_s is not None:
            self._steps.append((step, step_s, wait_s))
            if not self._has_stepped:  # the first step after a fault is sent at once
                self._has_stepped = self._is_urgent = True
                self._signals.wake()

    def check(self) -> None:
        """Raise ``HaltedError`` if the generation was halted: not every loop waits in a collective."""
        if self.is_halted:
            raise HaltedError("the generation was halted")

    def request_exclusion(self) -> None:
        """Leave at the next step boundary: the other workers are faster without this straggler."""
        now = time.monotonic()
        if now >= self._exclusion_due_at:  # repeat: the supervisor may have been replaced
            self._exclusion_due_at = now + _EXCLUSION_RETRY_S
            self._enqueue(LeaveNotice(is_excluded=True))

    @property
    def is_halted(self) -> bool:
        """Whether the supervisor halted the current generation."""
        return self.assignment is not None and self._halted >= self.assignment.generation

    def is_broken(self, error: BaseException) -> bool:
        """Whether an error only reports the loss of a peer and is not this worker's own fault."""
        if isinstance(error, HaltedError) or self.is_halted:
            return True
        return is_connection_error(error)

    def report_paused(
        self, step: int, *, live: bool, replicas: Sequence[HeldState] = (), detail: str = ""
    ) -> None:
        """Report that the worker left its generation after ``step`` steps; ``live``: its state is complete."""
        assert self.assignment is not None
        with self._changed:
            self._live = self.held_state(step) if live else None
            self._copies = tuple(replicas)
            self._is_waiting = True
            self._enqueue(self._report(self.assignment.generation, step, detail))

    def report_done(self, ending: Ending, step: int) -> None:
        """Report that this worker has ended and saved; no assignment follows unless another worker fails."""
        assert self.assignment is not None
        with self._changed:
            self._live, self._copies, self._ending = self.held_state(step), (), ending
            self._is_waiting = True
            generation = self.assignment.generation
            self._enqueue(Done(generation=generation, ending=ending, step=step, live=self._live))

    def leave_groups(self) -> None:
        """Leave the process groups, in whatever state they are."""
        self._sockets_before = None
        world, self._world = self._world, None
        store, self._store = self._store, None
        server, self._store_server = self._store_server, None
        if world is not None:
            with suppress(Exception):  # a broken group need not close cleanly
                world.close()
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()
        if store is not None:
            store.close()
        if server is not None:
            server.close()

    def report_failure(self, error: BaseException) -> None:
        """Report an error that fails the run, and wait until it is sent."""
        failure = as_failure(error)
        if isinstance(error, Exception):
            shown = as_user_error(error)
            shown_fields = {"code": shown.code, "message": shown.message, "hint": shown.hint}
            failure = failure.model_copy(update=shown_fields)
        self._enqueue(failure)
        deadline = time.monotonic() + _FLUSH_S
        while self._outbox and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the control thread."""
        self._is_over = True
        self._signals.wake()
        self._thread.join(1)

    # Process groups.

    def _begin_forming(self) -> None:
        """From now on the control thread can shut every socket that is opened."""
        self.check()
        if self._sockets_before is None:
            self._sockets_before = open_sockets()

    def _open_store(self, assignment: Assignment, prefix: str) -> Store:
        """Open the store of a generation: rank 0 hosts it, the supervisor passes its address on."""
        if self._store is None:
            generation = assignment.generation
            secret = self._secret(generation)
            if assignment.handoff_rank == 0:
                server = self._store_server = StoreServer(self._client.local_host, secret)
                host, port = server.host, server.port
                self._enqueue(StoreHosted(generation=generation, host=host, port=port))
            else:
                host, port = self._wait_store_address(generation)
            timeout = timedelta(seconds=_STORE_S * read_settings().patience)
            self._store = GroupStore((host, port), secret, timeout=timeout)
        prefixed = PrefixStore(prefix, self._store)
        # Wait here, where a halt can interrupt, until every rank has arrived.
        prefixed.set(f"here-{assignment.handoff_rank}", "1")
        size = assignment.handoff_size if prefix == "handoff" else assignment.layout.world
        prefixed.wait([f"here-{rank}" for rank in range(size)])
        return prefixed

    def _secret(self, generation: int) -> bytes:
        """Secret of a generation: only workers of this run can compute it."""
        assert self._client.group is not None
        return derive_secret(self._client.group.token.encode(), "generation", generation)

    def _wait_store_address(self, generation: int) -> tuple[str, int]:
        def is_known() -> bool:
            meeting = self._store_address
            return self.is_halted or (meeting is not None and meeting.generation == generation)

        with self._changed:
            self._changed.wait_for(is_known)
            self.check()
            assert self._store_address is not None
            return self._store_address.host, self._store_address.port

    # Control thread.

    def _run_control(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._signals, selectors.EVENT_READ)
        heartbeat_at = 0.0
        while not self._is_over:
            if not self._client.is_up and not self._reconnect(selector):
                selector.select(_SHUT_RETRY_S)
                self._drain_wakes()
                continue
            try:
                wait_s = _SHUT_RETRY_S if self._must_shut() else HEARTBEAT_S
                for key, _ in selector.select(wait_s):
                    if key.fileobj is self._signals:
                        self._drain_wakes()
                    else:
                        for message in self._client.receive():
                            self._handle(message)
                self._shut_if_halted()
                while self._outbox:
                    self._client.send(self._outbox[0])
                    self._outbox.popleft()
                now = time.monotonic()
                if self._is_urgent or now - heartbeat_at >= HEARTBEAT_S:
                    self._is_urgent = False
                    heartbeat_at = now
                    self._send_heartbeat()
                self._client.check_quiet()
            except ControlLostError:
                if self._client.connection is not None:
                    selector.unregister(self._client.connection)
                self._client.drop()

    def _reconnect(self, selector: selectors.BaseSelector) -> bool:
        with self._changed:
            # The hello repeats queued reports of state; failures stay queued.
            for message in [queued for queued in self._outbox if isinstance(queued, Done | Paused)]:
                self._outbox.remove(message)
            hello = self._hello()
        if self._client.connect(hello):
            assert self._client.connection is not None
            selector.register(self._client.connection, selectors.EVENT_READ)
            return True
        lost_s = time.monotonic() - self._client.lost_at
        if lost_s > GIVE_UP_S or (lost_s > 1 and self._client.is_over()):
            os._exit(75)  # EX_TEMPFAIL: no supervisor for too long
        is_leader = self.assignment is not None and self.assignment.rank == 0
        self._client.restart_supervisor(after_s=0.5 if is_leader else 3.0)
        return False

    def _handle(self, message: Message) -> None:
        with self._changed:
            match message:
                case Assignment():
                    if message.generation > self._halted:
                        self._pending = message
                case StoreLocated():
                    self._store_address = message
                case Pause():
                    current = self.assignment
                    self.wants_pause = (
                        current is not None and current.generation == message.generation
                    )
                case Stop():
                    self.wants_stop = True
                case Halt():
                    self._halt(message.generation)
                case Leave():
                    self.dismissed = "leave"
                case _:
                    pass
            self._changed.notify_all()

    def _halt(self, generation: int) -> None:
        self._halted = max(self._halted, generation)
        if self._pending is not None and self._pending.generation <= generation:
            self._pending = None
        if self._is_waiting:
            self._outbox.append(self._report(generation, self._heartbeat.step, ""))

    def _must_shut(self) -> bool:
        return self.is_halted and not self._is_waiting

    def _shut_if_halted(self) -> None:
        if not self._must_shut():
            self._shut_at = None
            return
        self._shut_sockets()
        now = time.monotonic()
        if self._shut_at is None:
            self._shut_at = now
        elif now - self._shut_at > _STUCK_S:
            self._shut_at = math.inf  # dump once
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback(file=2, all_threads=True)

    def _shut_sockets(self) -> None:
        """Shut the sockets of groups: a main thread that waits on one gets an error. Repeated until it left."""
        connection = self._client.connection
        keep = [*self._signals.descriptors, *([connection.fileno()] if connection else [])]
        if self._world is not None:
            self._world.disconnect(keep=keep)
        if self._sockets_before is not None:
            shut_since(self._sockets_before, keep=keep)

    def _send_heartbeat(self) -> None:
        steps: list[tuple[int, float, float]] = []
        while self._steps:
            steps.append(self._steps.popleft())
        self._client.send(self._heartbeat.model_copy(update={"steps": tuple(steps)}))

    def _drain_wakes(self) -> None:
        if signal.SIGTERM in self._signals.take() and not self.leaving:
            self.leaving = True
            self._outbox.append(LeaveNotice())

    def _report(self, generation: int, step: int, detail: str) -> Paused:
        return Paused(
            generation=generation, step=step, live=self._live, replicas=self._copies, detail=detail
        )

    def _hello(self) -> WorkerHello:
        current = self.assignment
        waits = self._is_waiting and self._pending is None
        return WorkerHello(
            worker=self.number,
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started_at=start_time(),
            generation=current.generation if current else 0,
            rank=current.rank if current else None,
            step=self._heartbeat.step,
            is_ready=waits,
            ending=self._ending,
            live=self._live if waits else None,
            replicas=self._copies if waits else (),
        )

    def _enqueue(self, message: Value) -> None:
        with self._changed:
            self._outbox.append(message)
        self._signals.wake()


def run_worker_agent(
    number: int, *, node: str, run: RunStore, body: Callable[[WorkerAgent], None]
) -> int:
    """Run ``body`` in a worker process; returns its exit code."""
    agent = WorkerAgent(number, node=node, run=run)
    agent.start()
    try:
        body(agent)
    except BaseException as error:  # noqa: BLE001 (reported to the supervisor)
        traceback.print_exc()
        agent.report_failure(error)
        return 1
    finally:
        agent.close()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
