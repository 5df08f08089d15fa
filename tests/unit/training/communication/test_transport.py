"""Wires: what goes over them, what they refuse, and how waits end."""

from __future__ import annotations

import socket
import sys
import tracemalloc
import zlib
from contextlib import ExitStack, closing, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.communication.connected import (
    close_all,
    in_threads,
    make_link_pair,
    make_wires,
)
from tests.waiting import LIMIT_S
from yunlu.core import framing
from yunlu.core.framing import HEADER_BYTES, encode_frame
from yunlu.core.secure_link import SecureLink, derive_secret
from yunlu.training.communication.transport import (
    LinkLostError,
    RefusedMessageError,
    Transport,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = derive_secret(b"test", "transport", "transport")


@pytest.fixture
def trio() -> Iterator[list[Transport]]:
    """Three workers on two hosts."""
    transports = make_wires(["127.0.0.1", "127.0.0.2", "127.0.0.1"])
    yield transports
    close_all(transports)


@pytest.fixture
def ends() -> Iterator[tuple[Transport, SecureLink, SecureLink]]:
    """A wire with two others, and their bare ends of it."""
    with ExitStack() as stack:
        pairs = [make_link_pair() for _ in range(2)]
        for near, far in pairs:
            stack.enter_context(near)
            stack.enter_context(far)
            near.setblocking(False)
        links = {peer: near for peer, (near, _) in enumerate(pairs, start=1)}
        transport = Transport(0, ("a", "b", "c"), links, patience_s=LIMIT_S)
        yield transport, pairs[0][1], pairs[1][1]


def _message(
    body: bytes, *, tag: int = 0, length: int | None = None, **changed: bytes | int
) -> bytes:
    fields = framing._FIELDS.pack(
        changed.get("magic", framing._MAGIC),
        changed.get("version", framing._VERSION),
        changed.get("channel", 0),
        tag,
        changed.get("control", 0),
        len(body) if length is None else length,
        changed.get("checksum", xxhash.xxh3_64_intdigest(body)),
    )
    check = changed.get("check", zlib.crc32(fields))
    return fields + framing._CHECK.pack(check) + body


def _hello(**said: object) -> bytes:
    return bytes(encode_frame(said)[0])


def test_everyone_hears_from_everyone_and_it_is_counted(trio: list[Transport]) -> None:
    def work(rank: int) -> list[float]:
        others = [peer for peer in range(3) if peer != rank]
        mine = np.full(1000, rank, np.float32)
        heard = {peer: np.empty(1000, np.float32) for peer in others}
        trio[rank].exchange(dict.fromkeys(others, mine), heard, tag=9)
        return [float(heard[peer].mean()) for peer in others]

    assert in_threads(work, 3) == [[1, 2], [0, 2], [0, 1]]
    for transport in trio:
        assert transport.hosts == ("127.0.0.1", "127.0.0.2", "127.0.0.1")
        assert (
            transport.traffic.sent_bytes
            == transport.traffic.received_bytes
            == 2 * (4000 + HEADER_BYTES)
        )
        assert transport.traffic.messages == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a connection choose")
def test_congestion_control_is_chosen_where_the_system_has_it(trio: list[Transport]) -> None:
    assert trio[0].control_congestion("reno")
    for link in trio[0].links.values():
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno")
    assert not trio[0].control_congestion("no such rule")


def test_messages_whose_length_only_the_sender_knows(trio: list[Transport]) -> None:
    def work(rank: int) -> dict[int, bytearray]:
        others = [peer for peer in range(3) if peer != rank]
        return trio[rank].gather(dict.fromkeys(others, b"x" * 10 * rank), others, limit_bytes=20)

    assert in_threads(work, 3)[0] == {1: bytearray(b"x" * 10), 2: bytearray(b"x" * 20)}


@given(bodies=st.lists(st.binary(max_size=200_000), max_size=5), tag=st.integers(0, 2**33))
@settings(max_examples=15, deadline=None)
def test_many_messages_both_ways_arrive_whole_and_in_order(bodies: list[bytes], tag: int) -> None:
    transports = make_wires(["127.0.0.1"] * 2)
    found: list[list[bytearray]] = [[], []]

    def work(rank: int) -> list[int]:
        order: list[int] = []
        found[rank] = [bytearray(len(body)) for body in bodies]
        with transports[rank].session(tag=tag) as session:
            for number, body in enumerate(bodies):
                session.receive(1 - rank, found[rank][number], lambda n=number: order.append(n))
                session.send(1 - rank, body)
        return order

    try:
        assert in_threads(work, 2) == [list(range(len(bodies)))] * 2
    finally:
        close_all(transports)
    assert found == [bodies, bodies]


def test_channels_keep_their_own_order(trio: list[Transport]) -> None:
    first, second, third = bytearray(3), bytearray(5), bytearray(3)
    with trio[0].session() as session:
        session.send(1, b"late!", channel=1)
        session.send(1, b"one", channel=0)
        session.send(1, b"two", channel=0)
    with trio[1].session() as session:
        session.receive(0, first, channel=0)
        session.receive(0, third, channel=0)
        session.receive(0, second, channel=1)
    assert (first, third, second) == (b"one", b"two", b"late!")


@pytest.mark.parametrize(
    "sent",
    [
        _message(b"12345678", magic=b"HT"),
        _message(b"12345678", version=2),
        _message(b"12345678", tag=1),
        _message(b"12345678", channel=1),
        _message(b"12345678", checksum=1),
        _message(b"12345678", check=1),
        _message(b"12345678", control=2),
        _message(b"1234567"),
        _message(b"123456789"),
        _message(b"12345678", length=2**63),
        b"GET / HTTP/1.1\r\nHost: yunlu.example\r\n\r\n",
    ],
)
def test_what_was_not_to_come_is_refused_and_the_others_go_on(
    ends: tuple[Transport, SecureLink, SecureLink], sent: bytes
) -> None:
    transport, bad, good = ends
    bad.sendall(sent)
    with pytest.raises(RefusedMessageError) as caught:
        transport.receive(1, bytearray(8))
    assert caught.value.peer == 1
    bad.settimeout(LIMIT_S)
    assert bad.recv(1) == b""  # it learns that nobody listens any more
    good.sendall(_message(b"fine"))
    into = bytearray(4)
    transport.receive(2, into)
    assert into == b"fine"


def test_every_flipped_bit_is_noticed(ends: tuple[Transport, SecureLink, SecureLink]) -> None:
    whole = _message(b"gradient")
    for position in range(len(whole)):
        with ExitStack() as stack:
            near, far = make_link_pair()
            stack.enter_context(near)
            stack.enter_context(far)
            near.setblocking(False)
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            far.sendall(damaged)
            with pytest.raises(RefusedMessageError):
                Transport(0, ("a", "b"), {1: near}).receive(1, bytearray(8))


def test_nothing_is_set_aside_for_a_message_that_is_too_long(
    ends: tuple[Transport, SecureLink, SecureLink],
) -> None:
    transport, bad, _ = ends
    bad.sendall(_message(b"", length=1 << 30))
    tracemalloc.start()
    try:
        with pytest.raises(RefusedMessageError):
            transport.receive_some(1, limit_bytes=(1 << 30) - 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sent", [b"", _message(b"12345678")[:5], _message(b"12345678")[:-1]])
def test_a_connection_that_ends_early_is_a_loss(
    ends: tuple[Transport, SecureLink, SecureLink], sent: bytes
) -> None:
    transport, bad, _ = ends
    bad.sendall(sent)
    bad.close()
    with pytest.raises(LinkLostError) as caught:
        transport.receive(1, bytearray(8))
    assert not isinstance(caught.value, RefusedMessageError)
    assert isinstance(caught.value, dist.DistNetworkError)


@pytest.mark.parametrize("sent", [b"", _message(b"12345678")[:-1]])
def test_patience_ends(ends: tuple[Transport, SecureLink, SecureLink], sent: bytes) -> None:
    transport, silent, _ = ends
    silent.sendall(sent)
    transport.patience_s = 0.05
    with pytest.raises(LinkLostError, match="no progress"):
        transport.receive(1, bytearray(8))


def test_patience_ends_for_a_message_that_nobody_takes(
    ends: tuple[Transport, SecureLink, SecureLink],
) -> None:
    transport, _, _ = ends
    transport.patience_s = 0.05
    with pytest.raises(LinkLostError, match="no progress"):
        transport.send(1, bytes(64 << 20))


def test_abort_ends_waits_now_and_later(
    ends: tuple[Transport, SecureLink, SecureLink],
) -> None:
    transport, _, _ = ends
    starting = Event()
    raised: list[LinkLostError] = []

    def wait() -> None:
        starting.set()
        try:
            transport.receive(1, bytearray(8))
        except LinkLostError as error:
            raised.append(error)

    waiting = Thread(target=wait, daemon=True)
    waiting.start()
    starting.wait()
    transport.abort()
    waiting.join(LIMIT_S)
    assert "aborted" in str(raised[0])
    with pytest.raises(LinkLostError, match="aborted"):
        transport.receive(2, bytearray(8))


def test_a_failure_ends_the_connections_it_used_in_the_middle_of_messages(
    trio: list[Transport],
) -> None:
    trio[1].close()
    with pytest.raises(LinkLostError):
        trio[0].exchange({}, {1: bytearray(8), 2: bytearray(8)})
    with pytest.raises(LinkLostError):  # told at once, not after its patience
        trio[2].receive(0, bytearray(8))


def _knock(store: Any, said: bytes) -> socket.socket:
    port = int(store.get("transport/0").split(b" ")[0])
    caller = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    caller.sendall(said)
    return caller


def test_strangers_are_turned_away_and_keep_nobody_waiting() -> None:
    store = dist.HashStore()
    with ExitStack() as stack:
        joined: list[Transport] = []

        def join(rank: int) -> None:
            joined.append(connect(store, rank, 3, "127.0.0.1", secret=b"test", within_s=LIMIT_S))

        first = Thread(target=join, args=[0], daemon=True)
        first.start()
        turned_away: list[socket.socket | SecureLink] = [
            stack.enter_context(closing(_knock(store, said)))
            for said in (_hello(rank=1), b"\x16\x03\x01" + bytes(500), b"GET /")
        ]
        knocking: list[Thread] = []
        for said in (
            _message(b'{"rank": 1}', magic=b"HT"),
            _message(b'{"rank": 1}', version=2),
            *(_hello(rank=rank) for rank in (0, 77, True, "1", [1])),
            _hello(other=1),
            _hello(rank=1, more="x" * 64),
        ):  # they know the secret, and are still no peers
            link = SecureLink(_knock(store, b""), SECRET, is_server=False)
            stack.callback(link.close)
            knocking.append(Thread(target=_send, args=[link, said], daemon=True))
            knocking[-1].start()  # it is answered once rank 0 knows where everybody is
            turned_away.append(link)
        half = b"YUNLUc1"
        silent = [stack.enter_context(closing(_knock(store, said))) for said in [b"", half] * 20]
        in_threads(lambda rank: join(rank + 1), 2)
        for thread in (first, *knocking):
            thread.join(LIMIT_S)
        transports = sorted(joined, key=lambda transport: transport.rank)
        stack.callback(close_all, transports)
        into = bytearray(5)
        transports[1].send(0, b"hello")
        transports[0].receive(1, into)
        assert into == b"hello"
        for caller in (*turned_away, *silent):
            assert _is_hung_up(caller)


def _send(link: SecureLink, data: bytes) -> None:
    with suppress(OSError):  # hung up already, when the one who listens gives up the rest
        link.sendall(data)


def _is_hung_up(caller: socket.socket | SecureLink) -> bool:
    try:
        while caller.recv(4096):  # TLS says why
            pass
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("within_s", [0.05, 0.0009])
def test_nobody_comes(within_s: float) -> None:
    store = dist.HashStore()
    with pytest.raises(LinkLostError, match="Lost worker 1: it did not connect in time"):
        connect(store, 0, 2, "127.0.0.1", secret=b"test", within_s=within_s)
    with pytest.raises(ConnectionRefusedError):
        _knock(store, b"")


def test_one_who_came_and_never_called_is_missed() -> None:
    store = dist.HashStore()
    store.set("transport/1", "1 127.0.0.1")
    with pytest.raises(LinkLostError, match="Lost worker 1: it did not connect in time"):
        connect(store, 0, 2, "127.0.0.1", secret=b"test", within_s=0.05)


def test_one_whom_nobody_answers_for_is_missed() -> None:
    store = dist.HashStore()
    store.set("transport/0", "1 127.0.0.1")
    with pytest.raises(LinkLostError, match="Lost worker 0"):
        connect(store, 1, 2, "127.0.0.1", secret=b"test")
