"""Secure links: what is sent arrives; strangers, replays and altered records are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.waiting import LIMIT_S, wait_until
from yunlu.core import secure_link
from yunlu.core.secure_link import (
    HANDSHAKE_S,
    UNAUTHENTICATED_BYTES,
    LinkRefusedError,
    SecureLink,
    connect_link,
    derive_secret,
    drop_sent,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = b"s" * 32
MODES = ("mac", "tls")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How links of this test are protected: as within a machine, or as between machines."""
    monkeypatch.setattr(secure_link, "is_same_machine", lambda _: request.param == "mac")
    return request.param


Pair = Callable[..., tuple[SecureLink, SecureLink]]
Relay = Callable[[socket.socket, socket.socket], None]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Makes two ends of a connection before their handshake; a relay stands between them if there is one."""
    ends: list[socket.socket] = []
    threads: list[Thread] = []

    def make(
        relay: Relay | None = None, *, secrets: tuple[bytes, bytes] = (SECRET, SECRET)
    ) -> tuple[SecureLink, SecureLink]:
        left, right = socket.socketpair()
        ends.extend((left, right))
        if relay is not None:
            left_far, (right_far, right) = right, socket.socketpair()
            ends.extend((right_far, right))
            threads.append(Thread(target=relay, args=(left_far, right_far), daemon=True))
            threads[-1].start()
        for end in ends:
            end.settimeout(LIMIT_S)
        return (
            SecureLink(left, secrets[0], is_server=False),
            SecureLink(right, secrets[1], is_server=True),
        )

    yield make
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()


def shake_hands(client: SecureLink, server: SecureLink) -> None:
    with ThreadPoolExecutor() as threads:
        ends = [threads.submit(link.handshake) for link in (client, server)]
        for end in ends:
            end.result()


def receive(link: SecureLink, size: int) -> bytes:
    data = bytearray(size)
    filled = 0
    while filled < size:
        count = link.recv_into(memoryview(data)[filled:])
        assert count
        filled += count
    return bytes(data)


@pytest.mark.parametrize("size", [1, 17, 65_535, 65_536, 1_000_003])
def test_what_is_sent_arrives(pair: Pair, mode: str, size: int) -> None:
    client, server = pair()
    shake_hands(client, server)
    assert client.is_encrypted == server.is_encrypted == (mode == "tls")
    data = bytes(number % 251 for number in range(size))
    for sender, receiver in ((client, server), (server, client)):
        sending = Thread(target=sender.sendall, args=(data,))
        sending.start()
        assert receive(receiver, size) == data
        sending.join()
    client.close()
    assert server.recv(10) == b""


def test_non_blocking_ends_exchange_pieces_of_memory(pair: Pair, mode: str) -> None:
    client, server = pair()
    shake_hands(client, server)
    client.setblocking(False)
    server.setblocking(False)
    pieces = [
        memoryview(bytes([number]) * size) for number, size in enumerate((3, 70_000, 5, 300_000))
    ]
    whole = b"".join(pieces)
    received = bytearray()
    rest = [*pieces]
    while len(received) < len(whole):
        try:
            sent = client.sendmsg(rest) if rest else 0
        except BlockingIOError:
            sent = 0
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if sent:
            rest[0] = rest[0][sent:]
        head, body = bytearray(10), bytearray(100_000)
        try:
            (count,) = server.recvmsg_into([memoryview(head), memoryview(body)])
        except BlockingIOError:
            continue
        received += (head + body)[:count]
    assert received == whole
    assert not server.pending


@pytest.mark.parametrize("pieces", [[3 << 20], [100, 300_000] * 8, [1 << 14] * 150])
def test_one_call_sends_as_much_as_the_socket_takes(
    pair: Pair, mode: str, pieces: list[int]
) -> None:
    client, server = pair()
    shake_hands(client, server)
    data = [os.urandom(size) for size in pieces]
    with ThreadPoolExecutor() as threads:
        receiving = threads.submit(receive, server, sum(pieces))
        assert client.sendmsg([memoryview(piece) for piece in data]) == sum(pieces)
        assert receiving.result() == b"".join(data)


@pytest.mark.parametrize("cut", [1, 7, 4099])
def test_records_may_arrive_in_any_pieces(pair: Pair, mode: str, cut: int) -> None:
    def dribble(one: socket.socket, other: socket.socket) -> None:
        ways = [Thread(target=pass_on, args=way) for way in ((one, other), (other, one))]
        for way in ways:
            way.start()
        for way in ways:
            way.join()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(cut):
                target.sendall(data)

    client, server = pair(dribble)
    shake_hands(client, server)
    pieces = [b"head", b"x" * 20_000, b"", b"a", b"b" * 300, b"tail"]
    whole = b"".join(pieces)
    rest = [memoryview(piece) for piece in pieces]
    while rest:
        drop_sent(rest, client.sendmsg(rest))
    assert receive(server, len(whole)) == whole
    assert not server.pending


def test_a_secret_is_never_sent_and_no_data_can_be_read_between_machines(
    pair: Pair, mode: str
) -> None:
    seen = bytearray()

    def listen(one: socket.socket, other: socket.socket) -> None:
        _relay(one, other, lambda data: (seen.extend(data), data)[1])

    client, server = pair(listen)
    shake_hands(client, server)
    client.sendall(b"a line that a listener would know")
    assert receive(server, 33) == b"a line that a listener would know"
    assert SECRET not in seen
    assert derive_secret(SECRET, "authority") not in seen
    assert (b"listener" in seen) == (mode == "mac")


@pytest.mark.parametrize("secrets", [(b"x" * 32, SECRET), (SECRET, b"x" * 32), (b"", SECRET)])
def test_who_does_not_know_the_secret_is_refused(
    pair: Pair, mode: str, secrets: tuple[bytes, bytes]
) -> None:
    client, server = pair(secrets=secrets)

    def prove(link: SecureLink) -> None:
        try:
            link.handshake()
            link.recv(1)  # TLS tells a refused client only now
        finally:
            link.close()

    with ThreadPoolExecutor() as threads:
        ends = [threads.submit(prove, link) for link in (client, server)]
        with pytest.raises(LinkRefusedError):
            ends[0].result()
        with pytest.raises((LinkRefusedError, OSError)):
            ends[1].result()
    assert not server.is_authenticated


@pytest.mark.parametrize("at", [0, 3, 4, 12, 19, 20, 40, -1])
def test_an_altered_record_is_noticed(pair: Pair, mode: str, at: int) -> None:
    alters = False

    def alter(data: bytes) -> bytes:
        if not alters:
            return data
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    client, server = pair(lambda one, other: _relay(one, other, alter))
    shake_hands(client, server)
    client.sendall(b"before")
    assert receive(server, 6) == b"before"
    alters = True
    client.sendall(b"weights" * 100)
    client.shutdown(socket.SHUT_WR)  # a longer record than was sent is never complete
    with pytest.raises(LinkRefusedError):
        _expect_refusal(server)


@pytest.mark.parametrize("what", ["twice", "reordered", "dropped"])
def test_replayed_and_reordered_records_are_noticed(pair: Pair, mode: str, what: str) -> None:
    held: list[bytes] = []
    tricks = False

    def trick(data: bytes) -> bytes:
        if not tricks:
            return data
        held.append(data)
        if what == "twice":
            return data + data
        if what == "dropped":
            return b"" if len(held) == 1 else data
        return b"" if len(held) == 1 else data + held[0]

    client, server = pair(lambda one, other: _relay(one, other, trick))
    shake_hands(client, server)
    client.sendall(b"before")
    assert receive(server, 6) == b"before"
    tricks = True
    client.sendall(b"first")
    wait_until(lambda: held, "the first record")
    client.sendall(b"second")
    with pytest.raises(LinkRefusedError):
        receive(server, 16)


def test_a_recorded_conversation_cannot_be_repeated(pair: Pair, mode: str) -> None:
    recorded = bytearray()
    client, server = pair(
        lambda one, other: _relay(one, other, lambda data: (recorded.extend(data), data)[1])
    )
    shake_hands(client, server)
    client.sendall(b"resize to 1")
    receive(server, 11)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(LIMIT_S)
        ours.sendall(recorded)
        ours.shutdown(socket.SHUT_WR)
        again = SecureLink(theirs, SECRET, is_server=True)
        with pytest.raises((LinkRefusedError, BrokenPipeError)):
            again.handshake()
        assert not again.is_authenticated


def _hostile_openings() -> Iterator[bytes]:
    """What strangers send first: other protocols, floods, broken handshakes."""
    yield from (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\0", b"\xff" * 5000, b"[" * 5000)
    yield b'{"kind":"hello_client","token":"\\ud800"}'
    call = b"YUNLUc1\n" + bytes(32)
    yield from (call[:-1], call + bytes(32), call + bytes(31), call + b"\xff" * 5000, call + call)
    yield from (b"YUNLUs1\n" + bytes(64), b"YUNLUc2\n" + bytes(64), b"yunluc1\n" + bytes(64))
    for head in (b"\x16\x03\x01", b"\x16\x03\x03", b"\x16\x03\x01\xff\xff", b"\x16"):
        yield from (head, head + bytes(300), head + b"\x01" * 5000, head + call)


@pytest.mark.parametrize("opening", [*_hostile_openings()])
def test_a_stranger_is_refused_before_it_can_send_much(pair: Pair, opening: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(LIMIT_S)
    link = SecureLink(theirs, SECRET, is_server=True)

    def call() -> None:
        _send(ours, opening)
        with suppress(OSError):
            ours.shutdown(socket.SHUT_WR)

    sending = Thread(target=call, daemon=True)
    sending.start()
    with pytest.raises((LinkRefusedError, BrokenPipeError)):
        link.handshake()
    assert not link.is_authenticated
    assert link._received_bytes <= UNAUTHENTICATED_BYTES
    link.close()
    sending.join()
    ours.close()


@pytest.mark.parametrize("timeout_s", [None, LIMIT_S, 0.0])
def test_the_time_for_a_proof_is_limited_in_all(
    timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a byte now and then would hold a connection for hours."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(timeout_s)
        times = iter([0.0, HANDSHAKE_S - 1, HANDSHAKE_S + 1])
        monkeypatch.setattr(secure_link, "time", SimpleNamespace(monotonic=lambda: next(times)))
        link = SecureLink(theirs, SECRET, is_server=True)
        ours.sendall(b"YUNLUc1")
        with pytest.raises(LinkRefusedError, match="in time"):
            link.handshake()
        assert theirs.gettimeout() == timeout_s


def test_a_proof_is_not_waited_for_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(secure_link, "HANDSHAKE_S", 0.01)
        link = SecureLink(theirs, SECRET, is_server=True)
        with pytest.raises((TimeoutError, LinkRefusedError)):
            link.handshake()
        assert theirs.gettimeout() is None


def test_connections_from_other_machines_must_be_encrypted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = pair()
    monkeypatch.setattr(secure_link, "is_same_machine", lambda _: False)

    with ThreadPoolExecutor() as threads:
        proving = threads.submit(client.handshake)
        with pytest.raises(LinkRefusedError, match="TLS"):
            server.handshake()
        server.close()
        with pytest.raises(ConnectionError):
            proving.result()


def test_a_link_over_the_network_stack() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:

        def serve() -> bytes:
            sock, _ = listener.accept()
            with SecureLink(sock, SECRET, is_server=True) as link:
                return link.recv(100)

        serving = threads.submit(serve)
        with connect_link(listener.getsockname(), SECRET, timeout_s=LIMIT_S) as link:
            assert not link.is_encrypted
            link.sendall(b"hello")
            assert serving.result() == b"hello"


def test_purposes_have_secrets_of_their_own() -> None:
    derived = {derive_secret(SECRET, "wires", number) for number in range(10)}
    derived |= {derive_secret(SECRET, "store"), derive_secret(SECRET, "wires"), SECRET}
    assert len(derived) == 13
    assert derive_secret(SECRET, "store") == derive_secret(SECRET, "store")


def _relay(one: socket.socket, other: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Pass on both directions; what the client sends may be changed on its way."""

    def back() -> None:
        with suppress(OSError):
            while data := other.recv(1 << 16):
                one.sendall(data)

    backwards = Thread(target=back, daemon=True)
    backwards.start()
    with suppress(OSError):
        while data := one.recv(1 << 16):
            _send(other, change(data))
        other.shutdown(socket.SHUT_WR)
    backwards.join()


def _send(sock: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # refused before all was sent
        sock.sendall(data)


def _expect_refusal(link: SecureLink) -> None:
    while link.recv(1 << 16):
        pass
    raise LinkRefusedError("the connection ended within a record")
