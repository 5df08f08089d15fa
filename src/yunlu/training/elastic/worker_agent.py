"""A worker's side: a thread that talks with the supervisor, and what the training loop asks of it."""

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

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from yunlu.core.settings import use_network_interface
from yunlu.training.attempt import as_user_error
from yunlu.training.elastic.control_client import GIVE_UP_S, ControlClient, ControlLostError
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
from yunlu.training.elastic.sockets import cut_since, interface_of, open_store
from yunlu.training.parallel.sockets import Socket, open_sockets, tells_of_loss
from yunlu.training.parallel.world import World, form_world

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.core.value import Value
    from yunlu.runs.run_store import RunStore

HEARTBEAT_S = 0.2
_CUT_AGAIN_S = 0.05
_STORE_S = 20.0
"""Meeting at the store takes milliseconds; whoever does not come by then will not."""
_LAST_WORDS_S = 5.0
_STUCK_S = 3.0
_ASIDE_AGAIN_S = 30.0


class HaltedError(Exception):
    """The supervisor broke off the generation: somebody in it is lost."""


class WorkerAgent:
    """One worker of the crew. Its methods are for the main thread."""

    def __init__(self, number: int, *, node: str, run: RunStore) -> None:
        self.number = number
        self.node = node
        self.run = run
        self.assignment: Assignment | None = None
        """What it does, or did last."""
        self.dismissed: Literal["leave", "lost"] | None = None
        self.leaving = False
        """It was told to go (SIGTERM)."""
        self.wants_pause = False
        """Stop at the next step boundary, together with all others, and settle."""
        self.wants_stop = False
        """Stop at the next step boundary, together with all others, save, and be done."""
        self._contact = ControlClient(run)
        self._changed = threading.Condition()
        self._outbox: deque[Value] = deque()
        self._pending: Assignment | None = None
        self._meeting: StoreLocated | None = None
        self._halted = -1
        self._aside_due_at = 0.0
        self._is_waiting = False
        self._ending: Ending | None = None
        self._taken: Assignment | None = None
        self._live: HeldState | None = None
        self._copies: tuple[HeldState, ...] = ()
        self._heartbeat = Heartbeat(phase="starting")
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=10_000)
        self._has_stepped = False
        self._is_news = False
        self._world: World | None = None
        self._store: Any = None
        self._sockets_before: set[Socket] | None = None
        self._is_over = False
        self._cut_at: float | None = None
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._talk, name="control", daemon=True)

    def start(self) -> None:
        """Listen to signals and to the supervisor."""
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        signal.signal(signal.SIGTERM, _take_note)
        # The handler may have to wait for a collective to return; the descriptor is written at once.
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    # What the training loop asks.

    def wait_assignment(self) -> Assignment | None:
        """What to do next; none where nobody needs this worker any more."""
        with self._changed:
            if not self._is_waiting:
                self._is_waiting = True
                self._post(Ready())
            self._heartbeat = self._heartbeat.model_copy(update={"phase": "idle"})
            self._changed.wait_for(lambda: self._pending is not None or self.dismissed)
            if self._pending is None:
                return None
            self.assignment, self._pending = self._pending, None
            self._is_waiting, self._ending = False, None
            self.wants_pause = False
            self._steps.clear()  # of the generation before: not to be taken for steps of this one
        self.report_progress(phase="forming")
        return self.assignment

    def form(self, assignment: Assignment, device: torch.device | None = None) -> World:
        """Meet the others of this generation; everyone with a seat calls it."""
        assert assignment.rank is not None
        self._begin_forming()
        store = None if assignment.layout.is_single else self._find_store(assignment, "train")
        where = device or torch.device("cpu")
        self._world = form_world(
            assignment.layout,
            assignment.rank,
            store,
            device=where,
            host=self._contact.local_host,
            check=self.check,
        )
        self._sockets_before = None
        self.check()  # a halt that came while we formed has cut what was there by then
        return self._world

    @contextmanager
    def meet(self, assignment: Assignment) -> Generator[None]:
        """A default group of seats and guests, in which state is passed on; all of them call it."""
        self._begin_forming()
        dist.init_process_group(
            "gloo",
            store=self._find_store(assignment, "meet"),
            rank=assignment.handoff_rank,
            world_size=assignment.handoff_size,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()

    def taken(self, assignment: Assignment, step: int) -> None:
        """The state of ``step`` completed steps is here, whole, cut as this generation cuts it."""
        self._taken, self._has_stepped = assignment, False
        self.report_progress(step=step, phase="first step")

    def held_state(self, step: int) -> HeldState | None:
        """The part of the state this worker has after ``step`` steps; none before it has any."""
        taken = self._taken
        if taken is None or taken.rank is None:
            return None
        place = taken.layout.place_of(taken.rank)
        return HeldState(step=step, generation=taken.generation, place=place)

    def report_progress(
        self,
        *,
        step: int | None = None,
        phase: str | None = None,
        step_s: float | None = None,
        wait_s: float = 0.0,
        memory_bytes: int | None = None,
    ) -> None:
        """The main thread moves: ``step`` steps are completed, ``phase`` is what comes now.

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
            if not self._has_stepped:  # the first step after a fault is news
                self._has_stepped = self._is_news = True
                self._nudge()

    def check(self) -> None:
        """Raise where the generation is over: not every loop waits for the others by itself."""
        if self.is_halted:
            raise HaltedError("the generation was broken off")

    def request_exclusion(self) -> None:
        """The others are faster without this worker: leave at the next step boundary."""
        now = time.monotonic()
        if now >= self._aside_due_at:  # again in a while: who heard it may have been replaced
            self._aside_due_at = now + _ASIDE_AGAIN_S
            self._post(LeaveNotice(is_excluded=True))

    @property
    def is_halted(self) -> bool:
        """Whether the supervisor broke off the generation this worker is in."""
        return self.assignment is not None and self._halted >= self.assignment.generation

    def is_broken(self, error: BaseException) -> bool:
        """Whether an error only says that others are lost, and is no fault of this worker's own."""
        if isinstance(error, HaltedError) or self.is_halted:
            return True
        return tells_of_loss(error)

    def settled(
        self, step: int, *, live: bool, replicas: Sequence[HeldState] = (), detail: str = ""
    ) -> None:
        """Out of the generation, at the end of ``step``; ``live`` where the state is whole."""
        assert self.assignment is not None
        with self._changed:
            self._live = self.held_state(step) if live else None
            self._copies = tuple(replicas)
            self._is_waiting = True
            self._post(self._report(self.assignment.generation, step, detail))

    def done(self, ending: Ending, step: int) -> None:
        """This worker's part is over and saved; the next assignment is none unless others fail."""
        assert self.assignment is not None
        with self._changed:
            self._live, self._copies, self._ending = self.held_state(step), (), ending
            self._is_waiting = True
            generation = self.assignment.generation
            self._post(Done(generation=generation, ending=ending, step=step, live=self._live))

    def part(self) -> None:
        """Leave the groups, whatever state they are in."""
        self._sockets_before = None
        world, self._world, self._store = self._world, None, None
        if world is not None:
            with suppress(Exception):  # what is broken need not be closed well
                world.close()
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()

    def fail(self, error: BaseException) -> None:
        """The run fails with this worker: say so, and wait until it is heard."""
        words = as_failure(error)
        if isinstance(error, Exception):
            shown = as_user_error(error)
            told = {"code": shown.code, "message": shown.message, "hint": shown.hint}
            words = words.model_copy(update=told)
        self._post(words)
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._outbox and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """No more words."""
        self._is_over = True
        self._nudge()
        self._thread.join(1)

    # Forming groups.

    def _begin_forming(self) -> None:
        """From now on every socket that is opened can be cut by the control thread."""
        self.check()
        if self._sockets_before is None:
            self._sockets_before = open_sockets()

    def _find_store(self, assignment: Assignment, prefix: str) -> Store:
        """Rank 0 keeps the store; its address goes round through the supervisor."""
        if self._store is None:
            if assignment.handoff_rank == 0:
                store = open_store(self._contact.local_host, 0, is_host=True)
                host, port = self._contact.local_host, store.port
                self._post(StoreHosted(generation=assignment.generation, host=host, port=port))
            else:
                store = open_store(*self._await_meeting(assignment.generation), is_host=False)
            store.set_timeout(timedelta(seconds=_STORE_S))
            self._store = store
        use_network_interface(interface_of(self._contact.local_host))
        found = PrefixStore(prefix, self._store)
        # Everyone is here before anyone waits where only a time-out would end it.
        found.set(f"here-{assignment.handoff_rank}", "1")
        size = assignment.handoff_size if prefix == "meet" else assignment.layout.world
        found.wait([f"here-{rank}" for rank in range(size)])
        return found

    def _await_meeting(self, generation: int) -> tuple[str, int]:
        def has_come() -> bool:
            meeting = self._meeting
            return self.is_halted or (meeting is not None and meeting.generation == generation)

        with self._changed:
            self._changed.wait_for(has_come)
            self.check()
            assert self._meeting is not None
            return self._meeting.host, self._meeting.port

    # The control thread.

    def _talk(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._woken, selectors.EVENT_READ)
        beaten_at = 0.0
        while not self._is_over:
            if not self._contact.is_up and not self._reconnect(selector):
                selector.select(_CUT_AGAIN_S)
                self._drain_wakes()
                continue
            try:
                wait_s = _CUT_AGAIN_S if self._must_cut() else HEARTBEAT_S
                for key, _ in selector.select(wait_s):
                    if key.fileobj is self._woken:
                        self._drain_wakes()
                    else:
                        for message in self._contact.receive():
                            self._hear(message)
                self._cut_if_halted()
                while self._outbox:
                    self._contact.send(self._outbox[0])
                    self._outbox.popleft()
                now = time.monotonic()
                if self._is_news or now - beaten_at >= HEARTBEAT_S:
                    self._is_news = False
                    beaten_at = now
                    self._send_heartbeat()
                self._contact.check_quiet()
            except ControlLostError:
                if self._contact.connection is not None:
                    selector.unregister(self._contact.connection)
                self._contact.drop()

    def _reconnect(self, selector: selectors.BaseSelector) -> bool:
        with self._changed:
            # What was to be said in an earlier connection stands in the hello, except last words.
            for message in [each for each in self._outbox if isinstance(each, Done | Paused)]:
                self._outbox.remove(message)
            hello = self._hello()
        if self._contact.connect(hello):
            assert self._contact.connection is not None
            selector.register(self._contact.connection, selectors.EVENT_READ)
            return True
        lost_s = time.monotonic() - self._contact.lost_at
        if lost_s > GIVE_UP_S or (lost_s > 1 and self._contact.is_over()):
            os._exit(75)  # EX_TEMPFAIL: alone for too long
        is_leader = self.assignment is not None and self.assignment.rank == 0
        self._contact.restart_supervisor(after_s=0.5 if is_leader else 3.0)
        return False

    def _hear(self, message: Message) -> None:
        with self._changed:
            match message:
                case Assignment():
                    if message.generation > self._halted:
                        self._pending = message
                case StoreLocated():
                    self._meeting = message
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

    def _must_cut(self) -> bool:
        return self.is_halted and not self._is_waiting

    def _cut_if_halted(self) -> None:
        if not self._must_cut():
            self._cut_at = None
            return
        self._cut()
        now = time.monotonic()
        if self._cut_at is None:
            self._cut_at = now
        elif now - self._cut_at > _STUCK_S:
            self._cut_at = math.inf  # told once
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback(file=2, all_threads=True)

    def _cut(self) -> None:
        """Whoever waits in a collective, or for others to come, gets an error; again until it is out."""
        own = [self._wake, self._woken, self._contact.connection]
        keep = [each.fileno() for each in own if each is not None]
        if self._world is not None:
            self._world.cut(keep=keep)
        if self._sockets_before is not None:
            cut_since(self._sockets_before, keep=keep)

    def _send_heartbeat(self) -> None:
        steps: list[tuple[int, float, float]] = []
        while self._steps:
            steps.append(self._steps.popleft())
        self._contact.send(self._heartbeat.model_copy(update={"steps": tuple(steps)}))

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            if signal.SIGTERM in self._woken.recv(4096) and not self.leaving:
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
            token="",
            worker=self.number,
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started_at=psutil.Process().create_time(),
            generation=current.generation if current else 0,
            rank=current.rank if current else None,
            step=self._heartbeat.step,
            is_ready=waits,
            ending=self._ending,
            live=self._live if waits else None,
            replicas=self._copies if waits else (),
        )

    def _post(self, message: Value) -> None:
        with self._changed:
            self._outbox.append(message)
        self._nudge()

    def _nudge(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._wake.send(b"\0")


def run_worker_agent(
    number: int, *, node: str, run: RunStore, body: Callable[[WorkerAgent], None]
) -> int:
    """Live a worker's life; its exit code."""
    worker = WorkerAgent(number, node=node, run=run)
    worker.start()
    try:
        body(worker)
    except BaseException as error:  # noqa: BLE001 (the last border: it becomes a message)
        traceback.print_exc()
        worker.fail(error)
        return 1
    finally:
        worker.close()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _take_note(*_: object) -> None:
    """The control thread has been woken: that is all a signal is for."""
