"""Connections under TLS: what arrives, who is let in, and what each side learns of a refusal. On 127.0.0.1 only."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from heinfer.errors import InputError, RemoteProtocolError
from heinfer.wire import (
    Address,
    BlockShape,
    Connection,
    Description,
    HandshakeError,
    Hello,
    Limits,
    PlainText,
    QueryClient,
    QueryFailedError,
    QueryFailureCode,
    QueryHeader,
    Ready,
    ResultHeader,
    TensorSpec,
    Tls,
    TokenFile,
    TransportError,
    codec,
    connect,
    describe_tensors,
    iterate_tensor_chunks,
    make_token,
    query_framing,
    read_token,
    serve_queries,
    serve_sessions,
    session_framing,
    token_line,
)
from heinfer.wire import authority as authorities
from heinfer.wire.authority import Authority, Use, open_authority, write_identity
from heinfer.wire.encryption import EncryptedStream
from heinfer.wire.query_service import check_serving
from heinfer.wire.security import check_connecting, check_listening
from tests.captured_traffic import Proxy
from tests.identities import Identities, earlier
from tests.waiting import soon
from trusted_node.link import ServerLink

LOOPBACK = Address("127.0.0.1", 0)
LIMITS = Limits(chunk_bytes=300_000, reply_s=10.0)
IMPATIENT = replace(LIMITS, reply_s=0.5)
FRAMING = session_framing(LIMITS)
PLAN = b"p" * 32
SOON_S = 5.0
REFUSED = "the peer closed the connection before it said anything"


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    return Identities(tmp_path_factory.mktemp("identities"))


def greet_back(events):
    for event in events:
        if isinstance(event, Hello):
            yield Ready()


@pytest.fixture
def start():
    """Start a server of sessions; it greets back and says nothing else."""
    servers = []

    def start_server(security, limits=LIMITS, handler=greet_back, workers=8):
        servers.append(serve_sessions(LOOPBACK, handler, limits, workers, security))
        return servers[-1]

    yield start_server
    for server in servers:
        server.stop(0)
    assert not [t for t in threading.enumerate() if t.name in ("heinfer-session", "heinfer-accept")]


def greet(server, security, limits=LIMITS, host="127.0.0.1"):
    """Connect as a node does, and hear the server's first word."""
    link = ServerLink(Address(host, server.address.port), PLAN, (BlockShape(1, 1, 64),), limits, security)
    try:
        with link.session():
            return "greeted"
    finally:
        link.close()


@contextlib.contextmanager
def connected(identities, limits=LIMITS, through=None):
    """Yield both ends of a connection under TLS, the node's first."""
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            sock, _ = listener.accept()
            far = Connection(sock, limits, FRAMING)
            far.encrypt(identities.load("server"))
            far.expect_magic()
            accepted.append(far)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        address = Address(*listener.getsockname())
        near = connect(through(address) if through else address, limits, FRAMING, identities.load("node to server"))
        thread.join(SOON_S)
    (far,) = accepted
    yield near, far
    near.close()
    far.close()


# What arrives


@pytest.mark.parametrize("size", [0, 1, 16_300, 16_384, 16_385, 65_536, 299_999, 300_000])
def test_messages_of_all_sizes_arrive_whole_both_ways(identities, size):
    data, envelope = os.urandom(size), os.urandom(100)
    with connected(identities) as (near, far):
        for one, other in ((near, far), (far, near)):
            for _ in range(3):
                sending = threading.Thread(target=one.send, args=(envelope, memoryview(data)))
                sending.start()
                assert other.receive() == (envelope, data)
                sending.join()
        near.end_output()
        assert far.receive() is None


def test_what_travels_is_not_readable(identities):
    proxies = []

    def through(address):
        proxies.append(Proxy(address))
        return proxies[0].address

    with connected(identities, through=through) as (near, far):
        near.send(b"envelope of a node", b"payload of a node" * 100)
        far.receive()
        far.send(b"envelope of a server", b"payload of a server" * 100)
        near.receive()
    with proxies[0] as proxy:
        (connection,) = proxy.connections
        assert len(connection.up) > 1700
        assert len(connection.down) > 1900
        for seen in (bytes(connection.up), bytes(connection.down)):
            assert not any(word in seen for word in (b"heinfer", b"envelope", b"payload", b"of a"))


def test_news_are_messages_and_ends_but_nothing_of_tls_itself(identities):
    with connected(identities) as (near, far):
        assert not near.has_news
        assert not far.has_news
        for _ in range(2):
            far.send(b"a", b"b" * 100_000)
            far.send(b"second", b"")
            assert near.await_news(SOON_S)
            assert near.has_news
            assert near.receive() == (b"a", b"b" * 100_000)
            assert near.await_news(SOON_S)  # perhaps decrypted already, and nothing left in the socket
            assert near.receive() == (b"second", b"")
            assert not near.has_news
        started = time.monotonic()
        assert not near.await_news(0.2)
        assert 0.15 < time.monotonic() - started < 2
        far.close()
        assert near.await_news(SOON_S)
        assert near.receive() is None


@pytest.mark.parametrize("wait", [lambda c: c.receive(), lambda c: c.receive(idle=True), lambda c: c.await_news(10)])
def test_close_from_another_thread_wakes_a_wait(identities, wait):
    with connected(identities) as (near, far):
        threading.Timer(0.2, near.close).start()
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match="was closed"):
            wait(near)
        assert time.monotonic() - started < 2
        assert near.has_news
        assert far.receive() is None
        with pytest.raises(RemoteProtocolError, match="was closed"):
            near.send(b"", b"")


def test_close_wakes_a_peer_that_does_not_take_what_is_sent(identities):
    with connected(identities) as (near, _):
        threading.Timer(0.3, near.close).start()

        def fill():
            for _ in range(1000):
                near.send(b"", bytes(300_000))

        with pytest.raises(RemoteProtocolError, match="was closed"):
            fill()


@pytest.mark.parametrize("half", ["end_input", "end_output"])
def test_half_a_connection_can_be_closed(identities, half):
    with connected(identities) as (near, far):
        far.send(b"before", b"")
        time.sleep(0.05)
        getattr(near, half)()
        assert near.receive() == (b"before", b"")
        if half == "end_input":
            assert near.receive() is None
            near.send(b"still", b"")
            assert far.receive() == (b"still", b"")
        else:
            assert far.receive() is None
            far.send(b"still", b"x" * 100_000)
            assert near.receive() == (b"still", b"x" * 100_000)


def test_last_message_reaches_a_peer_that_is_still_sending(identities):
    with connected(identities) as (near, far):

        def end():
            far.receive()
            far.send(b"last", b"")
            far.finish()

        thread = threading.Thread(target=end)
        thread.start()
        for _ in range(1000):
            near.send(b"", bytes(100_000))
            if near.has_news:
                break
        assert near.receive() == (b"last", b"")
        assert near.receive() is None
        near.close()
        thread.join(SOON_S)
        assert far.closed


def test_time_holds_for_a_peer_that_stops_in_the_middle_of_a_message(identities):
    with connected(identities, IMPATIENT) as (near, far):
        far._use(far._write, b"\x05\0\0\0\0\0\0\0", b"ab")
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match="no progress"):
            near.receive(idle=True)
        assert time.monotonic() - started < 2


class Digesting:
    """An engine to which all that comes is TLS's own business: tickets, keys, a record that never ends."""

    def __init__(self, incoming, _):
        self.incoming = incoming

    def read(self, _):
        self.incoming.read()
        raise ssl.SSLWantReadError


@pytest.mark.parametrize("milliseconds", [0, 200])
def test_wait_for_news_ends_though_bytes_that_are_none_come_all_the_time(milliseconds):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    over = threading.Event()

    def flood():
        with contextlib.suppress(OSError):
            while not over.is_set():
                far.send(bytes(1 << 16))

    with near, far:
        rescue = threading.Timer(2, near.shutdown, [socket.SHUT_RDWR])  # or a failure would last for ever
        rescue.start()
        flooding = threading.Thread(target=flood)
        flooding.start()
        started = time.monotonic()
        found = EncryptedStream(near, Digesting, 10).poll(milliseconds)
        assert time.monotonic() - started < 1
        assert not found
        rescue.cancel()
        rescue.join()
        over.set()
        near.shutdown(socket.SHUT_RDWR)
        flooding.join(SOON_S)


class Meddler(Proxy):
    """Changes one bit of what the target says, once told to."""

    def __init__(self, target):
        self.meddling = threading.Event()
        super().__init__(target)

    def _copy(self, source, sink, kept):
        down = any(kept is connection.down for connection in self.connections)
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if down and self.meddling.is_set():
                    data[len(data) // 2] ^= 1
                sink.sendall(data)


def test_altered_bytes_are_an_error_and_never_a_message(identities):
    proxies = []

    def through(address):
        proxies.append(Meddler(address))
        return proxies[0].address

    with connected(identities, through=through) as (near, far):
        far.send(b"good", b"")
        assert near.receive() == (b"good", b"")
        proxies[0].meddling.set()
        far.send(b"bad", b"x" * 1000)
        assert near.await_news(SOON_S)
        for _ in range(2):
            with pytest.raises(RemoteProtocolError, match="tampered with"):
                near.receive()
    with proxies[0]:
        pass


# Who is let in


def test_node_and_server_of_one_authority_greet_each_other(identities, start, caplog):
    server = start(identities.load("server"))
    with caplog.at_level(logging.DEBUG):
        assert greet(server, identities.load("node to server")) == "greeted"
        assert greet(server, identities.load("node to server"), host="localhost") == "greeted"
    assert not caplog.records


#: Who comes to a server's port, as whom it takes the server, and what the server's log says.
UNWELCOME = {
    "foreign client": "is not signed by our CA",
    "client": "is not signed by our CA",  # of a node: no node towards the server
    "node to clients": "is not signed by our CA",
    "expired node": "has expired",
}


@pytest.mark.parametrize("who", UNWELCOME)
def test_server_refuses_a_node_with_a_reason_for_its_log_only(identities, start, caplog, who):
    server = start(identities.load("server"))
    unwelcome = identities.load(who, believes="node to server")
    unwelcome = replace(unwelcome, uses=frozenset())  # or it would refuse itself
    with pytest.raises(RemoteProtocolError, match=REFUSED) as caught:
        greet(server, unwelcome)
    assert not isinstance(caught.value, HandshakeError)  # its own part went well: it can't tell one reason from another
    assert soon(lambda: "refused" in caplog.text)
    assert f"connection from 127.0.0.1 refused: the peer's certificate {UNWELCOME[who]}" in caplog.text
    assert greet(server, identities.load("node to server")) == "greeted"


def test_server_refuses_a_certificate_of_its_own_kind(identities, start, caplog):
    """A server's certificate, of the right authority, does not make a node."""
    server = start(identities.load("server"))
    with pytest.raises(RemoteProtocolError, match=REFUSED):
        greet(server, replace(identities.load("server"), uses=frozenset()))
    assert soon(lambda: "is not for this side of a connection" in caplog.text)


def raw_client(identities, version=None, certificate=None):
    """A client of OpenSSL's own, which hears alerts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(identities["server"] / "ca.pem")
    if version is not None:
        context.maximum_version = version
    if certificate is not None:
        context.load_cert_chain(identities[certificate] / "cert.pem", identities[certificate] / "key.pem")
    return context


@pytest.mark.parametrize(
    ("version", "certificate", "said"),
    [
        (None, None, "the peer shows no certificate"),
        (ssl.TLSVersion.TLSv1_2, "node to server", "the peer does not speak TLS 1.3"),
        (None, "foreign client", "is not signed by our CA"),
        (None, "expired node", "has expired"),
    ],
)
def test_server_sends_no_alert_to_those_that_it_refuses(identities, start, caplog, version, certificate, said):
    server = start(identities.load("server"))
    context = raw_client(identities, version, certificate)
    with socket.create_connection(server.address.endpoint, timeout=SOON_S) as raw:
        try:
            with context.wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False) as sock:
                sock.sendall(FRAMING.magic)
                assert sock.recv(1) == b""
        except (ssl.SSLEOFError, ConnectionError):
            pass  # it just ended
        except ssl.SSLError as error:
            pytest.fail(f"the server said {error.reason}")
    assert soon(lambda: said in caplog.text)


@pytest.mark.parametrize("data", [b"heinfer\x02", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\0\x05hello"])
def test_server_closes_what_is_not_tls_without_a_word(identities, start, caplog, data):
    server = start(identities.load("server"))
    with socket.create_connection(server.address.endpoint, timeout=SOON_S) as raw:
        raw.sendall(data)
        with contextlib.suppress(ConnectionError):
            assert raw.recv(100) == b""
    assert soon(lambda: "connection from 127.0.0.1 refused: the" in caplog.text)
    assert "TLS" in caplog.text


def test_plain_node_at_a_server_with_tls_learns_what_may_be_missing(identities, start):
    server = start(identities.load("server"))
    with pytest.raises(RemoteProtocolError, match=f"{REFUSED}: it expects TLS"):
        greet(server, PlainText.ON_LOOPBACK)


def test_node_with_tls_at_a_plain_server_learns_what_may_be_missing(identities, start, caplog):
    server = start(PlainText.ON_LOOPBACK)
    with pytest.raises(HandshakeError, match="went away during the TLS handshake"):
        greet(server, identities.load("node to server"))
    assert soon(lambda: "the peer does not speak this protocol, but TLS" in caplog.text)


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ("foreign server", "is not signed by our CA"),
        ("elsewhere", "does not name this host"),
        ("expired server", "has expired"),
        ("node to server", "is not for this side of a connection"),
        ("node to clients", "is not signed by our CA"),
    ],
)
def test_node_refuses_a_server_and_says_why_to_its_own_operator(identities, start, caplog, who, said):
    unwelcome = replace(identities.load(who, believes="server"), uses=frozenset())
    server = start(unwelcome)
    with pytest.raises(TransportError, match=rf"{server.address} is not connected to: the peer's certificate {said}"):
        greet(server, identities.load("node to server"))
    assert soon(lambda: "the peer went away during the TLS handshake" in caplog.text)  # all that the server learns


def test_node_does_not_take_a_certificates_subject_for_a_host(identities, start, tmp_path):
    issuer = open_authority(identities.folder / "ca" / "node-server", "node-server")
    write_identity(tmp_path, issuer, "localhost", (), Use.ACCEPT, 90)
    server = start(Tls.from_folder(tmp_path))
    with pytest.raises(TransportError, match="does not name this host"):
        greet(server, identities.load("node to server"), host="localhost")


def sign_authority(name, issuer=None):
    """Make an authority that may certify others: at the top, or certified by another one."""
    key = ec.generate_private_key(ec.SECP256R1())
    certifier = Authority(authorities._make_authority(name).certificate, key) if issuer is None else issuer
    begins, ends = certifier.certificate.not_valid_before_utc, certifier.certificate.not_valid_after_utc
    by = certifier.certificate.subject
    builder = authorities._builder(name, by, key, begins, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(authorities._key_usage(key_cert_sign=True), critical=True)
    return Authority(builder.sign(certifier.key, hashes.SHA256()), key)


def test_intermediate_authority_lets_its_own_in_and_nobody_else_of_its_root(identities, start, caplog, tmp_path):
    root = sign_authority("hospital")
    signers = {"root": root, "nodes": sign_authority("nodes", root), "printers": sign_authority("printers", root)}
    for name, signer in signers.items():
        write_identity(tmp_path / name, signer, name, (), Use.CONNECT, 90)
    ours = identities["server"]
    server = start(Tls.load(tmp_path / "nodes" / "ca.pem", ours / "cert.pem", ours / "key.pem"))

    def come(who, *shown):
        folder = tmp_path / who
        chain = tmp_path / "chain.pem"
        parts = [folder / "cert.pem", *(tmp_path / name / "ca.pem" for name in shown)]
        chain.write_bytes(b"".join(part.read_bytes() for part in parts))
        return greet(server, Tls.load(ours / "ca.pem", chain, folder / "key.pem"))

    assert come("nodes") == come("nodes", "nodes") == come("nodes", "nodes", "root") == "greeted"
    strangers = [("root",), ("root", "root"), ("printers",), ("printers", "printers"), ("printers", "printers", "root")]
    for number, stranger in enumerate(strangers, 1):
        with pytest.raises(RemoteProtocolError, match=REFUSED):
            come(*stranger)
        assert soon(lambda: caplog.text.count("certificate is not signed by our CA") == number)  # noqa: B023


def test_node_hangs_up_on_a_server_that_says_nothing(identities):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(HandshakeError, match="did not complete the TLS handshake in time"):
            connect(Address(*silent.getsockname()), IMPATIENT, FRAMING, identities.load("node to server"))
        assert 0.3 < time.monotonic() - started < 2


def test_close_wakes_a_handshake(identities, start):
    server = start(identities.load("server"))
    with socket.create_connection(server.address.endpoint, timeout=SOON_S):
        assert soon(lambda: server._serving)
        started = time.monotonic()
        server.stop(0.1)
        assert time.monotonic() - started < 2


def test_stalled_handshakes_neither_hold_up_others_nor_last(identities, start, caplog):
    server = start(identities.load("server"), IMPATIENT)
    with contextlib.ExitStack() as stack:
        hello = client_hello(identities)
        stalled = [stack.enter_context(socket.create_connection(server.address.endpoint)) for _ in range(6)]
        for sock in stalled[3:]:
            sock.sendall(hello[:100])
        started = time.monotonic()
        assert greet(server, identities.load("node to server")) == "greeted"
        assert time.monotonic() - started < 0.4
        slow = stalled[0]
        with contextlib.suppress(OSError):  # a byte now and then does not make it last longer
            for byte in hello:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
                if time.monotonic() - started > 2:
                    break
        assert time.monotonic() - started < 1.5
        for sock in stalled[1:]:
            sock.settimeout(SOON_S)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
    assert soon(lambda: caplog.text.count("did not complete the TLS handshake in time") == 6)


@pytest.mark.parametrize("encrypted", [True, False], ids=["TLS", "plain"])
def test_strangers_who_stall_take_nobodys_place(identities, start, encrypted):
    ours, theirs = (identities.load(n) if encrypted else PlainText.ON_LOOPBACK for n in ("node to server", "server"))
    server = start(theirs, workers=3)
    link = ServerLink(server.address, PLAN, (BlockShape(1, 1, 64),), LIMITS, ours)
    with contextlib.ExitStack() as stack:
        stack.callback(link.close)
        session = stack.enter_context(link.session())
        strangers = [stack.enter_context(socket.create_connection(server.address.endpoint)) for _ in range(2)]
        assert soon(lambda: len(server._serving) == 3)
        stack.enter_context(link.session())
        assert soon(lambda: len(server._serving) == 3)
        strangers[0].settimeout(SOON_S)
        assert strangers[0].recv(1) == b""  # the first to come goes first
        strangers[1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            strangers[1].recv(1)
        assert session.usable  # who is known stays
        stack.enter_context(link.session())
        with pytest.raises(RemoteProtocolError, match="BUSY"):
            link.acquire()


def client_hello(identities):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    engine = identities.load("node to server").connect(incoming, outgoing, "localhost")
    with pytest.raises(ssl.SSLWantReadError):
        engine.do_handshake()
    return outgoing.read()


# Files


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_key_that_others_may_read_is_refused(identities, tmp_path, mode):
    key = tmp_path / "key.pem"
    key.write_bytes((identities["server"] / "key.pem").read_bytes())
    key.chmod(mode)
    with pytest.raises(TransportError, match=f"may be read by others .*chmod 600 {key}"):
        Tls.load(identities["server"] / "ca.pem", identities["server"] / "cert.pem", key)
    key.chmod(0o600)
    assert Tls.load(identities["server"] / "ca.pem", identities["server"] / "cert.pem", key).uses == {"serverAuth"}


def test_key_that_is_encrypted_is_refused(identities, tmp_path):
    key = serialization.load_pem_private_key((identities["server"] / "key.pem").read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    path = tmp_path / "key.pem"
    path.touch(0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    with pytest.raises(TransportError, match="is encrypted, and nobody is there to type its password"):
        Tls.load(identities["server"] / "ca.pem", identities["server"] / "cert.pem", path)


def test_files_that_are_missing_or_something_else_are_refused(identities, tmp_path):
    ca, certificate, key = (identities["server"] / name for name in ("ca.pem", "cert.pem", "key.pem"))
    noise = tmp_path / "noise.pem"
    noise.touch(0o600)
    noise.write_bytes(b"\xffnoise")
    for files, said in [
        ((tmp_path / "no", certificate, key), "No such file.*certificates of an authority"),
        ((ca, tmp_path / "no", key), "No such file.*expected a certificate"),
        ((ca, certificate, tmp_path / "no"), "No such file.*expected a private key"),
        ((noise, certificate, key), "not that, or damaged; expected certificates of an authority"),
        ((ca, noise, key), "not that, or damaged; expected a certificate"),
        ((ca, certificate, noise), "not that, or damaged; expected a private key"),
        ((ca, certificate, identities["client"] / "key.pem"), "is not the key of"),
    ]:
        with pytest.raises(TransportError, match=said):
            Tls.load(*files)


def test_own_certificate_that_has_expired_is_refused_at_once(identities):
    with pytest.raises(TransportError, match="and not now: renew it, or set the clock"):
        Tls.from_folder(identities["expired server"])


def test_own_certificate_for_the_other_side_is_refused_at_once(identities):
    with pytest.raises(TransportError, match="is for the side that makes connections, and this side accepts them"):
        serve_sessions(LOOPBACK, greet_back, LIMITS, 1, identities.load("node to server"))
    with pytest.raises(TransportError, match="is for the side that accepts connections, and this side makes them"):
        QueryClient(Address("127.0.0.1", 1), LIMITS, identities.load("node to clients"))


def test_keys_are_written_for_their_owner_only(identities):
    keys = list(identities.folder.rglob("key.pem"))
    assert len(keys) == 9 + 3
    for key in keys:
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = os.umask(0)
    try:
        with earlier():
            made = Identities(identities.folder / "again")
    finally:
        os.umask(before)
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in made.folder.rglob("key.pem"))


def test_authority_with_half_its_files_is_refused_and_not_replaced(tmp_path):
    open_authority(tmp_path, "test")
    key = (tmp_path / "key.pem").read_bytes()
    (tmp_path / "key.pem").unlink()
    with pytest.raises(TransportError, match="without it no certificate can be added"):
        open_authority(tmp_path, "test")
    (tmp_path / "key.pem").touch(0o600)
    (tmp_path / "key.pem").write_bytes(key)
    again = open_authority(tmp_path, "test")
    assert again.key.public_key() == again.certificate.public_key()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org"])
def test_beyond_this_machine_there_is_tls_or_an_explicit_word(identities, tmp_path, host):
    address = Address(host, 1)
    for check in (check_listening, check_connecting):
        with pytest.raises(TransportError, match="plain text is refused"):
            check(address, PlainText.ON_LOOPBACK)
        check(address, PlainText.ANYWHERE)
    check_listening(address, identities.load("server"))
    check_connecting(address, identities.load("client"))
    (tmp_path / "tokens").write_text(token_line(make_token(), "alice"))
    with pytest.raises(TransportError, match="anybody would be a client of this node"):
        check_serving(address, PlainText.ANYWHERE, None)
    check_serving(address, PlainText.ANYWHERE, TokenFile(tmp_path / "tokens"))
    check_serving(address, identities.load("node to clients"), None)
    check_serving(LOOPBACK, PlainText.ON_LOOPBACK, None)


# Queries and tokens


class Double:
    """Answers with twice the tensors."""

    def describe(self):
        return Description(PLAN, (TensorSpec("x", "float32", (None, 3)),), (), 64)

    def needs(self, header):
        return 1

    def check(self, header):
        pass

    def answer(self, header, tensors, gone):
        result = {name: 2 * array for name, array in tensors.items()}
        chunks = iterate_tensor_chunks(result, LIMITS)
        yield ResultHeader(header.request_id, describe_tensors(result), next(chunks, None))
        yield from chunks


@contextlib.contextmanager
def node(security=PlainText.ON_LOOPBACK, tokens=None, address=LOOPBACK):
    server = serve_queries(address, Double(), LIMITS, 8, security=security, tokens=tokens)
    try:
        yield server.address
    finally:
        server.stop(0)


def ask(client, x, request_id=1):
    inputs = {"x": x}
    chunks = iterate_tensor_chunks(inputs, LIMITS)
    header = QueryHeader(request_id, describe_tensors(inputs), first=next(chunks, None))
    return client.ask(header, chunks)[0]["x"]


def test_large_queries_and_results_arrive_whole(identities):
    x = np.random.default_rng(0).normal(size=(2_000_000, 1)).astype(np.float32)  # 8 MB each way
    with node(identities.load("node to clients")) as address:
        client = QueryClient(address, LIMITS, identities.load("client"))
        for _ in range(2):
            assert np.array_equal(ask(client, x), 2 * x)
        client.close()


def test_concurrent_queries_share_few_connections(identities):
    with node(identities.load("node to clients")) as address:
        client = QueryClient(address, LIMITS, identities.load("client"))

        def run(seed):
            x = np.random.default_rng(seed).normal(size=(1 + 997 * (seed % 7), 3)).astype(np.float32)
            return all(np.array_equal(ask(client, x, k + 1), 2 * x) for k in range(10))

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(run, range(16)))
        assert 1 <= len(client._lender._idle) <= 4
        client.close()


def test_kept_connection_is_used_again(identities):
    """TLS's own messages (tickets) are no news, or every query would make a connection."""
    with node(identities.load("node to clients")) as address:
        client = QueryClient(address, LIMITS, identities.load("client"))
        used = set()
        for _ in range(5):
            client.describe()
            used.add(id(client._lender._idle[-1]))
        assert len(used) == 1
        client.close()


@pytest.mark.parametrize("who", ["foreign client", "node to server", None])
def test_node_refuses_a_client_with_a_reason_for_its_log_only(identities, caplog, who):
    with node(identities.load("node to clients")) as address:
        security = PlainText.ON_LOOPBACK if who is None else identities.load(who, believes="client")
        client = QueryClient(address, LIMITS, security)
        with pytest.raises(RemoteProtocolError, match=REFUSED):
            client.describe()
        client.close()
    said = "the peer does not speak TLS" if who is None else "the peer's certificate is not signed by our CA"
    assert f"connection from 127.0.0.1 refused: {said}" in caplog.text


def test_client_refuses_a_node_and_says_why_to_its_own_operator(identities):
    for who, host, said in (
        ("foreign server", "127.0.0.1", "is not signed by our CA"),
        ("server", "127.0.0.1", "is not signed by our CA"),  # of a node: no node towards clients
        ("node to clients", "127.0.0.2", "does not name this host"),
    ):
        with node(identities.load(who, believes="node to clients"), address=Address(host, 0)) as address:
            client = QueryClient(address, LIMITS, identities.load("client"))
            with pytest.raises(TransportError, match=f"{address} is not connected to: the peer's certificate {said}"):
                client.describe()
            client.close()


@pytest.fixture
def tokens(tmp_path):
    """A node's file, and the tokens of alice and bob."""
    made = {name: make_token() for name in ("alice", "bob")}
    path = tmp_path / "tokens.sha256"
    path.write_text("# clients\n\n" + "".join(token_line(token, name) for name, token in made.items()))
    return path, made


@pytest.mark.parametrize("encrypted", [True, False], ids=["TLS", "plain"])
def test_right_token_is_served_and_all_others_hear_the_same(identities, tokens, caplog, encrypted):
    path, made = tokens
    ours, theirs = (
        identities.load(name) if encrypted else PlainText.ON_LOOPBACK for name in ("client", "node to clients")
    )
    x = np.ones((2, 3), np.float32)
    heard = set()
    with caplog.at_level(logging.DEBUG), node(theirs, TokenFile(path)) as address:
        for token in (made["alice"], made["bob"], None, make_token(), made["alice"][:-1], made["alice"] + "x", "é"):
            client = QueryClient(address, LIMITS, ours, token)
            if token in made.values():
                assert np.array_equal(ask(client, x), 2 * x)
                assert np.array_equal(ask(client, x), 2 * x)
                assert client.describe().max_samples == 64
            else:
                for question in (client.describe, lambda: ask(client, x)):  # noqa: B023 - called at once
                    with pytest.raises(QueryFailedError) as caught:
                        question()
                    assert caught.value.code is QueryFailureCode.REFUSED
                    heard.add(str(caught.value))
            client.close()
        client = QueryClient(address, LIMITS, ours, model="digits")  # nor does it hear which models there are
        with pytest.raises(QueryFailedError) as caught:
            client.describe()
        heard.add(str(caught.value))
        client.close()
    assert heard == {"the node refuses this client: it wants a token that it knows; ask its operator"}
    assert caplog.text.count("client refused: it shows no token") == 3
    assert caplog.text.count("client refused: its token is not in the file") == 8
    assert caplog.text.count("client greeted with the token of alice") == 1
    hashes = [line.split()[0] for line in path.read_text().splitlines() if line and line[0] != "#"]
    for record in caplog.records:
        said = f"{record.getMessage()} {record.args!r}"
        assert not any(secret in said for secret in (*made.values(), made["alice"][:-1], *hashes))


@pytest.mark.parametrize("encrypted", [True, False], ids=["TLS", "plain"])
def test_strangers_without_a_token_take_nobodys_place_and_do_not_stay(identities, tokens, monkeypatch, encrypted):
    monkeypatch.setattr("heinfer.wire.connection.CONNECT_S", 1.5)
    monkeypatch.setattr("heinfer.wire.connection.LINGER_S", 0.1)
    path, made = tokens
    ours, theirs = (
        identities.load(name) if encrypted else PlainText.ON_LOOPBACK for name in ("client", "node to clients")
    )
    node = serve_queries(LOOPBACK, Double(), LIMITS, 8, 3, theirs, TokenFile(path))
    with contextlib.ExitStack() as stack:
        stack.callback(node.stop, 0)

        def come(name):
            client = QueryClient(node.address, LIMITS, ours, made[name])
            stack.callback(client.close)
            return client.describe().max_samples

        strangers = [connect(node.address, LIMITS, query_framing(LIMITS), ours) for _ in range(3)]
        for stranger in strangers:
            stack.callback(stranger.close)
        assert soon(lambda: len(node._serving) == 3)
        time.sleep(0.1)  # their beginnings have been heard
        assert come("alice") == come("bob") == 64
        assert [stranger.has_news for stranger in strangers] == [True, True, False]
        assert strangers[2].await_news(3)  # closed by the clock, where nobody needed its place
        assert soon(lambda: len(node._serving) == 2)
        assert come("alice") == 64
        with pytest.raises(QueryFailedError, match="the node is busy"):
            come("bob")


def test_token_that_is_taken_out_is_refused_at_the_next_connection(tokens, caplog):
    path, made = tokens
    with node(tokens=TokenFile(path)) as address:
        client = QueryClient(address, LIMITS, token=made["alice"])
        client.describe()
        path.write_text(token_line(made["bob"], "bob"))
        client.close()
        client = QueryClient(address, LIMITS, token=made["alice"])
        with pytest.raises(QueryFailedError, match="refuses this client"):
            client.describe()
        client.close()
        path.write_text("damaged")
        client = QueryClient(address, LIMITS, token=made["bob"])
        with pytest.raises(QueryFailedError, match=r"it wants a token that it knows; ask its operator$"):
            client.describe()
        client.close()
    assert "no token can be looked up" in caplog.text
    assert "line 1: expected 64 hexadecimal digits" in caplog.text


def test_token_is_no_matter_to_a_node_that_wants_none(identities):
    with node() as address:
        client = QueryClient(address, LIMITS, token=make_token())
        assert client.describe().max_samples == 64
        client.close()


def test_token_file_that_is_none_or_open_to_others_is_refused(tmp_path):
    for content in ("x" * 64 + "  alice\n", "a" * 64 + " alice\n", "a" * 63 + "  alice\n", "a" * 64 + "  a b\n"):
        (tmp_path / "tokens").write_text(content)
        with pytest.raises(InputError, match="line 1: expected 64 hexadecimal digits, two spaces and a name"):
            TokenFile(tmp_path / "tokens")
    with pytest.raises(InputError, match="heinfer token"):
        TokenFile(tmp_path / "none")
    path = tmp_path / "alice.token"
    path.write_text(f"{make_token()}\n")
    path.chmod(0o644)
    with pytest.raises(TransportError, match="may be read by others"):
        read_token(path)
    path.chmod(0o600)
    assert len(read_token(path)) == 43
    for content in ("", "\n", "two words\n", "x" * 513):
        path.write_text(content)
        with pytest.raises(InputError, match="holds no token"):
            read_token(path)


def test_server_hears_a_greeting_of_sessions_only():
    """A client's greeting is nothing that a server of sessions knows; tokens never go there."""
    with pytest.raises(RemoteProtocolError):
        codec.decode_node_event(b"\x22\x05\x0a\x03abc", b"")
