"""Who may lend workers to an asynchronous run, what is told of them, and that strangers stay out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from yunlu.core.errors import StoreError
from yunlu.core.framing import FrameReader, receive_frame
from yunlu.core.secure_link import SecureLink
from yunlu.core.value import Value
from yunlu.runs.events import WorkerLost
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document
from yunlu.runs.worker_group import (
    LOCAL,
    WorkerGroup,
    control_secret,
    read_worker_group,
    send_request,
)
from yunlu.training.asynchronous import coordinator as coordinator_module
from yunlu.training.asynchronous.coordinator import AsyncCoordinator
from yunlu.training.elastic.exec_module import ASYNC_NODE
from yunlu.training.elastic.messages import (
    Exited,
    Failed,
    Forked,
    LeaveNotice,
    NodeHello,
    Prepared,
    frame,
)

WAIT_S = 60.0


class Machine:
    """One that lends workers, as far as the door can tell."""

    def __init__(
        self, server: AsyncCoordinator, group: WorkerGroup, name: str = "far", *, pid: int = 1
    ) -> None:
        self._door = server
        sock = socket.create_connection((group.host, group.port), timeout=WAIT_S)
        self._link = SecureLink(sock, control_secret(group.token), is_server=False)
        with ThreadPoolExecutor() as threads:
            proving = threads.submit(self._link.handshake)
            while not proving.done():
                server.poll(0.01)
            proving.result()
        self._reader = FrameReader()
        self.say(
            NodeHello(
                node=name,
                host="far-host",
                pid=pid,
                process_started_at=0,
                devices=2,
            )
        )

    def say(self, message: Value) -> None:
        self._link.sendall(frame(message))
        self._door.poll(WAIT_S)
        self._door.poll(0.01)

    def receive(self) -> list[dict[str, Any]]:
        found = [receive_frame(self._link, self._reader).control]
        while self._link.pending:
            found.append(receive_frame(self._link, self._reader).control)
        return found

    def close(self) -> None:
        self._link.close()

    def go(self) -> None:
        self.close()
        self._door.poll(WAIT_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AsyncCoordinator]:
    made = AsyncCoordinator(open_run(tmp_path))
    made.publish(workers=3, is_open=True)
    yield made
    with suppress(OSError):
        made.close()


@pytest.fixture
def group(server: AsyncCoordinator, tmp_path: Path) -> WorkerGroup:
    found = read_worker_group(open_run(tmp_path))
    assert found is not None
    return found


def _faults(path: Path) -> list[tuple[str, str, str]]:
    return [
        (event.worker, event.cause, event.detail)
        for event, _ in open_run(path).read_events()
        if isinstance(event, WorkerLost)
    ]


def test_a_machine_and_its_workers_are_known_until_it_goes(
    server: AsyncCoordinator, group: WorkerGroup, tmp_path: Path
):
    assert (group.node_module, group.target, group.wanted) == (ASYNC_NODE, 3, {LOCAL: 3})
    machine = Machine(server, group)
    machine.say(Forked(worker=0, pid=77, process_started_at=0))
    machine.say(Forked(worker=1, pid=78, process_started_at=0))
    server.publish(workers=3, is_open=True)
    told = read_worker_group(open_run(tmp_path))
    assert told is not None
    assert (told.target, told.wanted) == (5, {LOCAL: 3, "far": 2})
    assert server.list_workers() == [
        {"worker": "far.0", "host": "far-host", "pid": 77},
        {"worker": "far.1", "host": "far-host", "pid": 78},
    ]
    machine.say(Exited(worker=0, code=-9, detail="ended by SIGKILL"))
    assert [each["pid"] for each in server.list_workers()] == [78]
    machine.go()
    assert server.list_workers() == []
    (worker, one, why), (node, whole, _) = _faults(tmp_path)
    assert (worker, one, why) == ("far.0", "killed", "ended by SIGKILL")
    assert (node, whole) == ("far", "lost")


def test_who_takes_leave_is_not_missed(
    server: AsyncCoordinator, group: WorkerGroup, tmp_path: Path
):
    machine = Machine(server, group)
    machine.say(LeaveNotice())
    machine.go()
    assert server.list_workers() == _faults(tmp_path) == []


def test_a_machine_that_fails_says_why_once(
    server: AsyncCoordinator, group: WorkerGroup, tmp_path: Path
):
    machine = Machine(server, group)
    machine.say(Failed(code="data", message="text.txt is not there", traceback=""))
    machine.go()
    assert _faults(tmp_path) == [("far", "failed", "text.txt is not there")]


def test_two_machines_of_one_name_are_refused_and_one_that_comes_back_is_not(
    server: AsyncCoordinator, group: WorkerGroup, tmp_path: Path
):
    first = Machine(server, group)
    first.say(Forked(worker=0, pid=77, process_started_at=0))
    other = Machine(server, group, pid=2)
    (answer,) = [each for each in other.receive() if each["kind"] == "reply"]
    assert not answer["is_accepted"]
    assert "already" in answer["text"]
    again = Machine(server, group)  # before its first connection was seen to end
    again.say(Forked(worker=0, pid=79, process_started_at=0))
    assert [each["pid"] for each in server.list_workers()] == [79]
    assert _faults(tmp_path) == []
    for machine in (first, other, again):
        machine.close()


def test_a_machine_that_falls_silent_is_given_up(
    server: AsyncCoordinator, group: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine = Machine(server, group)
    monkeypatch.setattr(coordinator_module, "_SILENCE_S", -1.0)
    server.poll(0)
    server.poll(0)
    assert _faults(tmp_path) == []  # it loads its data
    machine.say(Prepared())
    assert [what for _, what, _ in _faults(tmp_path)] == ["lost"]
    machine.close()


def test_requests_are_answered_to_those_who_know_the_token(
    server: AsyncCoordinator, group: WorkerGroup, tmp_path: Path
):
    def answer(group: WorkerGroup, request: dict[str, Any]) -> Any:
        found: list[Any] = []

        def put() -> None:
            try:
                found.append(send_request(group, request, timeout_s=WAIT_S))
            except StoreError as error:
                found.append(error)

        asking = Thread(target=put)
        asking.start()
        while asking.is_alive():
            server.poll(0.01)
        return found[0]

    assert answer(group, {"kind": "locate_run"})["text"] == str(tmp_path)
    assert not answer(group, {"kind": "resize", "devices": 4})["is_accepted"]  # nothing to work for
    (tmp_path / "servers").mkdir()
    assert answer(group, {"kind": "resize", "devices": 4})["is_accepted"]
    assert (tmp_path / Document.TARGET_WORKERS).read_text() == "4"
    stranger = group.model_copy(update={"token": "guess"})
    assert isinstance(answer(stranger, {"kind": "locate_run"}), StoreError)
