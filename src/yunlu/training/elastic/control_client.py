"""Control connection of a worker or node to the supervisor: reconnects, and restarts a dead supervisor."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from yunlu.core.framing import FrameError, FrameReader
from yunlu.core.processes import start_process
from yunlu.core.secure_link import HANDSHAKE_S, SecureLink, connect_link
from yunlu.runs.fold import read_view
from yunlu.runs.run_store import WORKER_LOG, Claim, require_local
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import WorkerGroup, control_secret, read_worker_group
from yunlu.training.elastic.messages import Message, frame, read_message

if TYPE_CHECKING:
    import subprocess

    from yunlu.core.value import Value
    from yunlu.runs.run_store import RunStore

SUPERVISOR = (sys.executable, "-m", "yunlu.training.elastic.supervisor")
GIVE_UP_S = 60.0
"""A worker without a supervisor for this long exits, so that no orphan remains."""
_SEND_S = 5.0
_QUIET_S = 30.0
_RETRY_S = 0.1
_RESTART_S = 5.0


class ControlLostError(Exception):
    """The control connection is closed."""


class ControlClient:
    """One connection at a time to the current supervisor of the run."""

    def __init__(self, run: RunStore, *, quiet_s: float = _QUIET_S) -> None:
        self.run = run
        self._quiet_s = quiet_s
        self.group: WorkerGroup | None = None
        self.connection: SecureLink | None = None
        self.lost_at = time.monotonic()
        self._reader = FrameReader()
        self._received_at = 0.0
        self._connect_tried_at = 0.0
        self._restarted_at = 0.0
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._state_read_at = 0.0
        self._was_over = False

    @property
    def is_up(self) -> bool:
        """Whether the client is connected."""
        return self.connection is not None

    @property
    def local_host(self) -> str:
        """Local address of the connection to the supervisor; peers can reach this process there."""
        return self.connection.getsockname()[0] if self.connection else "127.0.0.1"

    def connect(self, hello: Value) -> bool:
        """Try to connect, at most every tenth of a second; both ends prove the current token."""
        now = time.monotonic()
        if now - self._connect_tried_at < _RETRY_S:
            return False
        self._connect_tried_at = now
        group = read_worker_group(self.run)
        if group is None:
            return False
        try:
            connection = connect_link(
                (group.host, group.port), control_secret(group.token), timeout_s=HANDSHAKE_S
            )
            connection.settimeout(_SEND_S)
            connection.sendall(frame(hello))
        except OSError:
            return False
        self.group, self.connection = group, connection
        self._reader, self._received_at = FrameReader(), time.monotonic()
        return True

    def send(self, message: Value) -> None:
        """Send a message; ``ControlLostError`` if the connection is closed."""
        if self.connection is None:
            raise ControlLostError
        try:
            self.connection.sendall(frame(message))
        except OSError as error:
            raise ControlLostError from error

    def receive(self) -> list[Message]:
        """Messages received; called when the connection is readable."""
        if self.connection is None:
            raise ControlLostError
        try:
            messages: list[Message] = []
            is_pending = True
            while is_pending:
                received = self._reader.read(self.connection.recv_into)
                self._received_at = time.monotonic()
                messages += [] if received is None else [read_message(received.control)]
                is_pending = self.connection.pending
            return messages
        except (OSError, EOFError, FrameError) as error:
            raise ControlLostError from error

    def check_quiet(self) -> None:
        """Raise if the supervisor has sent nothing for too long."""
        if self.connection is not None and time.monotonic() - self._received_at > self._quiet_s:
            raise ControlLostError

    def drop(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
            self.lost_at = time.monotonic()

    def restart_supervisor(self, *, after_s: float) -> None:
        """Start a supervisor if there is none: after a delay, on the same machine, while the run is active."""
        now = time.monotonic()
        if now - self.lost_at < after_s or now - self._restarted_at < _RESTART_S:
            return
        if self._supervisor is not None and self._supervisor.poll() is None:
            return  # it still starts: on a busy machine more of them would only delay each other
        self._restarted_at = now
        if self.is_over() or self.run.is_claimed(Claim.WORKER):
            return
        with require_local(self.run).open_text_log(WORKER_LOG) as log:
            command = [*SUPERVISOR, self.run.address, "--adopt"]
            self._supervisor = start_process(command, log=log, own_session=True)

    def is_over(self) -> bool:
        """Whether the run has ended or is stopping: then no supervisor is started. Read at most once a second."""
        now = time.monotonic()
        if now - self._state_read_at < 1:
            return self._was_over
        self._state_read_at = now
        self._was_over = run_is_over(self.run)
        return self._was_over


def run_is_over(run: RunStore) -> bool:
    """Whether the run has ended or is stopping."""
    state = read_view(run).state
    return state is RunState.STOPPING or not state.is_active
