"""What the supervisor does about what it hears, and about what it does not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from yunlu.core.secure_link import SecureLink
from yunlu.planning.layouts import Layout
from yunlu.runs.events import ErrorRaised, WarningRaised, WorkerGroupFormed, WorkerLost
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Log
from yunlu.runs.states import RunState
from yunlu.training.elastic.control_channel import ControlConnection, ControlServer
from yunlu.training.elastic.coordinator import MAX_START_FAILURES, Coordinator
from yunlu.training.elastic.event_reporter import EventReporter
from yunlu.training.elastic.membership import FIRST_EXCLUSION_S, LOCAL
from yunlu.training.elastic.messages import (
    Done,
    Failed,
    Heartbeat,
    HeldState,
    LeaveNotice,
    NodeHello,
    Paused,
    Prepared,
)


class Rig:
    """A coordinator with two workers in a generation, on a clock that the test turns."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.run = open_run(path)
        self.server = ControlServer("127.0.0.1", "token")
        self.doors: list[socket.socket] = []
        self.node_starts = 0
        self.coordinator = Coordinator(
            self.server,
            EventReporter(self.run),
            devices=2,
            spares=0,
            start_node=self.start_node,
            save=lambda: None,
        )
        self.coordinator.layouts = {1: Layout(), 2: Layout(dp=2)}
        self.coordinator.generation, self.coordinator.history = 1, {1: Layout(dp=2)}
        self.coordinator.stage = "running"
        for rank in range(2):
            worker = self.coordinator.membership.add(LOCAL, at=self.now)
            worker.rank, worker.status, worker.connection = rank, "busy", self.open_link()
            self.coordinator.watchdog.watch(worker.number, node=LOCAL, at=self.now)

    def start_node(self) -> None:
        self.node_starts += 1

    def open_link(self) -> ControlConnection:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.doors += [ours, theirs]
        connection = ControlConnection(SecureLink(ours, b"test", is_server=True), self.now)
        self.server._selector.register(connection.link, 1, connection)
        return connection

    def handle_message(self, number: int, message: Any) -> None:
        connection = self.coordinator.membership.workers[number].connection
        assert connection is not None
        self.coordinator.handle_message(connection, message)

    def live(self, span_s: float, *beats: Heartbeat) -> None:
        until = self.now + span_s
        while self.now < until:
            self.now += 0.25
            for number, heartbeat in enumerate(beats):
                if self.coordinator.membership.workers[number].connection is not None:
                    self.handle_message(number, heartbeat)
            self.coordinator.tick()

    def greet(self, node: str, pid: int, devices: int = 1) -> ControlConnection:
        hello = NodeHello(
            node=node,
            host=socket.gethostname(),
            pid=pid,
            process_started_at=0,
            devices=devices,
        )
        connection = self.open_link()
        self.coordinator.handle_message(connection, hello)
        return connection

    def there(self) -> list[int]:
        return [m.number for m in self.coordinator.membership.workers.values() if m.is_present]

    def warnings(self) -> list[str]:
        events = [event for event, _ in self.run.read_events()]
        return [e.message for e in events if isinstance(e, WarningRaised)]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    found = Rig(tmp_path, monkeypatch)
    yield found
    found.server.close_all()
    for door in found.doors:
        door.close()


def paused(detail: str = "") -> Paused:
    return Paused(generation=1, step=3, detail=detail)


def test_who_does_not_leave_a_broken_generation_is_lost_in_the_end(rig: Rig) -> None:
    rig.coordinator._begin_halt("test", rig.now)
    heartbeat = Heartbeat(generation=1, phase="step")
    rig.live(9, heartbeat, heartbeat)
    assert rig.there() == [0, 1]
    rig.live(2, heartbeat, heartbeat)
    assert rig.there() == []


@pytest.mark.parametrize("phase", ["first step", "loading"])
def test_a_first_step_may_take_long_to_leave(rig: Rig, phase: str) -> None:
    rig.coordinator._begin_halt("test", rig.now)
    heartbeat = Heartbeat(generation=1, phase=phase)
    rig.live(100, heartbeat, heartbeat)
    assert rig.there() == [0, 1]


def test_a_supervisor_that_slept_hears_everything_before_it_judges(rig: Rig) -> None:
    rig.coordinator._begin_halt("test", rig.now)
    rig.coordinator.tick()
    rig.now += 60
    rig.handle_message(0, Heartbeat(generation=1, phase="step"))
    rig.handle_message(0, paused())
    rig.coordinator.tick()  # the other's words are still on their way
    assert rig.there() == [0, 1]


def test_the_cause_is_told_when_it_is_given_up(rig: Rig) -> None:
    rig.handle_message(0, paused("gloo: the cable is torn"))
    rig.coordinator._attempts_without_step = 5
    rig.handle_message(1, paused("connection closed by peer"))
    assert rig.coordinator.outcome is not None
    (error,) = [e for e, _ in rig.run.read_events() if isinstance(e, ErrorRaised)]
    assert "the cable is torn" in error.message


def test_a_node_that_cannot_be_replaced_does_not_end_the_training(rig: Rig) -> None:
    heartbeat = Heartbeat(generation=1, phase="evaluate")
    failure = Failed(code="internal", message="no disk", traceback="")
    rig.coordinator.handle_message(rig.greet(LOCAL, 0), Prepared())
    for pid in range(1, 2 + MAX_START_FAILURES):
        connection = rig.coordinator.membership.nodes[LOCAL].connection
        assert connection is not None
        if pid > 1:
            rig.coordinator.handle_message(connection, failure)
        rig.server.close(connection)
        rig.coordinator.connection_lost(connection)
        rig.live(100, heartbeat, heartbeat)
        if pid >= MAX_START_FAILURES:
            break
        assert rig.node_starts == pid
        rig.greet(LOCAL, pid)
    assert rig.node_starts == MAX_START_FAILURES - 1
    assert rig.coordinator.outcome is None
    assert sum("no disk" in words for words in rig.warnings()) == MAX_START_FAILURES - 1
    assert sum("are not replaced" in words for words in rig.warnings()) == 1
    for number in (0, 1):
        rig.coordinator._lose_worker(rig.coordinator.membership.workers[number], "killed", "x")
    rig.live(1)
    assert rig.coordinator.outcome is not None
    assert rig.coordinator.outcome.state is RunState.FAILED


def test_a_second_node_of_one_name_and_one_without_devices_are_refused(rig: Rig) -> None:
    nodes = rig.coordinator.membership.nodes
    first = rig.greet("far", 7)
    rig.greet("far", 8)
    assert nodes["far"].connection is first
    again = rig.greet("far", 7)  # the same process, in a new connection
    assert nodes["far"].connection is again
    rig.greet("empty", 9, devices=0)
    assert "empty" not in nodes


def test_figures_are_not_worth_a_run(rig: Rig) -> None:
    (rig.run.path / Log.RANK_METRICS).mkdir()  # nothing can be appended to it
    heartbeat = Heartbeat(generation=1, phase="step", steps=((1, 0.1, 0.0),))
    rig.live(3, heartbeat, heartbeat)
    assert rig.coordinator.outcome is None


def test_a_worker_group_that_has_changed_leaves_the_run_to_others(rig: Rig) -> None:
    for number in range(2):
        assert rig.coordinator.outcome is None
        rig.handle_message(number, Done(generation=1, ending="async", step=3))
    assert rig.coordinator.outcome is not None
    assert rig.coordinator.outcome.switches_to_async
    assert rig.coordinator.outcome.state is RunState.RUNNING


def request_exclusion(rig: Rig) -> None:
    """The second worker does, after a first step."""
    rig.handle_message(0, Heartbeat(generation=1, step=1, phase="step", steps=((1, 0.1, 0.0),)))
    rig.handle_message(1, LeaveNotice(is_excluded=True))


def test_who_steps_aside_leaves_at_a_step_boundary_and_its_device_stays_the_runs(
    rig: Rig,
) -> None:
    request_exclusion(rig)
    assert rig.coordinator.stage == "pausing"
    assert (rig.coordinator.membership.active_target, rig.coordinator.membership.target) == (1, 2)
    for number in (0, 1):
        live = HeldState(step=1, generation=1, coordinates=Layout(dp=2).place_of(number))
        rig.handle_message(number, Paused(generation=1, step=1, live=live))
    assert rig.coordinator.history[2] == Layout()
    assert rig.coordinator.membership.workers[0].rank == 0
    rig.handle_message(0, Heartbeat(generation=2, step=2, phase="step", steps=((2, 0.1, 0.0),)))
    assert rig.there() == [0]
    group = [event for event, _ in rig.run.read_events() if isinstance(event, WorkerGroupFormed)]
    assert group[-1].reason == "worker 1 is excluded as a straggler"
    assert not [event for event, _ in rig.run.read_events() if isinstance(event, WorkerLost)]


def test_who_stepped_aside_is_tried_again_later_and_later(rig: Rig) -> None:
    request_exclusion(rig)
    node = rig.coordinator.membership.nodes[LOCAL]
    rig.coordinator._readmit_excluded(rig.now + FIRST_EXCLUSION_S - 1)
    assert node.active_target == 1
    rig.coordinator._readmit_excluded(rig.now + FIRST_EXCLUSION_S)
    assert node.active_target == 2
    node.exclude_worker(at=rig.now)
    rig.coordinator._readmit_excluded(rig.now + 2 * FIRST_EXCLUSION_S - 1)
    assert node.active_target == 1
    rig.coordinator._readmit_excluded(rig.now + 2 * FIRST_EXCLUSION_S)
    assert node.active_target == 2


def test_all_workers_of_a_node_are_tried_again_as_soon_as_one_would_be(rig: Rig) -> None:
    node = rig.coordinator.membership.nodes[LOCAL]
    node.wanted = 4
    for _ in range(3):
        node.exclude_worker(at=rig.now)
    assert node.excluded_until == rig.now + FIRST_EXCLUSION_S
    rig.coordinator._readmit_excluded(rig.now + FIRST_EXCLUSION_S)
    assert node.active_target == 4


def test_the_last_worker_never_steps_aside(rig: Rig) -> None:
    request_exclusion(rig)
    rig.handle_message(0, LeaveNotice(is_excluded=True))
    assert not rig.coordinator.membership.workers[0].is_leaving
    assert rig.coordinator.membership.active_target == 1


def test_who_stands_aside_is_called_back_where_nobody_else_is_left(rig: Rig) -> None:
    request_exclusion(rig)
    node = rig.coordinator.membership.nodes[LOCAL]
    node.wanted = 1  # the other's device goes
    assert rig.coordinator.membership.active_target == 0
    rig.coordinator._readmit_excluded(rig.now)
    assert rig.coordinator.membership.active_target == 1


def test_to_save_takes_those_too_who_were_to_step_aside(rig: Rig) -> None:
    request_exclusion(rig)
    rig.coordinator.stop()
    assert not rig.coordinator.membership.workers[1].is_leaving
    assert rig.coordinator.membership.active_target == 2
