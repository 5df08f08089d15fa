"""Coordinator of an asynchronous run, which nodes join to provide workers.

Their workers find the servers through the run's directory and take tickets like all others.
The control connection only tells who is there: losing a node loses no state.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from yunlu.runs.events import (
    WorkerLost,
)
from yunlu.runs.run_store import Area, Document
from yunlu.runs.worker_group import LOCAL
from yunlu.training.elastic.exec_module import ASYNC_NODE
from yunlu.training.elastic.group_coordinator import GroupCoordinator, open_control_server
from yunlu.training.elastic.messages import (
    Exited,
    Failed,
    Forked,
    Leave,
    LeaveNotice,
    NodeHello,
    Prepared,
    Reply,
)

if TYPE_CHECKING:
    from yunlu.planning.layouts import Layout
    from yunlu.runs.run_store import RunStore
    from yunlu.training.elastic.membership import NodeRecord
    from yunlu.training.elastic.messages import Message

_SILENCE_S = 10.0
"""A node pings four times a second; one that is silent for this long was cut off."""
_LOADING_S = 600.0
"""Limit while it loads its data."""
_FLUSH_S = 1.0


class AsyncCoordinator(GroupCoordinator):
    """Listens from the start of an attempt; its own workers are forked by the same process."""

    has_own_node = False

    def __init__(self, run: RunStore) -> None:
        super().__init__(run, open_control_server(), devices=0)

    def publish(self, *, workers: int, is_open: bool, layout: Layout | None = None) -> None:
        """Publish the address; ``is_open``: servers are running; ``layout``: number of tickets per step."""
        self.membership.nodes[LOCAL].wanted = workers
        self.publish_group(
            node_module=ASYNC_NODE,
            generation=int(is_open),
            layouts={} if layout is None else {layout.world: layout.model_dump()},
        )

    def poll(self, wait_s: float) -> None:
        """Handle messages for at most this long."""
        self.server.poll(wait_s, on_message=self.handle_message, on_lost=self.connection_lost)
        now = time.monotonic()
        for node in self.membership.nodes.values():
            limit_s = _SILENCE_S * self._patience if node.is_ready else _LOADING_S
            if node.connection is not None and now - node.heard_at > limit_s:
                self.server.close(node.connection)
        self.ping(now)

    def list_workers(self) -> list[dict[str, Any]]:
        """Workers on other machines, as a worker group event lists them."""
        return [
            {"worker": f"{node.name}.{number}", "host": node.host, "pid": pid}
            for node in self.membership.nodes.values()
            for number, pid in sorted(node.pids.items())
        ]

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors."""
        self.server.abandon()

    def close(self) -> None:
        """Dismiss all nodes and close."""
        for node in self.membership.nodes.values():
            node.is_leaving = True
            self.server.send(node.connection, Leave())
        self.server.flush(_FLUSH_S)
        self.server.close_all()

    def _observe_node(self, node: NodeRecord) -> None:
        node.heard_at = time.monotonic()

    def _admit(self, node: NodeRecord, hello: NodeHello) -> None:
        node.wanted, node.is_leaving = hello.devices, False
        node.pids.clear()
        self._observe_node(node)

    def _resize(self, devices: int) -> Reply:
        if devices < 1 or not self._run.has(Area.SERVERS):
            return Reply(
                is_accepted=False,
                text="the run is still planning, or fewer than one worker was requested",
            )
        self._run.write(Document.TARGET_WORKERS, str(devices))
        return Reply(is_accepted=True, text=f"{devices} workers from now on")

    def _handle_node(self, node: NodeRecord, message: Message) -> None:
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

    def _lose_node(self, node: NodeRecord) -> None:
        del self.membership.nodes[node.name]
        if not node.is_leaving:
            text = "the node was lost with its workers; others take over their tickets"
            self._report_fault(node, node.name, "lost", text, node.pid)

    def _report_fault(
        self, node: NodeRecord, worker: str, what: str, detail: str, pid: int | None
    ) -> None:
        self._run.emit(
            WorkerLost(cause=what, worker=worker, host=node.host, pid=pid, detail=detail)
        )
