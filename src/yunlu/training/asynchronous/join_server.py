"""Control server of an asynchronous run, which nodes join to provide workers.

Their workers find the servers through the run's directory and take tickets like all others.
The control connection only tells who is there: losing a node loses no state.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from yunlu.core.addresses import bind_address
from yunlu.core.processes import start_time
from yunlu.core.settings import read_settings
from yunlu.runs.events import WorkerLost
from yunlu.runs.run_store import Area, Document
from yunlu.runs.worker_group import LOCAL, WorkerGroup, write_worker_group
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

_PING_S = 1.0
_SILENCE_S = 10.0
"""A node pings four times a second; one that is silent for this long was cut off."""
_LOADING_S = 600.0
"""Limit while it loads its data."""
_FLUSH_S = 1.0


@dataclass
class JoinedNode:
    """A node that provides workers."""

    name: str
    host: str
    pid: int
    devices: int
    heard_at: float
    is_ready: bool = False
    is_leaving: bool = False
    pids: dict[int, int] = field(default_factory=dict[int, int])
    """Pids of its workers, by number."""


class JoinServer:
    """Listens from the start of an attempt; ``worker_group.json`` has its address."""

    def __init__(self, directory: RunStore) -> None:
        self._directory = directory
        self._token = secrets.token_urlsafe(32)
        self._host = bind_address()
        self._server = ControlServer(self._host, self._token)
        self._nodes: dict[ControlConnection, JoinedNode] = {}
        self._patience = read_settings().patience
        self._pinged_at = 0.0
        self._written: WorkerGroup | None = None

    def publish(self, *, workers: int, is_open: bool, layout: Layout | None = None) -> None:
        """Publish the address; ``is_open``: servers are running; ``layout``: number of tickets per step."""
        group = WorkerGroup(
            host=self._host,
            port=self._server.port,
            token=self._token,
            pid=os.getpid(),
            process_started_at=start_time(),
            node_module=ASYNC_NODE,
            generation=int(is_open),
            target=workers + sum(node.devices for node in self._nodes.values()),
            layouts={} if layout is None else {layout.world: layout.model_dump()},
            wanted={LOCAL: workers, **{node.name: node.devices for node in self._nodes.values()}},
        )
        if group != self._written:
            write_worker_group(self._directory, group)
            self._written = group

    def poll(self, wait_s: float) -> None:
        """Handle messages for at most this long."""
        self._server.poll(wait_s, on_message=self._handle, on_lost=self._connection_lost)
        now = time.monotonic()
        for connection, node in list(self._nodes.items()):
            silence_s = _SILENCE_S * self._patience
            if now - node.heard_at > (silence_s if node.is_ready else _LOADING_S):
                self._server.close(connection)
        if now - self._pinged_at >= _PING_S:
            self._pinged_at = now
            for connection in self._nodes:
                self._server.send(connection, Ping())

    def list_workers(self) -> list[dict[str, Any]]:
        """Workers on other machines, as a worker group event lists them."""
        return [
            {"worker": f"{node.name}.{number}", "host": node.host, "pid": pid}
            for node in self._nodes.values()
            for number, pid in sorted(node.pids.items())
        ]

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors."""
        self._server.abandon()

    def close(self) -> None:
        """Dismiss all nodes and close."""
        for connection, node in self._nodes.items():
            node.is_leaving = True
            self._server.send(connection, Leave())
        self._server.flush(_FLUSH_S)
        self._server.close_all()

    def _handle(self, connection: ControlConnection, message: Message) -> None:
        node = self._nodes.get(connection)
        if node is not None:
            node.heard_at = time.monotonic()
        match message:
            case NodeHello():
                self._register(connection, message)
            case ClientHello() | Ping():
                pass
            case LocateRun():
                path = self._directory.address
                self._server.send(connection, Reply(is_accepted=True, text=path))
            case Resize():
                self._server.send(connection, self._resize(message.devices))
            case _ if node is not None:
                self._handle_node(node, message)
            case _:
                self._server.close(connection)

    def _register(self, connection: ControlConnection, hello: NodeHello) -> None:
        if text := self._refusal(hello):
            self._server.send(connection, Reply(is_accepted=False, text=text))
            return
        for other, node in list(self._nodes.items()):
            if node.name == hello.node:  # reconnected before the loss was noticed
                del self._nodes[other]
                self._server.close(other)
        self._nodes[connection] = JoinedNode(
            hello.node, hello.host, hello.pid, hello.devices, heard_at=time.monotonic()
        )

    def _refusal(self, hello: NodeHello) -> str:
        """Why a node is rejected, if it is. One that reconnects is the same process."""
        if hello.node == LOCAL:
            return f"{LOCAL!r} is the name of the run's own node"
        if hello.devices < 1:
            return f"devices must be at least 1, not {hello.devices}"
        known = [node for node in self._nodes.values() if node.name == hello.node]
        if any((node.host, node.pid) != (hello.host, hello.pid) for node in known):
            return f"the run already has a node named {hello.node!r}"
        return ""

    def _resize(self, devices: int) -> Reply:
        if devices < 1 or not self._directory.has(Area.SERVERS):
            return Reply(
                is_accepted=False,
                text="the run is still planning, or fewer than one worker was requested",
            )
        self._directory.write(Document.TARGET_WORKERS, str(devices))
        return Reply(is_accepted=True, text=f"{devices} workers from now on")

    def _handle_node(self, node: JoinedNode, message: Message) -> None:
        match message:
            case Prepared():
                node.is_ready = True
            case Forked():
                node.pids[message.worker] = message.pid
            case Exited():
                pid = node.pids.pop(message.worker, None)
                if message.code and not node.is_leaving:
                    what = "killed" if message.code < 0 else "failed"
                    self._report_fault(
                        node, f"{node.name}.{message.worker}", what, message.detail, pid
                    )
            case Failed():
                node.is_leaving = True  # reported here; its exit is not a fault
                self._report_fault(node, node.name, "failed", message.message, node.pid)
            case LeaveNotice():
                node.is_leaving = True
            case _:
                pass

    def _connection_lost(self, connection: ControlConnection) -> None:
        node = self._nodes.pop(connection, None)
        if node is not None and not node.is_leaving:
            text = "the node was lost with its workers; others take over their tickets"
            self._report_fault(node, node.name, "lost", text, node.pid)

    def _report_fault(
        self, node: JoinedNode, worker: str, what: str, detail: str, pid: int | None
    ) -> None:
        self._directory.emit(
            WorkerLost(cause=what, worker=worker, host=node.host, pid=pid, detail=detail)
        )
