"""Secure connections: both ends prove a shared secret, then nobody can alter what they send.

The secret is never sent. On one machine each record carries a MAC (AES-GMAC, keys from both nonces);
between machines the connection is TLS 1.3: both ends derive the same certificate authority from the
secret and issue themselves a short-lived certificate.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import ssl
import struct
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, Self

from yunlu.core.errors import YunluError
from yunlu.core.settings import bind_setting

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, MutableSequence, Sequence

LOOPBACK = "127.0.0.1"


def bind_address() -> str:
    """Where supervisors and servers listen: ``YUNLU_BIND``, else this machine alone."""
    address = bind_setting()
    if address is None:
        return LOOPBACK
    if address == "auto":
        return routed_address()
    if address in {"*", "0.0.0.0", "::", "[::]"}:  # noqa: S104 (refused)
        raise YunluError(
            f"YUNLU_BIND is {address}: a run listens on one address, not on every network of its machine.",
            hint="Set it to the address of the interface that the other machines use, or to auto for "
            "that of the default route.",
        )
    return address


def routed_address() -> str:
    """Address of this machine on its default route; no packet is sent to find it."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    return LOOPBACK  # no route: only this machine can connect


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine only."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


UNAUTHENTICATED_BYTES = 4096
"""Limit of what a peer may send before it has proved the secret."""
HANDSHAKE_S = 10.0
_CALL, _ANSWER = b"YUNLUc1\n", b"YUNLUs1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_TAG_BYTES = 16
_RECORD = struct.Struct("<I")
_RECORD_BYTES = 1 << 18
_MAC_BUFFER_BYTES = 2 * _RECORD_BYTES
_JOIN_BYTES = 1 << 16
"""Shorter pieces are copied into one record; longer ones are sent from where they are."""
_READ_BYTES = 1 << 18
_TLS_HANDSHAKE = b"\x16"
_TLS_HEAD = struct.Struct("!3xH")
"""Before each record: type and version, and the length of what follows."""
_TLS_RECORD_BYTES = 1 << 14
_MAX_TLS_RECORD_BYTES = _TLS_RECORD_BYTES + 256 + _TLS_HEAD.size
_CLOSED_EARLY = "the peer closed the connection before it proved the secret"
_CERTIFICATE_H = 24
_RENEW_S = 3600.0
"""Age at which a process issues itself another certificate for new connections."""


class LinkRefusedError(ConnectionError):
    """The peer did not prove the secret, or a record was altered on its way."""


def derive_secret(secret: bytes, *purpose: object) -> bytes:
    """A secret for one purpose: who learns it cannot compute any other."""
    return hmac.digest(secret, "\0".join(map(str, purpose)).encode(), "sha256")


class SecureLink:
    """One end of a connection; it stands in for its socket.

    Works on blocking sockets (with or without timeout) and on non-blocking ones. There, every call may
    raise ``BlockingIOError``; ``send`` and ``sendmsg`` must then be repeated with the same data, and
    received data may be ``pending`` although the socket is not readable.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, is_server: bool) -> None:
        self._sock = sock
        self._secret = secret
        self._session: _Session | None = None
        if not is_server:
            kind = _MacSession if is_same_machine(sock) else _TlsSession
            self._session = kind(secret, is_server=False)
        self._unsent: list[memoryview] = []
        self._unsent_size = 0
        self._received_bytes = 0
        self._is_begun = False
        self._prove_until = time.monotonic() + HANDSHAKE_S if is_server else None

    @property
    def is_authenticated(self) -> bool:
        """Whether the peer has proved the secret."""
        return self._session is not None and self._session.is_authenticated

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection is encrypted: it leaves the machine."""
        return isinstance(self._session, _TlsSession)

    @property
    def pending(self) -> bool:
        """Whether received data can be read without waiting for the socket."""
        return self._session is not None and self._session.pending

    @property
    def wants_write(self) -> bool:
        """Whether a handshake or a record waits for the socket to become writable."""
        return bool(self._unsent)

    def handshake(self) -> None:
        """Prove the secret to each other."""
        if not self._is_begun and self._session is not None:
            self._is_begun = True
            self._queue(self._session.start())
        self._flush()
        while not self.is_authenticated:
            if self._received_bytes >= UNAUTHENTICATED_BYTES:
                raise LinkRefusedError(
                    f"the peer sent {UNAUTHENTICATED_BYTES} bytes without a proof"
                )
            with self._time_limit():
                session = self._session or self._choose_session()
                self._session = session
                count = self._sock.recv_into(
                    session.receive_buffer()[: UNAUTHENTICATED_BYTES - self._received_bytes]
                )
            if not count:
                raise LinkRefusedError(_CLOSED_EARLY)
            self._received_bytes += count
            try:
                self._queue(session.feed(count))
            except LinkRefusedError:
                with suppress(OSError):  # TLS tells an honest peer why; it may be gone
                    self._sock.send(session.alert())
                raise
            self._flush()
        self._flush()

    def send(self, data: memoryview | bytes | bytearray) -> int:
        """Send data; returns how much of it was sent."""
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Send pieces of memory one after another; returns how many bytes were sent."""
        session = self._authenticated_session()
        rest, total = list(views), 0
        while rest or self._unsent_size:  # as much as the socket takes, as a plain one
            if not self._unsent_size:
                self._unsent_size, sealed = session.seal(rest)
                self._unsent += sealed
            try:
                self._flush()
            except BlockingIOError:
                if total:
                    return total  # the rest is sealed, and counts once it is sent
                raise
            sent, self._unsent_size = self._unsent_size, 0
            total += sent
            drop_sent(rest, sent)
        return total

    def sendall(self, data: memoryview | bytes | bytearray) -> None:
        """Send all data; on a blocking socket."""
        rest = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        while len(rest):
            rest = rest[self.send(rest) :]

    def recv(self, limit: int) -> bytes:
        """Receive at most ``limit`` bytes; empty once the peer has closed."""
        into = memoryview(bytearray(min(limit, _JOIN_BYTES)))
        return bytes(into[: self.recv_into(into)])

    def recv_into(self, into: memoryview) -> int:
        """Receive into memory; returns how much, 0 once the peer has closed."""
        session = self._authenticated_session()
        while not (count := session.read(into)):
            if session.is_closed:
                return 0
            arrived = self._sock.recv_into(session.receive_buffer())
            if not arrived:
                return 0
            self._queue(session.feed(arrived))
        return count

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int]:
        """Receive into several pieces of memory, as ``socket.recvmsg_into``."""
        session = self._authenticated_session()
        total = 0
        for buffer in buffers:
            count = session.read(buffer) if total else self.recv_into(buffer)
            total += count
            if count < len(buffer):
                break
        return (total,)

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._sock.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """Timeout of each wait for the socket."""
        self._sock.settimeout(timeout_s)

    def setblocking(self, is_blocking: bool) -> None:
        """Whether calls wait."""
        self._sock.setblocking(is_blocking)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """An option of the socket."""
        return self._sock.getsockopt(level, option, size)

    def getsockname(self) -> tuple[str, int]:
        """Own address."""
        return self._sock.getsockname()[:2]

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the socket: waits in other threads end at once."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _authenticated_session(self) -> _Session:
        if not self.is_authenticated:
            self.handshake()
        assert self._session is not None
        return self._session

    @contextmanager
    def _time_limit(self) -> Generator[None]:
        """Let a client prove the secret within a time in all, however slowly it sends."""
        if self._prove_until is None:
            yield
            return
        left_s = self._prove_until - time.monotonic()
        if left_s <= 0:
            raise LinkRefusedError("the peer did not prove the secret in time")
        timeout_s = self._sock.gettimeout()
        if timeout_s == 0:  # non-blocking: who waits for the socket counts the time
            yield
            return
        self._sock.settimeout(left_s if timeout_s is None else min(timeout_s, left_s))
        try:
            yield
        finally:
            self._sock.settimeout(timeout_s)

    def _choose_session(self) -> _Session:
        first = self._sock.recv(1, socket.MSG_PEEK)
        if not first:
            raise LinkRefusedError(_CLOSED_EARLY)
        if first == _TLS_HANDSHAKE:
            return _TlsSession(self._secret, is_server=True)
        if not is_same_machine(self._sock):
            raise LinkRefusedError("a connection from another machine must use TLS")
        return _MacSession(self._secret, is_server=True)

    def _queue(self, data: bytes) -> None:
        if data:
            self._unsent.append(memoryview(data))

    def _flush(self) -> None:
        while self._unsent:
            drop_sent(self._unsent, self._sock.sendmsg(self._unsent[:64]))


def connect_link(
    address: tuple[str, int], secret: bytes, *, timeout_s: float | None = None
) -> SecureLink:
    """Connect and prove the secret; the link keeps the timeout."""
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = SecureLink(sock, secret, is_server=False)
        link.handshake()
    except BaseException:
        sock.close()
        raise
    return link


def load_tls() -> None:
    """Import what connections between machines need: before a fork, once for all that are forked."""
    _issue_certificate(b"")


def drop_sent(pieces: MutableSequence[memoryview], count: int) -> None:
    """Drop the first bytes of what is to be sent or written."""
    while pieces and count >= len(pieces[0]):
        count -= len(pieces[0])
        del pieces[0]
    if count:
        pieces[0] = pieces[0][count:]


def is_same_machine(sock: socket.socket) -> bool:
    """Whether the peer is on this machine: packets from elsewhere never carry our own address."""
    if sock.family == socket.AF_UNIX:
        return True
    own, peer = sock.getsockname()[0], sock.getpeername()[0]
    if own == peer:
        return True
    return is_loopback(own) and is_loopback(peer)


def _first_record(views: Sequence[memoryview]) -> memoryview:
    """What one record takes of these pieces."""
    head = views[0]
    if len(head) >= _JOIN_BYTES or len(views) == 1:
        return head[:_RECORD_BYTES]
    joined = bytearray()
    for view in views:
        joined += view[: _JOIN_BYTES - len(joined)]
        if len(joined) == _JOIN_BYTES:
            break
    return memoryview(joined)


def _join_short(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """These pieces, those of less than a TLS record together: each record costs as much as 10 KB."""
    joined = bytearray()
    for view in views:
        if joined and len(joined) + len(view) > _TLS_RECORD_BYTES:
            yield memoryview(joined)
            joined = bytearray()
        if len(view) >= _TLS_RECORD_BYTES:
            yield view[:_RECORD_BYTES]
            if len(view) > _RECORD_BYTES:
                return
        else:
            joined += view
    if joined:
        yield memoryview(joined)


class _Session(Protocol):
    """Handshake and records of one end, without any input or output."""

    is_authenticated: bool
    is_closed: bool

    @property
    def pending(self) -> bool:
        """Whether verified data can be read."""
        ...

    def start(self) -> bytes:
        """What to send first."""
        ...

    def receive_buffer(self) -> memoryview:
        """Where to put received bytes."""
        ...

    def feed(self, count: int) -> bytes:
        """Take so many bytes that were put there; returns what to answer."""
        ...

    def alert(self) -> bytes:
        """What to send before closing a refused connection."""
        ...

    def seal(self, views: Sequence[memoryview]) -> tuple[int, list[memoryview]]:
        """Protect the first of these bytes; returns how many, and what to send."""
        ...

    def read(self, into: memoryview) -> int:
        """Read what has arrived of verified data; 0 while there are none."""
        ...


class _MacSession:
    """Challenge and response, then records with a MAC, for connections within a machine."""

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        self.is_authenticated = self.is_closed = False
        self._secret, self._is_server = secret, is_server
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._transcript = b""
        self._raw = memoryview(bytearray(UNAUTHENTICATED_BYTES))
        self._begin = self._end = 0
        self._unread = memoryview(b"")

    @property
    def pending(self) -> bool:
        return bool(len(self._unread)) or (self.is_authenticated and self._open_record())

    def start(self) -> bytes:
        return b"" if self._is_server else _CALL + self._nonce

    def receive_buffer(self) -> memoryview:
        if self._begin:
            rest = bytes(self._raw[self._begin : self._end])
            self._raw[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        if self.is_authenticated and len(self._raw) < _MAC_BUFFER_BYTES:
            larger = memoryview(bytearray(_MAC_BUFFER_BYTES))
            larger[: self._end] = self._raw[: self._end]
            self._raw = larger
        return self._raw[self._end :]

    def feed(self, count: int) -> bytes:
        self._end += count
        if self.is_authenticated:
            return b""
        return self._answer_call() if self._is_server else self._answer_challenge()

    def alert(self) -> bytes:
        return b""

    def seal(self, views: Sequence[memoryview]) -> tuple[int, list[memoryview]]:
        record = _first_record(views)
        if not len(record):
            return 0, []
        self._sent += 1
        tag = self._sealer.encrypt(self._sent.to_bytes(12, "little"), b"", record)
        return len(record), [memoryview(_RECORD.pack(len(record)) + tag), record]

    def read(self, into: memoryview) -> int:
        total = 0
        while total < len(into) and self.pending:
            count = min(len(into) - total, len(self._unread))
            into[total : total + count] = self._unread[:count]
            self._unread = self._unread[count:]
            total += count
        return total

    def _answer_call(self) -> bytes:
        if not self._transcript:
            received = bytes(self._raw[self._begin : self._end])
            if not _CALL.startswith(received[: len(_CALL)]):
                raise LinkRefusedError("the peer does not speak Yunlu's protocol")
            size = len(_CALL) + _NONCE_BYTES
            if len(received) < size:
                return b""
            self._transcript = received[len(_CALL) : size] + self._nonce
            self._begin += size
            return _ANSWER + self._nonce + self._prove("server")
        self._check_proof("client")
        return b""

    def _answer_challenge(self) -> bytes:
        received = bytes(self._raw[self._begin : self._end])
        if not _ANSWER.startswith(received[: len(_ANSWER)]):
            raise LinkRefusedError("the peer does not speak Yunlu's protocol")
        size = len(_ANSWER) + _NONCE_BYTES
        if len(received) < size + _PROOF_BYTES:
            return b""
        self._transcript = self._nonce + received[len(_ANSWER) : size]
        self._begin += size
        self._check_proof("server")
        return self._prove("client")

    def _prove(self, role: str) -> bytes:
        return hmac.digest(self._secret, role.encode() + b"\0" + self._transcript, "sha256")

    def _check_proof(self, role: str) -> None:
        if self._end - self._begin < _PROOF_BYTES:
            return
        proof = bytes(self._raw[self._begin : self._begin + _PROOF_BYTES])
        self._begin += _PROOF_BYTES
        if not hmac.compare_digest(proof, self._prove(role)):
            raise LinkRefusedError("the peer does not know the secret")
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - takes 0.1 s

        keys = {role: AESGCM(self._prove(f"key of {role}")) for role in ("client", "server")}
        own, other = ("server", "client") if self._is_server else ("client", "server")
        self._sealer, self._opener = keys[own], keys[other]
        self._sent = self._opened = 0
        self.is_authenticated = True

    def _open_record(self) -> bool:
        """Verify the next record in place; false while it is incomplete."""
        begin = self._begin + _RECORD.size + _TAG_BYTES
        if self._end < begin:
            return False
        (length,) = _RECORD.unpack_from(self._raw, self._begin)
        if not 0 < length <= _RECORD_BYTES:
            raise LinkRefusedError("a record was altered on its way")
        if self._end < begin + length:
            return False
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - as above

        self._opened += 1
        data = self._raw[begin : begin + length]
        try:
            tag = self._raw[begin - _TAG_BYTES : begin]
            self._opener.decrypt(self._opened.to_bytes(12, "little"), tag, data)
        except InvalidTag as error:
            raise LinkRefusedError("a record was altered on its way") from error
        self._begin = begin + length
        self._unread = data
        return True


class _TlsSession:
    """TLS 1.3 in memory, for connections between machines."""

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        self.is_authenticated = self.is_closed = False
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _contexts(secret).get(is_server=is_server)
        self._tls = context.wrap_bio(self._in, self._out, server_side=is_server)
        self._raw = memoryview(bytearray(UNAUTHENTICATED_BYTES))
        self._end = 0

    @property
    def pending(self) -> bool:
        return self.is_authenticated and bool(self._in.pending or self._tls.pending())

    def start(self) -> bytes:
        return self.feed(0)

    def receive_buffer(self) -> memoryview:
        return self._raw[self._end :]

    def feed(self, count: int) -> bytes:
        self._end += count
        if self.is_authenticated:
            self._take_records()
            return b""
        self._in.write(self._raw[: self._end])
        self._end = 0
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise LinkRefusedError(_explain(error)) from error
        else:
            self.is_authenticated = True
            self._keep_rest(self._in.read())
        return self._out.read()

    def alert(self) -> bytes:
        return self._out.read()

    def seal(self, views: Sequence[memoryview]) -> tuple[int, list[memoryview]]:
        size = 0
        for piece in _join_short(views):
            size += self._tls.write(piece)
            if size >= _RECORD_BYTES:
                break
        return size, [memoryview(self._out.read())] if size else []

    def read(self, into: memoryview) -> int:
        total, size = 0, len(into)
        tls, arrived = self._tls, self._in  # looked up for each record of 16 KiB otherwise
        try:
            while total < size and (arrived.pending or tls.pending()):
                count: int = tls.read(size - total, into[total:])  # pyright: ignore[reportAssignmentType] - a count, with memory to fill
                total += count
                if not count:
                    self.is_closed = True
                    break
        except ssl.SSLWantReadError:  # a record without data
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self.is_closed = True
        except ssl.SSLError as error:
            raise LinkRefusedError(_explain(error)) from error
        return total

    def _keep_rest(self, received: bytes) -> None:
        """Take what came with the end of the handshake, into the larger buffer of what follows."""
        self._raw = memoryview(bytearray(_READ_BYTES))
        self._raw[: len(received)] = received
        self._end = len(received)
        self._take_records()

    def _take_records(self) -> None:
        """Pass whole records on: to ask for one that is incomplete costs as much as to decrypt one."""
        whole = 0
        while self._end - whole >= _TLS_HEAD.size:
            length = _TLS_HEAD.size + _TLS_HEAD.unpack_from(self._raw, whole)[0]
            if length > _MAX_TLS_RECORD_BYTES:
                whole = self._end  # altered: decryption refuses it
                break
            if whole + length > self._end:
                break
            whole += length
        self._in.write(self._raw[:whole])
        rest = bytes(self._raw[whole : self._end])
        self._raw[: len(rest)] = rest
        self._end = len(rest)


def _explain(error: ssl.SSLError) -> str:
    reason = (error.reason or "").replace("_", " ").lower()
    if "certificate" in reason or "alert" in reason or "unknown ca" in reason:
        return f"the peer does not know the secret ({reason})"
    return f"a record was altered on its way, or is none of TLS 1.3 ({reason})"


class _Contexts:
    """TLS contexts of this process for one secret, with a certificate that is renewed in time."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._made_at = -_RENEW_S
        self._pid = 0
        self._identity = "", b""
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def get(self, *, is_server: bool) -> ssl.SSLContext:
        with self._lock:
            now = time.monotonic()
            if now - self._made_at >= _RENEW_S or self._pid != os.getpid():
                self._identity = _issue_certificate(self._secret)
                self._contexts = {}
                self._made_at, self._pid = now, os.getpid()
            if is_server not in self._contexts:  # each takes more than a millisecond
                authority, certificate = self._identity
                self._contexts[is_server] = _make_context(
                    authority, certificate, is_server=is_server
                )
            return self._contexts[is_server]


@lru_cache(maxsize=64)
def _contexts(secret: bytes) -> _Contexts:
    return _Contexts(secret)


def _make_context(authority: str, certificate: bytes, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # identity is the possession of the secret, not a name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    if is_server:
        context.num_tickets = 0  # every connection proves the secret anew
    with tempfile.NamedTemporaryFile(prefix="yunlu-") as file:  # 0600, and gone at once
        file.write(certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _issue_certificate(secret: bytes) -> tuple[str, bytes]:
    """The authority that the secret defines, and a certificate of our own with its key."""
    from cryptography import x509  # noqa: PLC0415 - needed between machines only
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
        Ed25519PrivateKey,
    )
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
        Encoding,
        NoEncryption,
        PrivateFormat,
    )
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    authority_key = Ed25519PrivateKey.from_private_bytes(derive_secret(secret, "authority"))
    key = Ed25519PrivateKey.generate()
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Yunlu run")])
    identity = f"{socket.gethostname()[:40]}-{os.getpid()}"
    own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity)])

    def issue(subject: x509.Name, subject_key: Ed25519PrivateKey, *, is_authority: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(name)
            .public_key(subject_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=_CERTIFICATE_H))  # clocks differ
            .not_valid_after(now + timedelta(hours=_CERTIFICATE_H))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(subject_key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
                critical=False,
            )
        )
        return builder.sign(authority_key, None).public_bytes(Encoding.PEM)

    authority = issue(name, authority_key, is_authority=True).decode()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return authority, issue(own_name, key, is_authority=False) + private
