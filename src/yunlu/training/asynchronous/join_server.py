"""Where machines knock that lend workers to an asynchronous run: who they are, and what they say.

Their workers find the servers by the run's directory, take tickets like all others, and wait for nobody.
What comes over this door is only who they are: a machine that is lost takes nothing with it.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from yunlu.core.settings import bind_address, read_settings
from yunlu.runs.events import WorkerLost
from yunlu.runs.run_store import Area, Document
from yunlu.runs.worker_group import LOCAL, Crew, reachable, write_crew
from yunlu.training.elastic.control_server import ControlServer
from yunlu.training.elastic.exec_module import ASYNC_NODE
from yunlu.training.elastic.messages import (
    ClientHello,
    Exited,
    Failed,
    Forked,
    Leave,
    LeaveNotice,
    LocateRun,
    NodeHello,
    Ping,
    Prepared,
    Reply,
    Resize,
)

if TYPE_CHECKING:
    from yunlu.planning.layout import Layout
    from yunlu.runs.run_store import RunStore
    from yunlu.training.elastic.control_server import ControlConnection
    from yunlu.training.elastic.messages import Message

_TELL_S = 1.0
_SILENCE_S = 10.0
"""A machine speaks four times a second: one that says nothing for so long was cut off."""
_LOADING_S = 600.0
"""But not while it loads its data."""
_FAREWELL_S = 1.0


@dataclass
class JoinedNode:
    """A machine that lends workers."""

    name: str
    host: str
    pid: int
    devices: int
    heard_at: float
    is_ready: bool = False
    is_leaving: bool = False
    pids: dict[int, int] = field(default_factory=dict[int, int])
    """Of its workers, by number."""


class JoinServer:
    """Listens from the first moment of a life; ``worker_group.json`` says where."""

    def __init__(self, directory: RunStore) -> None:
        self._directory = directory
        self._token = secrets.token_urlsafe(32)
        self._links = ControlServer(bind_address(), self._token)
        self._guests: dict[ControlConnection, JoinedNode] = {}
        self._patience = read_settings().patience
        self._told_at = 0.0
        self._written: Crew | None = None

    def publish(self, *, workers: int, is_open: bool, layout: Layout | None = None) -> None:
        """Say where to knock; ``is_open``: there are servers to work for, ``layout``: by how many tickets."""
        process = psutil.Process()
        crew = Crew(
            host=reachable(bind_address()),
            port=self._links.port,
            token=self._token,
            pid=os.getpid(),
            process_started_at=process.create_time(),
            node_module=ASYNC_NODE,
            generation=int(is_open),
            target=workers + sum(guest.devices for guest in self._guests.values()),
            layouts={} if layout is None else {layout.world: layout.model_dump()},
            wanted={LOCAL: workers, **{each.name: each.devices for each in self._guests.values()}},
        )
        if crew != self._written:
            write_crew(self._directory, crew)
            self._written = crew

    def look(self, wait_s: float) -> None:
        """Hear whoever speaks; does not wait longer than this."""
        self._links.poll(wait_s, on_message=self._hear, on_lost=self._lose)
        now = time.monotonic()
        for link, guest in list(self._guests.items()):
            silence_s = _SILENCE_S * self._patience
            if now - guest.heard_at > (silence_s if guest.is_ready else _LOADING_S):
                self._links.close(link)
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            for link in self._guests:
                self._links.send(link, Ping())

    def list_workers(self) -> list[dict[str, Any]]:
        """Workers on other machines, as a worker group event lists them."""
        return [
            {"worker": f"{guest.name}.{number}", "host": guest.host, "pid": pid}
            for guest in self._guests.values()
            for number, pid in sorted(guest.pids.items())
        ]

    def abandon(self) -> None:
        """In a process that was forked: let go of what is its parent's."""
        self._links.abandon()

    def shut(self) -> None:
        """Nobody is needed any more."""
        for link, guest in self._guests.items():
            guest.is_leaving = True
            self._links.send(link, Leave())
        self._links.flush(_FAREWELL_S)
        self._links.close_all()

    def _hear(self, link: ControlConnection, message: Message) -> None:
        guest = self._guests.get(link)
        if guest is not None:
            guest.heard_at = time.monotonic()
        match message:
            case NodeHello():
                self._greet(link, message)
            case ClientHello() | Ping():
                pass
            case LocateRun():
                path = self._directory.address
                self._links.send(link, Reply(is_accepted=True, text=path))
            case Resize():
                self._links.send(link, self._resize(message.devices))
            case _ if guest is not None:
                self._note(guest, message)
            case _:
                self._links.close(link)

    def _greet(self, link: ControlConnection, hello: NodeHello) -> None:
        if words := self._refuse(hello):
            self._links.send(link, Reply(is_accepted=False, text=words))
            return
        for other, guest in list(self._guests.items()):
            if guest.name == hello.node:  # it has come back before we saw it go
                del self._guests[other]
                self._links.close(other)
        self._guests[link] = JoinedNode(
            hello.node, hello.host, hello.pid, hello.devices, heard_at=time.monotonic()
        )

    def _refuse(self, hello: NodeHello) -> str:
        """Why a machine cannot be taken, if it cannot. One that comes back is the same process."""
        if hello.node == LOCAL:
            return f"{LOCAL!r} is the name of the run's own node"
        if hello.devices < 1:
            return f"{hello.devices} devices are none"
        known = [guest for guest in self._guests.values() if guest.name == hello.node]
        if any((guest.host, guest.pid) != (hello.host, hello.pid) for guest in known):
            return f"the run has a node called {hello.node!r} already"
        return ""

    def _resize(self, devices: int) -> Reply:
        if devices < 1 or not self._directory.has(Area.SERVERS):
            return Reply(is_accepted=False, text="it is still planning, or that is no worker")
        self._directory.write(Document.TARGET_WORKERS, str(devices))
        return Reply(is_accepted=True, text=f"{devices} workers from now on")

    def _note(self, guest: JoinedNode, message: Message) -> None:
        match message:
            case Prepared():
                guest.is_ready = True
            case Forked():
                guest.pids[message.member] = message.pid
            case Exited():
                pid = guest.pids.pop(message.member, None)
                if message.code and not guest.is_leaving:
                    what = "killed" if message.code < 0 else "failed"
                    self._tell_fault(
                        guest, f"{guest.name}.{message.member}", what, message.detail, pid
                    )
            case Failed():
                guest.is_leaving = True  # told here; what follows is no news
                self._tell_fault(guest, guest.name, "failed", message.message, guest.pid)
            case LeaveNotice():
                guest.is_leaving = True
            case _:
                pass

    def _lose(self, link: ControlConnection) -> None:
        guest = self._guests.pop(link, None)
        if guest is not None and not guest.is_leaving:
            words = "the machine was lost, with its workers; others do their tickets"
            self._tell_fault(guest, guest.name, "lost", words, guest.pid)

    def _tell_fault(
        self, guest: JoinedNode, member: str, what: str, detail: str, pid: int | None
    ) -> None:
        self._directory.emit(
            WorkerLost(cause=what, worker=member, host=guest.host, pid=pid, detail=detail)
        )
