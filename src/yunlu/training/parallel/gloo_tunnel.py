"""Tunnel for gloo between machines: its connections cannot be authenticated, so they travel inside ours.

Gloo listens on the loopback interface only. Each worker has one listener for the secure links of
workers on other machines, and local ports that stand for the gloo ports of those workers. The store
through which gloo exchanges addresses replaces a remote address by that of the local port.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store

from yunlu.core.errors import TrainingError
from yunlu.core.framing import FrameReader, receive_frame, send_frame
from yunlu.core.secure_link import (
    HANDSHAKE_S,
    LOOPBACK,
    SecureLink,
    connect_link,
    derive_secret,
    drop_sent,
    is_loopback,
)
from yunlu.core.settings import use_network_interface
from yunlu.training.parallel.sockets import interface_of, is_own_connection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

_LENGTH = struct.Struct("<Q")
_MARK = struct.Struct("<4sI")
_MAGIC = b"YLgt"
_TARGET_BYTES = 64
_SOCKADDR = struct.Struct("<H2s4s")
"""Family, port and address of an IPv4 ``sockaddr_in``."""
_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 18
_MAX_UNAUTHENTICATED = 64
_MAX_BINDS = 32
_FIRST_PORT, _LAST_PORT = 1024, 65535


class TunnelStore(Store):
    """A store through which gloo sees remote workers at local ports; anything else passes unchanged."""

    def __init__(self, base: Any, tunnel: GlooTunnel) -> None:
        super().__init__()
        self._base, self._tunnel = base, tunnel

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value; an own gloo address is marked with this worker's rank."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._base.set(key, self._tunnel.publish(key, data))

    def get(self, key: str) -> bytes:
        """A value; a remote gloo address becomes a local one."""
        return self._tunnel.resolve(key, bytes(self._base.get(key)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        if timeout is None:
            self._base.wait(keys)
        else:
            self._base.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return self._base.check(keys)

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return self._base.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set a value if the current one is as expected."""
        return self._base.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._base.delete_key(key)

    def num_keys(self) -> int:
        """Number of keys."""
        return self._base.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (torch calls them by these names)


def secure_gloo(
    store: Any, rank: int, size: int, host: str, secret: bytes, *, trusts_network: bool
) -> tuple[Any, GlooTunnel | None]:
    """Keep gloo within this machine; returns its store, and the tunnel if there are other machines.

    Called by all workers before they form process groups.

    Args:
        store: Through which the workers exchange addresses.
        rank: Of this worker.
        size: Number of workers.
        host: Address at which other machines reach this one.
        secret: Of these workers.
        trusts_network: Let gloo connect to other machines itself, open to anybody on the network.
    """
    if trusts_network:
        use_network_interface(interface_of(host))
        return store, None
    keep_on_loopback()
    store.set(f"host-{rank}", host)
    hosts = [bytes(store.get(f"host-{peer}")).decode() for peer in range(size)]
    if len({LOOPBACK if is_loopback(name) else name for name in hosts}) == 1:
        return store, None
    tunnel, tunnelled = _open_tunnel(store, rank, hosts, secret)
    return tunnelled, tunnel


def keep_on_loopback() -> None:
    """Let gloo listen on the loopback interface only."""
    interface = interface_of(LOOPBACK)
    if interface is None:  # gloo would choose one itself, open to the network
        raise TrainingError(
            f"No network interface has the address {LOOPBACK}, on which gloo has to listen.",
            hint="Bring it up: ip link set lo up.",
        )
    use_network_interface(interface)


def _open_tunnel(
    store: Any, rank: int, hosts: Sequence[str], secret: bytes
) -> tuple[GlooTunnel, TunnelStore]:
    tunnel = GlooTunnel(rank, hosts, derive_secret(secret, "tunnel"))
    try:
        store.set(f"tunnel-{rank}", str(tunnel.port))
        tunnel.peers = {
            peer: (host, int(store.get(f"tunnel-{peer}")))
            for peer, host in enumerate(hosts)
            if host != hosts[rank]
        }
    except BaseException:
        tunnel.close()
        raise
    return tunnel, TunnelStore(store, tunnel)


@dataclass(eq=False)
class _Pipe:
    """A local connection of gloo and the secure link that carries it on."""

    link: SecureLink
    plain: socket.socket | None = None
    """None until a remote worker has said which port it wants."""
    reader: FrameReader = field(default_factory=lambda: FrameReader(control_bytes=_TARGET_BYTES))
    to_link: deque[memoryview] = field(default_factory=deque[memoryview])
    to_plain: deque[memoryview] = field(default_factory=deque[memoryview])
    is_over: bool = False


class GlooTunnel:
    """Listener, local ports and connections of one worker; one thread moves all data.

    Args:
        rank: Of this worker.
        hosts: Address of each worker, by rank.
        secret: Of these workers' tunnels.
    """

    def __init__(self, rank: int, hosts: Sequence[str], secret: bytes) -> None:
        self._rank, self._hosts, self._secret = rank, hosts, secret
        self.peers: Mapping[int, tuple[str, int]] = {}
        """Address of the tunnel of each worker on another machine."""
        self._own_ports: dict[str, int] = {}
        self._local: dict[tuple[int, int, int], socket.socket] = {}
        self._targets: dict[socket.socket, tuple[int, int]] = {}
        self._arrivals: deque[_Pipe] = deque()
        self._lock = threading.Lock()
        self._pipes: set[_Pipe] = set()
        self._strangers: dict[_Pipe, float] = {}
        """Connections that have not proved the secret, oldest first, and until when they may."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        family = socket.AF_INET6 if ":" in hosts[rank] else socket.AF_INET
        self._listener = socket.create_server((hosts[rank], 0), family=family, backlog=256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="gloo tunnel", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port of the listener for other machines."""
        return self._listener.getsockname()[1]

    @property
    def listeners(self) -> set[int]:
        """Descriptors of all sockets on which it listens."""
        with self._lock:
            return {sock.fileno() for sock in (*self._local.values(), self._listener)}

    def publish(self, key: str, value: bytes) -> bytes:
        """What to store: an own gloo address is remembered, and marked with the rank."""
        port = _read_port(value)
        if port is None:
            return value
        self._own_ports[_group_of(key)] = port
        return _MARK.pack(_MAGIC, self._rank) + value

    def resolve(self, key: str, value: bytes) -> bytes:
        """What gloo is told: the address of a worker on another machine is that of a local port."""
        if not value.startswith(_MAGIC):
            return value
        (_, peer), address = _MARK.unpack_from(value), value[_MARK.size :]
        port = _read_port(address)
        if port is None or self._hosts[peer] == self._hosts[self._rank]:
            return address
        return _replace_port(address, self._local_port(peer, port, self._own_ports[_group_of(key)]))

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        with suppress(OSError):
            self._wake.send(b"!")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _local_port(self, peer: int, port: int, own_port: int) -> int:
        """Local port that stands for a port of a remote worker, as seen by the gloo device at ``own_port``."""
        target = (peer, port, own_port)
        with self._lock:
            if target not in self._local:
                listener = _bind_ordered(own_port, is_less=self._rank < peer)
                listener.setblocking(False)
                self._local[target] = listener
                self._targets[listener] = (peer, port)
                self._selector.register(listener, selectors.EVENT_READ)
            return self._local[target].getsockname()[1]

    # Thread that moves data.

    def _run(self) -> None:
        try:
            while not self._is_closed:
                busy = [pipe for pipe in self._pipes if _is_pending(pipe)]
                wait_s = self._end_strangers()
                for key, _ in self._selector.select(0 if busy else wait_s):
                    source = key.fileobj
                    if source is self._woken:
                        self._receive_arrivals()
                    elif source is self._listener:
                        self._accept_remote()
                    elif isinstance(source, socket.socket) and source in self._targets:
                        self._accept_local(source)
                    elif isinstance(key.data, _Pipe):
                        busy.append(key.data)
                for pipe in busy:
                    self._move(pipe)
        finally:
            self._close_all()

    def _accept_remote(self) -> None:
        with suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._end_strangers()
            if len(self._strangers) >= _MAX_UNAUTHENTICATED:
                self._end(next(iter(self._strangers)))
            pipe = _Pipe(SecureLink(sock, self._secret, is_server=True))
            self._pipes.add(pipe)
            self._strangers[pipe] = time.monotonic() + HANDSHAKE_S
            self._selector.register(pipe.link, selectors.EVENT_READ, pipe)

    def _end_strangers(self) -> float | None:
        """End connections that did not prove the secret in time; returns the time until the next one is due."""
        now = time.monotonic()
        for pipe, deadline in list(self._strangers.items()):
            if pipe.link.is_authenticated:
                del self._strangers[pipe]
            elif now >= deadline:
                self._end(pipe)
        return max(0.0, min(self._strangers.values()) - now) if self._strangers else None

    def _accept_local(self, listener: socket.socket) -> None:
        with suppress(OSError):
            plain, _ = listener.accept()
            if not is_own_connection(plain):
                plain.close()
                return
            peer, port = self._targets[listener]
            # The handshake waits for the other machine: not in this thread.
            threading.Thread(
                target=self._connect, args=(plain, peer, port), name="gloo tunnel", daemon=True
            ).start()

    def _connect(self, plain: socket.socket, peer: int, port: int) -> None:
        try:
            link = connect_link(self.peers[peer], self._secret, timeout_s=HANDSHAKE_S)
            send_frame(link, {"port": port})
        except OSError:
            plain.close()  # gloo sees a closed connection
            return
        self._arrivals.append(_Pipe(link, plain))
        with suppress(OSError):
            self._wake.send(b"!")

    def _receive_arrivals(self) -> None:
        with suppress(BlockingIOError):
            if not self._woken.recv(4096):
                self._is_closed = True  # the world was disconnected: all its sockets are shut
        while self._arrivals:
            pipe = self._arrivals.popleft()
            pipe.link.setblocking(False)
            self._pipes.add(pipe)
            self._selector.register(pipe.link, selectors.EVENT_READ, pipe)
            self._attach(pipe)

    def _attach(self, pipe: _Pipe) -> None:
        assert pipe.plain is not None
        pipe.plain.setblocking(False)
        pipe.plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(pipe.plain, selectors.EVENT_READ, pipe)

    def _move(self, pipe: _Pipe) -> None:
        if pipe.is_over:
            return
        try:
            if pipe.plain is None and not self._find_target(pipe):
                return
            _pump(pipe)
        except Exception:  # noqa: BLE001 (one connection must not end the others)
            self._end(pipe)
            return
        self._watch(pipe)

    def _find_target(self, pipe: _Pipe) -> bool:
        """Whether a remote worker has said which port it wants; only ports of our own gloo can be reached."""
        try:
            port = receive_frame(pipe.link, pipe.reader).control.get("port")
        except BlockingIOError:
            self._watch(pipe)
            return False
        if port not in self._own_ports.values():
            raise ConnectionError
        pipe.plain = socket.create_connection((LOOPBACK, port), timeout=HANDSHAKE_S)
        self._attach(pipe)
        return True

    def _watch(self, pipe: _Pipe) -> None:
        link_writes = bool(pipe.to_link) or pipe.link.wants_write
        link_reads = _size(pipe.to_plain) < _BUFFER_BYTES
        self._modify(pipe.link, pipe, reads=link_reads, writes=link_writes)
        if pipe.plain is not None:
            plain_reads = _size(pipe.to_link) < _BUFFER_BYTES
            self._modify(pipe.plain, pipe, reads=plain_reads, writes=bool(pipe.to_plain))

    def _modify(
        self, source: socket.socket | SecureLink, pipe: _Pipe, *, reads: bool, writes: bool
    ) -> None:
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)
        is_watched = source in self._selector.get_map()
        if events and is_watched:
            self._selector.modify(source, events, pipe)
        elif events:
            self._selector.register(source, events, pipe)
        elif is_watched:
            self._selector.unregister(source)

    def _end(self, pipe: _Pipe) -> None:
        if pipe.is_over:
            return
        pipe.is_over = True
        self._pipes.discard(pipe)
        self._strangers.pop(pipe, None)
        for source in (pipe.link, pipe.plain):
            if source is not None:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(source)
                source.close()

    def _close_all(self) -> None:
        for pipe in [*self._pipes, *self._arrivals]:
            self._end(pipe)
        with self._lock:
            listeners = [*self._local.values(), self._listener]
        for sock in (*listeners, self._wake, self._woken):
            sock.close()
        self._selector.close()


def _pump(pipe: _Pipe) -> None:
    """Move what can be moved without waiting, in both directions; raises once an end has closed."""
    assert pipe.plain is not None
    is_moving = True
    while is_moving:
        is_moving = False
        with suppress(BlockingIOError):
            if _size(pipe.to_link) < _BUFFER_BYTES:
                data = pipe.plain.recv(_CHUNK_BYTES)
                if not data:
                    raise EOFError
                pipe.to_link.append(memoryview(data))
                is_moving = True
        with suppress(BlockingIOError):
            while pipe.to_link:
                drop_sent(pipe.to_link, pipe.link.send(pipe.to_link[0]))
        with suppress(BlockingIOError):
            if _size(pipe.to_plain) < _BUFFER_BYTES:
                buffer = memoryview(bytearray(_CHUNK_BYTES))
                count = pipe.link.recv_into(buffer)
                if not count:
                    raise EOFError
                pipe.to_plain.append(buffer[:count])
                is_moving = True
        with suppress(BlockingIOError):
            while pipe.to_plain:
                drop_sent(pipe.to_plain, pipe.plain.send(pipe.to_plain[0]))


def _is_pending(pipe: _Pipe) -> bool:
    if pipe.is_over or _size(pipe.to_plain) >= _BUFFER_BYTES:
        return False
    try:
        return pipe.link.pending
    except OSError:
        return True  # moving it raises the error


def _size(pieces: deque[memoryview]) -> int:
    return sum(map(len, pieces))


def _bind_ordered(own_port: int, *, is_less: bool) -> socket.socket:
    """Listen on a local port that gloo finds less, or greater, than its own.

    Of two workers gloo lets that one connect whose address is greater; here both have the same
    address, and it compares the ports as numbers in network byte order. Exactly one of the two must
    find the other's less.
    """

    def is_ordered(port: int) -> bool:
        return (socket.htons(port) < socket.htons(own_port)) == is_less

    rejected: list[socket.socket] = []
    try:
        for _ in range(_MAX_BINDS):
            listener = socket.create_server((LOOPBACK, 0), backlog=64)
            if is_ordered(listener.getsockname()[1]):
                return listener
            rejected.append(listener)
    finally:
        for listener in rejected:
            listener.close()
    # Next to a port such as 0xb4ff few are left: the system would hardly ever choose one of them.
    for port in filter(is_ordered, range(_LAST_PORT, _FIRST_PORT - 1, -1)):
        with suppress(OSError):
            return socket.create_server((LOOPBACK, port), backlog=64)
    raise OSError(f"no free local port on the {'lower' if is_less else 'upper'} side of {own_port}")


def _group_of(key: str) -> str:
    """Part of a gloo key that all workers of one group share: the rest is a rank."""
    return key.rpartition("/")[0]


def _address_at(value: bytes) -> int | None:
    """Offset of the socket address in what gloo stores: host name, address, numbers of pairs."""
    if len(value) < _LENGTH.size:
        return None
    (name_length,) = _LENGTH.unpack_from(value)
    at = _LENGTH.size + name_length
    if name_length > len(value) or len(value) < at + _LENGTH.size:
        return None
    (address_length,) = _LENGTH.unpack_from(value, at)
    at += _LENGTH.size
    if address_length < _SOCKADDR.size or len(value) < at + address_length:
        return None
    return at


def _read_port(value: bytes) -> int | None:
    """Port of a gloo address on the loopback interface; None for any other value."""
    at = _address_at(value)
    if at is None:
        return None
    family, port, address = _SOCKADDR.unpack_from(value, at)
    if family != socket.AF_INET or address != socket.inet_aton(LOOPBACK):
        return None
    return int.from_bytes(port, "big")


def _replace_port(value: bytes, port: int) -> bytes:
    at = _address_at(value)
    assert at is not None
    changed = bytearray(value)
    changed[at + 2 : at + 4] = port.to_bytes(2, "big")
    return bytes(changed)
