"""Executor's end of the Ray bridge: a child process with requests and replies."""

from __future__ import annotations

import json
import select
import socket
import sys
import tempfile
import threading
import time
import weakref
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from yunlu.core.errors import missing_part
from yunlu.core.json_decode import decode_json
from yunlu.core.processes import start_process, stop_process
from yunlu.core.settings import ray_authentication, worker_environment
from yunlu.executors.executor import ExecutorError

if TYPE_CHECKING:
    import subprocess

_BRIDGE = (sys.executable, "-m", "yunlu.executors.ray_bridge")
_KNOCK_S, _CONNECT_S, _ANSWER_S = 10.0, 120.0, 60.0
_LEAVE_S = 5.0
_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


_links: dict[str, RayLink] = {}
"""One per cluster: connecting takes seconds, and executors are opened for every query."""


def find_link(address: str) -> RayLink:
    """The link of this process to a cluster; errors appear at the first call."""
    return _links.setdefault(address, RayLink(address))


class RayLink:
    """One connection at a time; reconnects when it is lost."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._bridge: _Bridge | None = None

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Send a request; ``ExecutorError`` with the cluster's message where it refuses or is absent."""
        with self._lock:
            if self._bridge is None or not self._bridge.is_alive():
                self._hang_up()
                self._bridge = self._connect()
            try:
                return self._bridge.ask({"call": name, "with": arguments}, _ANSWER_S)
            except _SilentError as error:
                text = self._bridge.last_words()
                self._hang_up()
                raise ExecutorError(
                    f"the Ray cluster at {self.address} {error}{text}",
                    hint="what runs there continues; try again in a moment",
                ) from error

    def close(self) -> None:
        """Disconnect; what runs on the cluster continues."""
        with self._lock:
            self._hang_up()

    def _connect(self) -> _Bridge:
        if find_spec("ray") is None:
            raise missing_part("ray", "ray", f"Running on the Ray cluster {self.address}")
        self._knock()
        bridge = _Bridge(self.address)
        try:
            bridge.read(_CONNECT_S)
        except (_SilentError, ExecutorError) as error:
            given = f"it {error}{bridge.last_words()}" if isinstance(error, _SilentError) else error
            bridge.end()
            if isinstance(error, _TokenError):
                raise self._no_token(str(given)) from error
            raise self._no_connection(str(given)) from error
        return bridge

    def _knock(self) -> None:
        """Check the port first: Ray itself retries for minutes."""
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not port.isdigit():  # "auto": Ray finds it on this machine
            return
        try:
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
        except OSError as error:
            raise self._no_connection(str(error)) from error

    def _no_connection(self, cause: str) -> ExecutorError:
        return ExecutorError(
            f"there is no connection to the Ray cluster at {self.address}: {cause}",
            hint="ray status, run there, says whether it is up",
        )

    def _no_token(self, said: str) -> ExecutorError:
        return ExecutorError(
            f"the Ray cluster at {self.address} wants a token and did not get the right one: {said}",
            hint="`ray get-auth-token`, run on its head node, prints it; set RAY_AUTH_TOKEN to it here "
            "(or RAY_AUTH_TOKEN_PATH to a file with it, or RAY_AUTH_MODE=token to use ~/.ray/auth_token)",
        )

    def _hang_up(self) -> None:
        if self._bridge is not None:
            self._bridge.end()
            self._bridge = None


class _TokenError(ExecutorError):
    """The cluster refused the token, or got none."""


class _SilentError(Exception):
    """No answer came."""


class _Bridge:
    def __init__(self, address: str) -> None:
        self._noise: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = start_process(
            [*_BRIDGE, address],
            is_piped=True,
            errors=self._noise,
            directory="/",  # Ray lets workers import modules from the directory where a driver was started
            environment=worker_environment() | _QUIET | ray_authentication(),
            own_session=True,
        )
        self._pending = b""
        self.end = weakref.finalize(self, _end, self._process, self._noise)
        """Finalizer that ends the process, at the latest with this program."""

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], span_s: float) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise _SilentError("was lost") from error
        return self.read(span_s)

    def read(self, span_s: float) -> Any:
        """One answer."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + span_s
        while b"\n" not in self._pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise _SilentError(f"has not answered for {span_s:.0f} s")
            data = self._process.stdout.read1(1 << 16)  # pyright: ignore[reportAttributeAccessIssue] (a buffered reader)
            if not data:
                raise _SilentError("was lost")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        answer = decode_json(line)
        if answer.get("wants_token"):
            raise _TokenError(f"Ray: {answer['error']}")
        if "error" in answer:
            raise ExecutorError(f"Ray: {answer['error']}")
        return answer["answer"]

    def last_words(self) -> str:
        """End of Ray's output, for error messages."""
        self._noise.seek(0)
        lines = self._noise.read()[-4000:].decode(errors="replace").strip().splitlines()
        return f"; its last words: {lines[-1]}" if lines else ""


def _end(process: subprocess.Popen[bytes], noise: IO[bytes]) -> None:
    stop_process(process, grace_s=_LEAVE_S, number=0)  # it ends with its standard input
    noise.close()
