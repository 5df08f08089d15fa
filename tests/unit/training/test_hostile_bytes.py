"""Whatever a stranger sends to a listener of ours ends the stranger's connection and nothing else.

Listeners: the control server of a worker group, the join server of an asynchronous run, a shard server, the
rendezvous of transports, the store of a group, the gloo tunnel. Frames that ended runs once are among them.
"""

from __future__ import annotations

import io
import json
import random
import socket
import struct
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.communication.test_servers import ADAMW, serving
from tests.waiting import LIMIT_S, wait_until
from yunlu.core import framing, limits, secure_link
from yunlu.core.framing import (
    FrameError,
    FrameReader,
    encode_header,
    receive_frame,
    send_frame,
)
from yunlu.core.secure_link import (
    UNAUTHENTICATED_BYTES,
    SecureLink,
    connect_link,
    derive_secret,
)
from yunlu.runs.home import open_run
from yunlu.runs.worker_group import control_secret, read_worker_group
from yunlu.training.asynchronous.coordinator import AsyncCoordinator
from yunlu.training.communication import transport
from yunlu.training.communication.servers import server
from yunlu.training.communication.servers.rules import ServerRules
from yunlu.training.communication.servers.store import read_address
from yunlu.training.communication.transport import connect
from yunlu.training.elastic import control_channel
from yunlu.training.elastic.control_channel import ControlServer
from yunlu.training.elastic.messages import read_message
from yunlu.training.parallel import gloo_tunnel, group_store
from yunlu.training.parallel.gloo_tunnel import GlooTunnel
from yunlu.training.parallel.group_store import GroupStore, StoreServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECRET = b"of this group"
PARTIAL = b"\x16\x03\x01\x40\0"
MAX_UNAUTHENTICATED = 64
WITH_TIME_LIMIT = (secure_link, control_channel, server, transport, gloo_tunnel, group_store)
LONE_SURROGATE = b'{"kind":"hello_client","token":"\\ud800"}'
DEEP = b"[" * 4000


def frame(control: bytes) -> bytes:
    """A frame that is right but for what it holds."""
    return encode_header(len(control), 0, framing._checksum(control)) + control


def make_corpus(size: int = 500) -> list[bytes]:
    """Bytes of strangers: what ended runs once, other protocols, and parts of ours put together wrongly."""
    known = [
        *(frame(DEEP), frame(LONE_SURROGATE), DEEP, LONE_SURROGATE, frame(b'{"a":' * 4000)),
        *(b"\xff\xff\xff\xff", b"\0\0\0\0", struct.pack("<Q", 1 << 60), b"YF" + bytes(30)),
        *(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"),
        *(
            b"\x80\x04cos\nsystem\n(S'id'\ntR.",
            b"SSH-2.0-OpenSSH_9\r\n",
            b"\0" * 4096,
            b"\xff" * 9000,
        ),
        *(
            b"YUNLUc1\n" + bytes(64),
            b"YUNLUs1\n" + bytes(64),
            b"YUNLUc1\n",
            b"YUNLUc1\n" + b"\xff" * 9000,
        ),
        *(
            frame(json.dumps({"kind": kind, "token": "x"}).encode())
            for kind in ("hello_worker", "halt")
        ),
    ]
    dictionary = [
        *(
            b"YUNLUc1\n",
            b"YUNLUs1\n",
            b"\x16\x03\x01",
            b"\x16\x03\x03\xff\xff",
            b"\x15\x03\x03\0\2\2\x28",
        ),
        *(
            b"[[[[",
            b"{",
            b'"\\ud800"',
            b'"kind":',
            b'"hello_node"',
            b"NaN",
            b"1e999",
            b"YF\1",
            encode_header(4, 0, 0),
        ),
        *(bytes(32), b"\xff" * 32, bytes(4), b"\0\0\x10\0", b"\r\n", b"\x80\x04."),
    ]
    source = random.Random(17)
    made = [
        b"".join(
            source.choice(dictionary)
            if source.random() < 0.7
            else source.randbytes(source.randrange(40))
            for _ in range(source.randrange(1, 12))
        )
        for _ in range(size - len(known))
    ]
    return known + made


CORPUS = make_corpus()


class Listener(Protocol):
    """A listener of ours."""

    address: tuple[str, int]
    secret: bytes
    """What it wants to be proved."""

    def is_open(self) -> bool:
        """Whether somebody who knows the secret is still served."""
        ...


class ControlListener:
    """The control server of a worker group, polled by a thread as a supervisor polls it."""

    def __init__(self) -> None:
        self._server = ControlServer("127.0.0.1", "token")
        self.address = ("127.0.0.1", self._server.port)
        self.secret = control_secret("token")
        self.failure: BaseException | None = None
        self.greeted = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        try:
            while not self._is_over:
                self._server.poll(0.01, on_message=self._greet, on_lost=lambda _: None)
        except BaseException as error:  # noqa: BLE001 (the test reports it)
            self.failure = error

    def _greet(self, *_: object) -> None:
        self.greeted += 1

    def is_open(self) -> bool:
        before = self.greeted
        with connect_link(self.address, self.secret, timeout_s=LIMIT_S) as link:
            send_frame(link, {"kind": "hello_client"})
            wait_until(lambda: self.greeted > before or self.failure, "a greeting")
        return self.failure is None

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._server.close_all()


class JoinListener:
    """The join server of an asynchronous run."""

    def __init__(self, path: Path) -> None:
        self._run = open_run(path)
        self._server = AsyncCoordinator(self._run)
        self._server.publish(workers=1, is_open=False)
        group = read_worker_group(self._run)
        assert group is not None
        self.secret, self.address = control_secret(group.token), (group.host, group.port)
        self.failure: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        try:
            while not self._is_over:
                self._server.poll(0.01)
        except BaseException as error:  # noqa: BLE001 (the test reports it)
            self.failure = error

    def is_open(self) -> bool:
        with connect_link(self.address, self.secret, timeout_s=LIMIT_S) as link:
            for kind in ("hello_client", "locate_run"):
                send_frame(link, {"kind": kind})
            answer = receive_frame(link, FrameReader()).control
        return self.failure is None and answer["is_accepted"]

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._server.close()


class ShardListener:
    """A server of the weights."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        rules = ServerRules(steps=1, mode="asp", optimizer=ADAMW)
        self._servers = stack.enter_context(serving(path, rules))
        found = read_address(self._servers.directory, 0)
        self.address = (found.host, found.port)
        self.secret = derive_secret(found.token.encode(), "shard")

    def is_open(self) -> bool:
        with connect_link(self.address, self.secret, timeout_s=LIMIT_S) as link:
            return link.is_authenticated

    def close(self) -> None:
        return


class StoreListener:
    """The store of a group."""

    def __init__(self) -> None:
        self._server = StoreServer("127.0.0.1", SECRET)
        self.address = (self._server.host, self._server.port)
        self.secret = derive_secret(SECRET, "store")

    def is_open(self) -> bool:
        limit = timedelta(seconds=LIMIT_S)
        with closing(GroupStore(self.address, SECRET, timeout=limit)) as store:
            store.set("key", "value")
            return store.get("key") == b"value"

    def close(self) -> None:
        self._server.close()


class TunnelListener:
    """The gloo tunnel between machines."""

    def __init__(self) -> None:
        self._tunnel = GlooTunnel(0, ["127.0.0.1"], SECRET)
        self.address = ("127.0.0.1", self._tunnel.port)
        self.secret = SECRET

    def is_open(self) -> bool:
        with connect_link(self.address, SECRET, timeout_s=LIMIT_S) as link:
            send_frame(link, {"port": 1})  # no port of its gloo: refused
            return link.recv(1) == b"" and self._tunnel._thread.is_alive()

    def close(self) -> None:
        self._tunnel.close()


class TransportListener:
    """The rendezvous of transports: rank 0 waits for rank 1, which calls at the end."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._store.set("transport/1", "1 127.0.0.1")  # rank 0 accepts once it knows everybody
        self._joined: list[object] = []
        self._thread = threading.Thread(target=self._join, args=(0,))
        self._thread.start()
        port, host = self._store.get("transport/0").decode().split(" ")
        self.address = (host, int(port))
        self.secret = derive_secret(SECRET, "transport", "transport")

    def _join(self, rank: int) -> None:
        transport = connect(self._store, rank, 2, "127.0.0.1", secret=SECRET, within_s=LIMIT_S)
        self._joined.append(transport)
        transport.close()

    def is_open(self) -> bool:
        self._join(1)
        self._thread.join()
        return len(self._joined) == 2

    def close(self) -> None:
        self._thread.join()


LISTENERS = ("control", "join", "shard", "store", "tunnel", "transport")


@contextmanager
def open_listener(name: str, path: Path) -> Iterator[Listener]:
    with ExitStack() as stack:
        match name:
            case "control":
                listener = ControlListener()
            case "join":
                listener = JoinListener(path)
            case "shard":
                listener = ShardListener(path, stack)
            case "store":
                listener = StoreListener()
            case "tunnel":
                listener = TunnelListener()
            case _:
                listener = TransportListener()
        stack.callback(listener.close)
        yield listener


@pytest.mark.parametrize("name", LISTENERS)
def test_strangers_harm_nobody(name: str, tmp_path: Path) -> None:
    with open_listener(name, tmp_path) as listener:
        for said in CORPUS:
            with (
                suppress(OSError),
                socket.create_connection(listener.address, timeout=LIMIT_S) as caller,
            ):
                caller.sendall(said)  # refused ones may be hung up on before they have said all
        held = [socket.create_connection(listener.address, timeout=LIMIT_S) for _ in range(100)]
        try:  # silent ones, more than are let in before they prove the secret
            assert listener.is_open()
        finally:
            for caller in held:
                caller.close()


def is_hung_up(caller: socket.socket) -> bool:
    """Whether the listener has closed this connection; what it has answered before is dropped."""
    caller.setblocking(False)
    try:
        while caller.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("name", LISTENERS)
def test_bytes_time_and_connections_are_limited_before_the_proof(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_listener(name, tmp_path) as listener, ExitStack() as stack:

        def call(said: bytes) -> socket.socket:
            caller = socket.create_connection(listener.address, timeout=LIMIT_S)
            stack.callback(caller.close)
            with suppress(OSError):
                caller.sendall(said)
            return caller

        # A record of 16 KiB is announced: nothing can be said about it before it is complete.
        flood = call(PARTIAL + bytes(UNAUTHENTICATED_BYTES))
        wait_until(lambda: is_hung_up(flood), "4 KiB to be too many")
        silent = [call(b"") for _ in range(MAX_UNAUTHENTICATED)]
        assert not is_hung_up(silent[-1])
        silent.append(call(b""))
        wait_until(lambda: is_hung_up(silent[0]), "the oldest of too many to be closed")
        for caller in silent:
            caller.close()

        with monkeypatch.context() as patch:
            for module in WITH_TIME_LIMIT:
                patch.setattr(module, "HANDSHAKE_S", 0.1)
            idle, slow = call(b""), call(PARTIAL)
            sent = 0

            def is_slow_one_hung_up() -> bool:
                nonlocal sent
                with suppress(OSError):
                    sent += slow.send(b"\0")
                return is_hung_up(slow)

            wait_until(lambda: is_hung_up(idle), "one who says nothing to be closed")
            wait_until(is_slow_one_hung_up, "one who never comes to an end to be closed")
            assert sent < UNAUTHENTICATED_BYTES - len(PARTIAL)
        assert listener.is_open()


@pytest.mark.parametrize("name", ["control", "join", "store", "shard", "tunnel"])
def test_one_who_knows_the_secret_and_sends_rubbish_harms_only_itself(
    name: str, tmp_path: Path
) -> None:
    with open_listener(name, tmp_path) as listener:
        for said in (frame(DEEP), frame(LONE_SURROGATE), frame(b"{}"), frame(b"[]"), b"\xff" * 64):
            with connect_link(listener.address, listener.secret, timeout_s=LIMIT_S) as link:
                link.sendall(said)
                with suppress(OSError):
                    assert link.recv(1) == b""
        assert listener.is_open()


PIECES = st.sampled_from(
    [
        b"[[[[" * 1000,
        b'"\\ud800"',
        b'{"kind":',
        b"YUNLUc1\n",
        b"\x16\x03\x01",
        bytes(32),
        b"\xff\xff\xff\xff",
    ]
)
TEXTS = st.sampled_from(["\ud800", "hello_client", "token", "kind", ""])
JSON = st.dictionaries(TEXTS, TEXTS, max_size=3).map(lambda value: json.dumps(value).encode())
FUZZ = st.one_of(
    JSON, st.lists(st.one_of(PIECES, st.binary(max_size=64)), max_size=8).map(b"".join)
)


def decode_messages(said: bytes) -> None:
    """As every listener does; what was decoded can be written to a log."""
    source = io.BytesIO(frame(said) + said)
    reader = FrameReader(control_bytes=1 << 16)
    with suppress(FrameError, EOFError):
        while True:
            if (found := reader.read(source.readinto)) is not None:
                json.dumps(found.control, ensure_ascii=False).encode()
                read_message(found.control)


def search(decode: Callable[[bytes], None], *, examples: int = 60) -> None:
    """Search for bytes that make a decoder raise anything but its own error."""

    @given(said=FUZZ)
    @settings(max_examples=examples, report_multiple_bugs=False)
    def run(said: bytes) -> None:
        decode(said)

    run()


@pytest.mark.hypothesis
def test_no_bytes_make_a_decoder_raise_anything_else() -> None:
    search(decode_messages)


def let_depth_pass(data: bytes) -> Any:
    return limits._without_lone(json.loads(data), replace=False)


def let_surrogates_pass(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise limits.JsonError(str(error)) from error


@pytest.mark.parametrize(
    ("uncured", "fault"),
    [(let_depth_pass, RecursionError), (let_surrogates_pass, UnicodeEncodeError)],
)
def test_the_search_finds_what_once_ended_runs(
    uncured: Any, fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "decode_json", uncured)
    with pytest.raises(fault):
        search(decode_messages, examples=500)


@given(said=FUZZ)
@settings(max_examples=60)
def test_no_bytes_make_a_handshake_raise_anything_else(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        link = SecureLink(theirs, SECRET, is_server=True)
        with suppress(BlockingIOError):
            ours.send(said)
        with suppress(OSError):
            link.handshake()
        assert not link.is_authenticated
