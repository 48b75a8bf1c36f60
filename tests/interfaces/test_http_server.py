"""The HTTP server's connections: cancelled, slow, silent, too many, under TLS, and at its end."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from heinfer.wire import Address, PlainText, TransportError
from tests.identities import Identities
from tests.interfaces.fakes import expected, fake_models
from tests.interfaces.http_serving import DIGITS, LOOPBACK, binary_digits, digits, error_of, json_query, served
from tests.waiting import soon
from trusted_node.serving.http_app import make_app
from trusted_node.serving.http_server import HttpServer
from trusted_node.serving.limits import ServingLimits

ONE = digits(1)
SHORT = ServingLimits(header_s=0.3, body_s=0.3, idle_s=1.0)


def raw_request(body: bytes, headers: dict[str, str], announced: int | None = None) -> bytes:
    lines = [f"POST {DIGITS} HTTP/1.1", "Host: localhost", f"Content-Length: {announced or len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def connect(node) -> socket.socket:
    return socket.create_connection(node.server.address.endpoint, timeout=10)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_client_that_goes_away_takes_its_query_with_it():
    with served() as node:
        model = node.models["digits"]
        model.hold()
        connection = connect(node)
        connection.sendall(raw_request(*binary_digits(ONE)))
        assert soon(lambda: model.pending == 1)
        connection.close()
        assert soon(lambda: model.pending == 0)
        model.release()
        assert node.http.post(DIGITS, json=json_query(ONE)).status_code == 200


def test_client_that_goes_away_in_the_midst_of_its_body_leaves_nothing():
    body, headers = binary_digits(digits(6))
    with served(ServingLimits(body_bytes=30_000, json_bytes=10_000, total_bytes=30_000)) as node:
        for _ in range(5):
            with closing(connect(node)) as connection:
                connection.sendall(raw_request(body[:5000], headers, len(body)))
        assert soon(lambda: node.http.post(DIGITS, content=body, headers=headers).status_code == 200)
        assert len(node.models["digits"].submitted) == 1


def test_many_clients_at_once_each_get_their_own_answer():
    with served() as node, ThreadPoolExecutor(16) as threads:
        node.models["digits"].delay_s = 0.01

        def ask(seed: int) -> bool:
            x = digits(1 + seed % 3, seed)
            body, headers = binary_digits(x, parameters={"binary_data_output": True})
            answer = node.http.post(DIGITS, content=body, headers=headers)
            raw = answer.content[int(answer.headers["inference-header-content-length"]) :]
            return raw == expected(x).tobytes()

        assert all(threads.map(ask, range(200)))


def test_slow_body_is_refused_in_time():
    with served(SHORT) as node, closing(connect(node)) as connection:
        body, headers = binary_digits(ONE)
        connection.sendall(raw_request(body[:100], headers, len(body)))
        started = time.monotonic()
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'{"error":' in answer
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("said", [b"", b"GET /v2 HTTP/1.1\r\nHost: loc"])
def test_silent_and_dribbling_clients_are_cut_off(said):
    with served(SHORT) as node, closing(connect(node)) as connection:
        connection.sendall(said)
        started = time.monotonic()
        while time.monotonic() - started < 5:
            try:
                connection.sendall(b"x" if said else b"")
            except OSError:
                break
            if soon(lambda: _is_closed(connection), 0.05):
                break
        assert 0.2 < time.monotonic() - started < 2


def test_client_that_stops_in_the_midst_of_a_body_that_nobody_reads_is_cut_off():
    with served(SHORT) as node, closing(connect(node)) as connection:
        request = raw_request(b"x" * 10, {}, 10_000).replace(DIGITS.encode(), b"/nowhere")
        connection.sendall(request)
        started = time.monotonic()
        assert connection.recv(12) == b"HTTP/1.1 404"
        connection.sendall(b"a little more of it")
        assert b"no such page" in read_all(connection)
        assert time.monotonic() - started < 3


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_connection_is_kept_for_the_next_request_and_closed_when_idle():
    with served(SHORT) as node, closing(HTTPConnection(*node.server.address.endpoint)) as client:
        client.connect()
        connection = client.sock
        for _ in range(3):
            client.request("GET", "/v2/health/live")
            assert client.getresponse().read() == b'{"live":true}'
            time.sleep(0.4)  # longer than headers may take: none have begun
        assert client.sock is connection
        connection.settimeout(5)
        assert read_all(connection) == b""


def test_what_is_no_http_gets_an_error_in_json():
    with served() as node:
        for said in (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000):
            with closing(connect(node)) as connection:
                connection.sendall(said)
                answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_connections_too_many_are_told_so():
    with served(ServingLimits(connections=4)) as node:
        kept = [connect(node) for _ in range(4)]
        try:
            with httpx.Client(base_url=f"http://{node.address}") as another:
                answer = another.get("/v2/health/live")
                assert answer.status_code == 503
                assert "connections" in error_of(answer)
                assert answer.headers["connection"] == "close"
        finally:
            for connection in kept:
                connection.close()
        assert soon(lambda: httpx.get(f"http://{node.address}/v2/health/live").status_code == 200)


def test_body_too_large_for_a_client_that_asks_first_is_never_sent():
    with served(ServingLimits(body_bytes=1000, json_bytes=1000)) as node, closing(connect(node)) as connection:
        connection.sendall(raw_request(b"", {"Expect": "100-continue"}, 5000))
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_stop_lets_running_answers_end_and_takes_no_more():
    models = fake_models()
    models["digits"].delay_s = 0.5
    server = HttpServer(LOOPBACK, make_app(models))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"http://{server.address}{DIGITS}", json=json_query(ONE))
        assert soon(lambda: models["digits"].submitted)
        server.stop(5.0)
        assert answer.result().status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{server.address}/v2/health/live")
    assert not [t for t in threading.enumerate() if t.name == "heinfer-http"]


def test_stop_ends_what_takes_longer_than_the_grace():
    models = fake_models()
    models["digits"].hold()
    server = HttpServer(LOOPBACK, make_app(models))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"http://{server.address}{DIGITS}", json=json_query(ONE))
        assert soon(lambda: models["digits"].submitted)
        started = time.monotonic()
        server.stop(0.2)
        assert time.monotonic() - started < 4
        assert answer.result().status_code == 503
        assert "stopping" in error_of(answer.result())


def test_port_in_use_is_a_transport_error():
    with served() as node, pytest.raises(TransportError, match="cannot listen"):
        HttpServer(node.server.address, make_app(fake_models()))


def test_plain_text_beyond_loopback_is_refused():
    with pytest.raises(TransportError, match="plain text is refused"):
        HttpServer(Address("0.0.0.0", 0), make_app(fake_models()), PlainText.ON_LOOPBACK)


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    return Identities(tmp_path_factory.mktemp("identities"))


def context(identities: Identities, name: str | None, believes: str = "client") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=identities[believes] / "ca.pem")
    if name is not None:
        made.load_cert_chain(identities[name] / "cert.pem", identities[name] / "key.pem")
    return made


def test_tls_client_with_a_certificate_is_served(identities):
    with served(security=identities.load("node to clients")) as node:
        url = f"https://{node.address}"
        with httpx.Client(base_url=url, verify=context(identities, "client")) as client:
            answer = client.post(DIGITS, json=json_query(ONE))
            np.testing.assert_array_equal(np.float32(answer.json()["outputs"][0]["data"]), expected(ONE)[0])


def test_tls_tritonclient_is_served(identities):
    import gevent.ssl

    def make():
        made = gevent.ssl.create_default_context(cafile=identities["client"] / "ca.pem")
        made.load_cert_chain(identities["client"] / "cert.pem", identities["client"] / "key.pem")
        return made

    with served(security=identities.load("node to clients")) as node:
        client = triton.InferenceServerClient(node.address, ssl=True, ssl_context_factory=make)
        with closing(client):
            assert client.is_server_ready()
            x = triton.InferInput("x", list(ONE.shape), "FP32")
            x.set_data_from_numpy(ONE)
            np.testing.assert_array_equal(client.infer("digits", [x]).as_numpy("y"), expected(ONE))


@pytest.mark.parametrize("name", [None, "foreign client", "node to server"])
def test_tls_client_without_a_certificate_of_ours_is_not_let_in(identities, name):
    with served(security=identities.load("node to clients")) as node:
        url = f"https://{node.address}"
        with (
            pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)),
            httpx.Client(base_url=url, verify=context(identities, name)) as client,
        ):
            client.get("/v2/health/live")
        with httpx.Client(base_url=url, verify=context(identities, "client")) as client:
            assert client.get("/v2/health/live").status_code == 200


def test_tls_nothing_older_than_1_3_is_spoken(identities):
    old = context(identities, "client")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        served(security=identities.load("node to clients")) as node,
        pytest.raises(httpx.ConnectError),
        httpx.Client(base_url=f"https://{node.address}", verify=old) as client,
    ):
        client.get("/v2/health/live")


def test_tls_certificate_for_connecting_is_refused_at_the_start(identities):
    with pytest.raises(TransportError, match="for the side that makes"):
        HttpServer(LOOPBACK, make_app(fake_models()), identities.load("client"))
