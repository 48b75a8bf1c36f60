"""gRPC under TLS and with tokens: who is let in, what the others are told, and what the log keeps to itself."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from heinfer.wire import Address, PlainText, Tls, TokenFile
from heinfer.wire.address import TransportError
from heinfer.wire.authority import open_authority
from heinfer.wire.tokens import make_token, token_line
from tests.identities import Identities
from tests.interfaces.fakes import expected, fake_models
from trusted_node.serving.grpc_service import GrpcServer

LOOPBACK = Address("127.0.0.1", 0)
TIMEOUT_S = 10.0
#: Nothing of a refused handshake is told to the client but that it failed.
UNREACHABLE = StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return Identities(tmp_path_factory.mktemp("identities"))


@contextmanager
def serving(**options: Any) -> Iterator[GrpcServer]:
    server = GrpcServer(LOOPBACK, fake_models(), **options)
    try:
        yield server
    finally:
        server.stop(0)


@pytest.fixture(scope="module")
def under_tls(identities: Identities) -> Iterator[GrpcServer]:
    with serving(security=identities.load("node to clients")) as server:
        yield server


def credentials(folder: Path | None, authority: Path) -> grpc.ChannelCredentials:
    """What a client shows, and whom it believes."""
    pair = (None, None) if folder is None else ((folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes())
    return grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), *pair)


def digits() -> list[triton.InferInput]:
    tensor = triton.InferInput("x", [1, 1, 28, 28], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1, 28, 28), 0.5, np.float32))
    return [tensor]


def check_answer(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("y"), expected(np.full((1, 1, 28, 28), 0.5, np.float32)))


def ask(server: GrpcServer, shown: grpc.ChannelCredentials | None, **options: Any) -> StatusCode:
    """Ask over TLS, or plain text; return how it ended."""
    channel = grpc.insecure_channel(str(server.address)) if shown is None else grpc.secure_channel(
        str(server.address), shown
    )  # fmt: skip
    with channel:
        try:
            request = service_pb2.ServerReadyRequest()
            assert GRPCInferenceServiceStub(channel).ServerReady(request, timeout=TIMEOUT_S, **options).ready
        except grpc.RpcError as error:
            return error.code()
    return StatusCode.OK


# TLS.


def test_tritonclient_with_a_certificate_of_our_authority_is_served(
    under_tls: GrpcServer, identities: Identities
) -> None:
    folder = identities["client"]
    files = [str(folder / name) for name in ("ca.pem", "key.pem", "cert.pem")]
    with triton.InferenceServerClient(
        str(under_tls.address), ssl=True, root_certificates=files[0], private_key=files[1], certificate_chain=files[2]
    ) as client:
        check_answer(client.infer("digits", digits()))


@pytest.mark.parametrize(
    "shown",
    [
        None,
        "foreign client",
        "node to server",  # of the other authority
        "node to clients",  # of the right one, and for the side that accepts connections
    ],
)
def test_clients_without_a_certificate_for_this_are_refused(
    under_tls: GrpcServer, identities: Identities, shown: str | None
) -> None:
    folder = None if shown is None else identities[shown]
    assert ask(under_tls, credentials(folder, identities["client"])) is UNREACHABLE


def test_an_expired_certificate_is_refused(under_tls: GrpcServer, identities: Identities, tmp_path: Path) -> None:
    assert ask(under_tls, credentials(identities["client"], identities["client"])) is StatusCode.OK
    ours = open_authority(identities.folder / "ca" / "client-node", "client-node")
    issuer = ours.certificate, ours.key
    for days, ends in ((-1, UNREACHABLE), (1, StatusCode.OK)):
        made = issue(issuer, ExtendedKeyUsageOID.CLIENT_AUTH, datetime.now(UTC) + timedelta(days=days))
        folder = write(tmp_path / "made", made, believed=issuer)
        assert ask(under_tls, credentials(folder, identities["client"])) is ends


Issued = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def issue(issuer: Issued | None, use: x509.ObjectIdentifier | None, until: datetime) -> Issued:
    """Make a certificate and its key; without an issuer it signs itself, without a use it is an authority's."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"made {x509.random_serial_number()}")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=2))
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(use is None, None), critical=True)
    )
    if use is not None:
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False).add_extension(
            here, critical=False
        )
    return builder.sign(key if issuer is None else issuer[1], hashes.SHA256()), key


def write(folder: Path, issued: Issued, *chain: Issued, believed: Issued) -> Path:
    """Write ca.pem, cert.pem and key.pem."""
    folder.mkdir(exist_ok=True)
    encoding = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(believed[0].public_bytes(encoding))
    (folder / "cert.pem").write_bytes(b"".join(made[0].public_bytes(encoding) for made in (issued, *chain)))
    key = issued[1].private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key)
    (folder / "key.pem").chmod(0o600)
    return folder


def test_intermediate_authority_lets_its_own_in_and_nobody_else_of_its_root(tmp_path: Path) -> None:
    until = datetime.now(UTC) + timedelta(days=1)
    root = issue(None, None, until)
    ours, others = issue(root, None, until), issue(root, None, until)
    node, client, other = (
        issue(issuer, use, until)
        for issuer, use in (
            (ours, ExtendedKeyUsageOID.SERVER_AUTH),
            (ours, ExtendedKeyUsageOID.CLIENT_AUTH),
            (others, ExtendedKeyUsageOID.CLIENT_AUTH),
        )
    )
    with serving(security=Tls.from_folder(write(tmp_path / "node", node, ours, believed=ours))) as server:
        mine = write(tmp_path / "client", client, believed=root)
        assert ask(server, credentials(mine, mine)) is StatusCode.OK
        for chain in ((), (others,), (others, root)):
            theirs = write(tmp_path / "other", other, *chain, believed=root)
            assert ask(server, credentials(theirs, mine)) is UNREACHABLE


def test_plain_text_is_not_answered_under_tls(under_tls: GrpcServer) -> None:
    assert ask(under_tls, None) is UNREACHABLE


def test_a_node_of_another_authority_or_name_is_not_believed(identities: Identities) -> None:
    with serving(security=identities.load("node to clients")) as server:
        assert ask(server, credentials(identities["client"], identities["foreign server"])) is UNREACHABLE
    # Its name: a certificate for other.example.org and 127.0.0.2, believed by all, at 127.0.0.1.
    believed = identities["elsewhere"]
    with serving(security=identities.load("elsewhere")) as server:
        assert ask(server, credentials(identities["node to server"], believed)) is UNREACHABLE
    with serving(security=identities.load("server")) as server:
        assert ask(server, credentials(identities["node to server"], believed)) is StatusCode.OK


@pytest.mark.parametrize(
    ("version", "spoken"),
    [(ssl.TLSVersion.TLSv1_3, "TLSv1.3"), (ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_1, None)],
)
def test_grpc_speaks_tls_1_3_and_1_2_with_ephemeral_keys(
    under_tls: GrpcServer, identities: Identities, version: ssl.TLSVersion, spoken: str | None
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.warns(DeprecationWarning, match="TLSv1_1") if spoken is None else nullcontext():
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    folder = identities["client"]
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with socket.create_connection(under_tls.address.endpoint, TIMEOUT_S) as raw:
        if spoken is None:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(raw, server_hostname="127.0.0.1")
            return
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as tls:
            assert tls.version() == spoken
            name, _, _ = tls.cipher()
            assert "GCM" in name or "CHACHA20" in name
            assert spoken == "TLSv1.3" or name.startswith("ECDHE-")


def test_weak_ciphers_of_tls_1_2_are_not_spoken(under_tls: GrpcServer, identities: Identities) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("kRSA:ECDHE+SHA1:ECDHE+SHA256:!AESGCM:!CHACHA20:@SECLEVEL=0")
    context.load_verify_locations(identities["client"] / "ca.pem")
    with (
        socket.create_connection(under_tls.address.endpoint, TIMEOUT_S) as raw,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(raw, server_hostname="127.0.0.1")


def test_keys_that_others_may_read_are_refused_when_it_starts(identities: Identities, tmp_path: Path) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((identities["node to clients"] / name).read_bytes())
    (tmp_path / "key.pem").chmod(0o600)
    security = Tls.from_folder(tmp_path)
    (tmp_path / "key.pem").chmod(0o644)
    with pytest.raises(TransportError, match="may be read by others"):
        GrpcServer(LOOPBACK, fake_models(), security=security)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org"])
def test_plain_text_beyond_loopback_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match="plain text is refused"):
        GrpcServer(Address(host, 0), fake_models())
    with pytest.raises(TransportError, match="anybody would be a client"):
        GrpcServer(Address(host, 0), fake_models(), security=PlainText.ANYWHERE)


# Tokens.


class Guarded:
    """A node that wants tokens, and one that it knows."""

    def __init__(self, folder: Path) -> None:
        self.token = make_token()
        self.file = folder / "tokens"
        self.file.write_text(token_line(self.token, "alice"))
        self.server = GrpcServer(LOOPBACK, fake_models(), tokens=TokenFile(self.file))
        self.channel = grpc.insecure_channel(str(self.server.address))
        self.stub = GRPCInferenceServiceStub(self.channel)

    def metadata(self, shown: str) -> list[tuple[str, str]]:
        return [("authorization", shown.format(token=self.token))]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    node = Guarded(tmp_path)
    yield node
    node.channel.close()
    node.server.stop(0)


def refused(call: Callable[[], object]) -> tuple[StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_tritonclient_with_a_token_is_served(guarded: Guarded) -> None:
    with triton.InferenceServerClient(str(guarded.server.address)) as client:
        headers = {"authorization": f"Bearer {guarded.token}"}
        check_answer(client.infer("digits", digits(), headers=headers))
        client.unload_model("digits", headers=headers)
        with pytest.raises(InferenceServerException, match="holders of a token"):
            client.infer("mixed", digits())


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_may_be_in_any_case(guarded: Guarded, scheme: str) -> None:
    request = service_pb2.ServerReadyRequest()
    assert guarded.stub.ServerReady(request, metadata=guarded.metadata(f"{scheme} {{token}}")).ready


def test_missing_and_wrong_tokens_get_the_same_answer(guarded: Guarded) -> None:
    request = service_pb2.ModelMetadataRequest(name="digits")
    shown = [
        None,
        guarded.metadata(f"Bearer {make_token()}"),
        guarded.metadata("Bearer "),
        guarded.metadata("{token}"),
        guarded.metadata("Basic {token}"),
        guarded.metadata("Bearer {token}x"),
        guarded.metadata("Bearer " + "x" * 5000),
        guarded.metadata("Bearer {token}") * 2,
    ]
    answers = {refused(lambda m=metadata: guarded.stub.ModelMetadata(request, metadata=m)) for metadata in shown}
    assert len(answers) == 1
    assert answers.pop()[0] is StatusCode.UNAUTHENTICATED


def test_without_a_token_health_and_liveness_answer_and_nothing_else(guarded: Guarded) -> None:
    assert guarded.stub.ServerLive(service_pb2.ServerLiveRequest()).live
    health = health_pb2_grpc.HealthStub(guarded.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    watched = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    watched.cancel()
    asked = 0
    for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        if method.name == "ServerLive":
            continue
        path = f"/inference.GRPCInferenceService/{method.name}"
        call = guarded.channel.stream_stream(path)
        assert refused(lambda c=call: list(c(iter([b""]), timeout=TIMEOUT_S)))[0] is StatusCode.UNAUTHENTICATED
        asked += 1
    assert asked == 19
    reflection = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    code, _ = refused(lambda: list(reflection.ServerReflectionInfo(iter([question]), timeout=TIMEOUT_S)))
    assert code is StatusCode.UNAUTHENTICATED


def test_a_token_that_is_taken_out_ends_at_the_next_call(guarded: Guarded) -> None:
    request = service_pb2.ServerReadyRequest()
    shown = guarded.metadata("Bearer {token}")
    assert guarded.stub.ServerReady(request, metadata=shown).ready
    guarded.file.write_text("")
    assert refused(lambda: guarded.stub.ServerReady(request, metadata=shown))[0] is StatusCode.UNAUTHENTICATED
    guarded.file.unlink()
    code, text = refused(lambda: guarded.stub.ServerReady(request, metadata=shown))
    assert (code, text) == (StatusCode.UNAVAILABLE, "the node can't read its file of tokens")


def test_logs_hold_neither_tokens_nor_values(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    x = np.full((1, 1, 28, 28), 0.71875, np.float32)
    x[0, 0, 0, 0] = np.nan
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    wrong = make_token()
    with caplog.at_level(logging.DEBUG), triton.InferenceServerClient(str(guarded.server.address)) as client:
        for token in (guarded.token, wrong):
            with pytest.raises(InferenceServerException):
                client.infer("digits", [tensor], headers={"authorization": f"Bearer {token}"})
        check_answer(client.infer("digits", digits(), headers={"authorization": f"Bearer {guarded.token}"}))
    assert "ModelInfer ended by InputError" in caplog.text
    assert "it shows no token that is in the file" in caplog.text
    shown = "\n".join(str(vars(record)) for record in caplog.records)
    for secret in (guarded.token, wrong, "0.71875", *map(str, expected(np.full((1, 1, 28, 28), 0.5))[0])):
        assert secret not in shown
