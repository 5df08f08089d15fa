"""What the coordinator of any worker group does: admits nodes, pings them, answers commands, publishes its address."""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

from yunlu.core.processes import start_time
from yunlu.core.secure_link import bind_address
from yunlu.core.settings import read_settings
from yunlu.runs.worker_group import LOCAL, WorkerGroup, write_worker_group
from yunlu.training.elastic.control_channel import ControlServer
from yunlu.training.elastic.membership import Membership, NodeRecord, WorkerRecord
from yunlu.training.elastic.messages import (
    ClientHello,
    Kill,
    Leave,
    LocateRun,
    NodeHello,
    Ping,
    Reply,
    Resize,
)

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.training.elastic.control_channel import ControlConnection
    from yunlu.training.elastic.messages import Message

_PING_S = 1.0


def open_control_server(token: str | None = None) -> ControlServer:
    """Where nodes, workers and commands reach this process; a successor keeps the ``token``."""
    return ControlServer(bind_address(), token or secrets.token_urlsafe(32))


class GroupCoordinator:
    """Keeps the nodes of a run and hears its commands; what workers do is for a subclass."""

    has_own_node = True
    """Whether a process of the run's own machine registers as its node."""

    def __init__(self, run: RunStore, server: ControlServer, *, devices: int) -> None:
        self._run, self.server = run, server
        self.membership = Membership(nodes={LOCAL: NodeRecord(name=LOCAL, wanted=devices)})
        self._patience = read_settings().patience
        self._started_at = start_time()
        self._pinged_at = 0.0
        self._published: WorkerGroup | None = None

    def handle_message(self, connection: ControlConnection, message: Message) -> None:
        """Handle one message."""
        sender = self.membership.by_connection(connection)
        if isinstance(sender, NodeRecord):
            self._observe_node(sender)
        match message:
            case NodeHello():
                self._register_node(connection, message)
            case ClientHello() | Ping():
                pass
            case Resize():
                self.server.send(connection, self._resize(message.devices))
            case LocateRun():
                self.server.send(connection, Reply(is_accepted=True, text=self._run.address))
            case _ if isinstance(sender, WorkerRecord):
                self._handle_worker(sender, message)
            case _ if isinstance(sender, NodeRecord):
                self._handle_node(sender, message)
            case _:
                self.server.close(connection)

    def connection_lost(self, connection: ControlConnection) -> None:
        """Handle a closed connection."""
        sender = self.membership.by_connection(connection)
        if sender is None:
            return
        sender.connection = None
        if isinstance(sender, WorkerRecord):
            self._lose_worker_link(sender)
        else:
            self._lose_node(sender)

    def ping(self, now: float) -> bool:
        """Ping everybody, once a second; returns whether it was time to."""
        if now - self._pinged_at < _PING_S:
            return False
        self._pinged_at = now
        for record in [*self.membership.workers.values(), *self.membership.nodes.values()]:
            self.server.send(record.connection, Ping())
        return True

    def publish_group(self, **fields: Any) -> None:
        """Write the journal, ``worker_group.json``, with the address, if anything changed."""
        group = WorkerGroup(
            host=self.server.host,
            port=self.server.port,
            token=self.server.token,
            pid=os.getpid(),
            process_started_at=self._started_at,
            target=self.membership.target,
            wanted={node.name: node.wanted for node in self.membership.nodes.values()},
            **fields,
        )
        if group != self._published:
            write_worker_group(self._run, group)
            self._published = group

    def _register_node(self, connection: ControlConnection, hello: NodeHello) -> None:
        node = self.membership.nodes.get(hello.node)
        if text := self._refusal(node, hello):
            self.server.send(connection, Reply(is_accepted=False, text=text))
            self.server.send(connection, Leave())
            return
        if node is None:
            node = self.membership.nodes[hello.node] = NodeRecord(
                name=hello.node, wanted=hello.devices
            )
        elif node.connection is not None:  # reconnected before the loss was noticed
            before, node.connection = node.connection, None
            self.server.close(before)
        node.connection, node.host, node.pid = connection, hello.host, hello.pid
        node.is_ready = False
        for worker in self.membership.with_status("gone", node=node.name):
            # Declared lost while the node was cut off: it may still hold its device.
            self.server.send(connection, Kill(worker=worker.number))
        self._admit(node, hello)

    def _refusal(self, node: NodeRecord | None, hello: NodeHello) -> str:
        """Why a node is rejected, if it is. One that reconnects is the same process."""
        is_own = hello.node == LOCAL
        if is_own and not (self.has_own_node and hello.host == socket.gethostname()):
            return f"{LOCAL!r} is the name of the run's own node"
        if hello.devices < 1 and not is_own:
            return f"devices must be at least 1, not {hello.devices}"
        if node is None or node.connection is None or node.connection.is_closed:
            return ""
        is_same = (node.host, node.pid) == (hello.host, hello.pid)
        return "" if is_same else f"the run already has a node named {hello.node!r}"

    # What differs between kinds of groups.

    def _observe_node(self, node: NodeRecord) -> None:
        """Any message shows that a node is there."""
        raise NotImplementedError

    def _admit(self, node: NodeRecord, hello: NodeHello) -> None:
        """A node has registered, for the first time or again."""
        raise NotImplementedError

    def _handle_node(self, node: NodeRecord, message: Message) -> None:
        raise NotImplementedError

    def _lose_node(self, node: NodeRecord) -> None:
        raise NotImplementedError

    def _resize(self, devices: int) -> Reply:
        """Change the number of workers."""
        raise NotImplementedError

    def _handle_worker(self, worker: WorkerRecord, message: Message) -> None:
        """Of workers with a connection of their own, if there are such."""

    def _lose_worker_link(self, worker: WorkerRecord) -> None:
        """As above."""
