"""Server, node and client as processes under TLS, with the certificates that the command line makes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import typer
from typer.testing import CliRunner

import heinfer
from heinfer.cli.certificates import certs_command, token_command
from heinfer.cli.inferring import infer_command
from heinfer.cli.main import app
from heinfer.cli.node_role import node_command
from heinfer.cli.roles import serve_command
from heinfer.errors import InputError, RemoteProtocolError
from heinfer.plan import load_node
from heinfer.wire import (
    Limits,
    QueryFailedError,
    Tls,
    TokenFile,
    TransportError,
    block_shapes,
    parse_address,
    read_token,
    token_line,
)
from tests.parties import Process, command, refusal, start
from trusted_node.link import ServerLink

HERE = "127.0.0.1,localhost"
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


@dataclass(frozen=True)
class Trial:
    """A server and a node that serves a token's holder, and the files of all."""

    folder: Path
    bundle: Path
    server: Process
    node: Process

    @property
    def client(self) -> Path:
        return self.folder / "certs" / "clients" / "alice"

    @property
    def to_server(self) -> Path:
        return self.folder / "certs" / "nodes" / "127.0.0.1" / "to-server"

    @property
    def token(self) -> str:
        return (self.folder / "alice.token").read_text().strip()


def invoke(*arguments: object) -> str:
    """Run a command in this process; return what it printed."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def believing(theirs: Path, ours: Path) -> Tls:
    """An intruder: the certificate of one kind of connection, on the other kind."""
    return Tls.load(theirs / "ca.pem", ours / "cert.pem", ours / "key.pem")


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory, dense_bundle: Path) -> Iterator[Trial]:
    folder = tmp_path_factory.mktemp("transport")
    certs = folder / "certs"
    done = invoke("certs", certs, "--server", HERE, "--node", HERE, "--client", "alice")
    assert f"Keep {certs}/ca offline" in done
    done = invoke("token", "alice", "--tokens", folder / "tokens.sha256", "-o", folder / "alice.token")
    assert (folder / "alice.token").read_text().strip() not in done
    np.save(folder / "query.npy", X)
    place = certs / "nodes" / "127.0.0.1"
    with (
        start(
            folder / "server", "-v", "serve", f"{dense_bundle}/server", "--listen", "127.0.0.1:0",
            "--tls", f"{certs}/servers/127.0.0.1",
        ) as server,
        start(
            folder / "node", "-v", "node", f"{dense_bundle}/node", "--listen", "127.0.0.1:0", "--prepared", "1",
            "--server", server.address, "--tls", f"{place}/to-server", "--client-tls", f"{place}/to-clients",
            "--tokens", f"{folder}/tokens.sha256",
        ) as node,
    ):  # fmt: skip
        yield Trial(folder, dense_bundle, server, node)


def test_queries_under_tls_are_answered_as_in_the_clear(trial: Trial) -> None:
    session = onnxruntime.InferenceSession(trial.bundle.parent / "dense.onnx")
    (expected,) = session.run(None, {session.get_inputs()[0].name: X})
    with heinfer.connect(trial.node.address, tls=trial.client, token=trial.token) as model:
        answer = model.query(X, statistics=True)
        bound = answer.statistics["error_bound"]
        np.testing.assert_allclose(model.predict(X), expected, atol=4 * bound)
        with ThreadPoolExecutor(4) as threads:
            for found in threads.map(model.predict, [X] * 8):
                np.testing.assert_allclose(found, expected, atol=4 * bound)


def test_infer_shows_a_certificate_and_a_token(trial: Trial) -> None:
    result, folder = trial.folder / "result.npy", trial.client
    done = command(
        "infer", trial.folder / "query.npy", "--node", trial.node.address, "--tls-ca", folder / "ca.pem",
        "--tls-cert", folder / "cert.pem", "--tls-key", folder / "key.pem",
        "--token-file", trial.folder / "alice.token", "-o", result,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert len(np.load(result)) == len(X)


def test_client_without_tls_or_token_is_refused_and_the_nodes_log_says_why(trial: Trial) -> None:
    with pytest.raises(RemoteProtocolError, match="it expects TLS, or another protocol"):
        heinfer.connect(trial.node.address, token=trial.token)
    for token in (None, "a" * 43):
        with pytest.raises(QueryFailedError, match="wants a token that it knows; ask its operator"):
            heinfer.connect(trial.node.address, tls=trial.client, token=token)
    with pytest.raises(RemoteProtocolError, match="it refuses our certificate, or is busy; see its log"):
        heinfer.connect(trial.node.address, tls=believing(trial.client, trial.to_server))
    said = trial.node.said()
    assert "connection from 127.0.0.1 refused: the peer does not speak TLS" in said
    assert "client refused: it shows no token" in said
    assert "client refused: its token is not in the file" in said


def test_client_with_foreign_certificates_refuses_the_node(trial: Trial, tmp_path: Path) -> None:
    certs_command(tmp_path, client=["alice"], days=30)
    alice = tmp_path / "clients" / "alice"
    line = refusal("infer", trial.folder / "query.npy", "--node", trial.node.address, "--tls", alice)
    assert f"{trial.node.address} is not connected to: the peer's certificate is not signed by our CA" in line


def test_node_with_a_clients_certificate_gets_nowhere(trial: Trial) -> None:
    """It believes the wrong authority, and with the right one the server does not believe it."""
    with pytest.raises(TransportError, match="is not connected to: the peer's certificate is not signed by our CA"):
        node_command(
            [str(trial.bundle / "node")], server=[trial.server.address], listen="127.0.0.1:0", tls=trial.client
        )
    node = load_node(trial.bundle / "node")
    intruder = believing(trial.to_server, trial.client)
    address, shapes = parse_address(trial.server.address), block_shapes(node.plan)
    link = ServerLink(address, node.plan_hash, shapes, Limits(), intruder)
    with pytest.raises(RemoteProtocolError, match="it refuses our certificate"):
        link.acquire()
    link.close()
    assert "connection from 127.0.0.1 refused: the peer's certificate is not signed by our CA" in trial.server.said()


def test_tokens_and_their_hashes_are_in_no_log(trial: Trial) -> None:
    with heinfer.connect(trial.node.address, tls=trial.client, token=trial.token) as model:
        model.predict(X)
    assert "client greeted with the token of alice" in trial.node.said()
    known = (trial.folder / "tokens.sha256").read_text().split()[0]
    for party in (trial.node, trial.server):
        assert trial.token not in party.said()
        assert known not in party.said()


def test_keys_and_tokens_are_for_their_owner_only(trial: Trial) -> None:
    secrets = [*(trial.folder / "certs").rglob("key.pem"), trial.folder / "alice.token"]
    assert len(secrets) == 2 + 4 + 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert stat.S_IMODE((trial.folder / "certs" / "ca" / "node-server").stat().st_mode) == 0o700


def test_certs_again_renews_and_adds_under_the_same_authority(tmp_path: Path) -> None:
    certs_command(tmp_path, server=[HERE], node=[HERE], client=["alice"], days=90)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    certs_command(tmp_path, client=["alice", "bob"], days=5)
    changed = {path for path in tmp_path.rglob("*.pem") if path.read_bytes() != files.get(path)}
    alice, bob = tmp_path / "clients" / "alice", tmp_path / "clients" / "bob"
    assert changed == {alice / "cert.pem", alice / "key.pem", *(bob / f"{name}.pem" for name in ("ca", "cert", "key"))}
    renewed = Tls.from_folder(alice)
    assert timedelta(days=4) < renewed.expires - datetime.now(UTC) < timedelta(days=6)


def test_listening_openly_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"plain text is refused for 0\.0\.0\.0:0"):
        serve_command([tmp_path], listen="0.0.0.0:0")
    with pytest.raises(TransportError, match=r"plain text is refused for 0\.0\.0\.0:0"):
        node_command([str(tmp_path)], server=["127.0.0.1:1"], listen="0.0.0.0:0")
    with pytest.raises(TransportError, match="anybody would be a client of this node"):
        node_command([str(tmp_path)], server=["127.0.0.1:1"], listen="0.0.0.0:0", client_insecure_plain_text=True)
    with pytest.raises(TransportError, match=r"plain text is refused for 192\.0\.2\.1:7800"):
        heinfer.connect("192.0.2.1:7800")


def test_files_and_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    certs_command(tmp_path / "certs", client=["alice"], days=1)
    alice, key = tmp_path / "certs" / "clients" / "alice", tmp_path / "key.pem"
    key.touch(0o640)
    with pytest.raises(TransportError, match="is for the side that makes connections"):
        serve_command([tmp_path], tls=alice)
    with pytest.raises(TransportError, match="No such file"):
        serve_command([tmp_path], tls=tmp_path / "nothing")
    with pytest.raises(TransportError, match=f"chmod 600 {key}"):
        serve_command([tmp_path], tls=alice, tls_key=key)
    with pytest.raises(typer.BadParameter, match="go together"):
        serve_command([tmp_path], tls_ca=alice / "ca.pem")
    with pytest.raises(typer.BadParameter, match="not both"):
        serve_command([tmp_path], tls=alice, insecure_plain_text=True)
    with pytest.raises(typer.BadParameter, match="stays on this machine"):
        infer_command(tmp_path / "query.npy", bundle=tmp_path, tls=alice)
    with pytest.raises(typer.BadParameter, match="name at least one"):
        certs_command(tmp_path / "none", days=1)
    with pytest.raises(InputError, match="is no name for a client"):
        certs_command(tmp_path / "none", client=["../alice"], days=1)
    assert not (tmp_path / "none").exists()


def test_token_is_added_to_the_file_and_an_earlier_one_is_not_lost(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.sha256"
    token_command("alice", tokens, tmp_path / "alice.token")
    token_command("bob", tokens, tmp_path / "bob.token")
    known = TokenFile(tokens)
    for name in ("alice", "bob"):
        assert known.name_of(read_token(tmp_path / f"{name}.token")) == name
    before = tokens.read_text()
    with pytest.raises(typer.BadParameter, match="exists"):
        token_command("alice", tokens, tmp_path / "alice.token")
    assert tokens.read_text() == before


def test_a_name_has_one_token_and_another_one_replaces_it_if_asked(tmp_path: Path) -> None:
    tokens, files = tmp_path / "tokens.sha256", [tmp_path / f"{number}.token" for number in range(3)]
    token_command("alice", tokens, files[0])
    token_command("alice-2", tokens, files[1])
    tokens.write_text(f"# clients of ward 3\n\n{tokens.read_text()}")
    before = tokens.read_text()
    with pytest.raises(typer.BadParameter, match=r"has a token of alice already.*--replace"):
        token_command("alice", tokens, files[2])
    assert tokens.read_text() == before
    assert not files[2].exists()
    first, second = before.splitlines(keepends=True)[-2:]
    tokens.write_text(f"{before}{token_line('an earlier one', 'alice')}")
    token_command("alice", tokens, files[2], replace=True)
    assert tokens.read_text().startswith(f"# clients of ward 3\n\n{second}")
    assert first not in tokens.read_text()
    known = TokenFile(tokens)
    assert [known.name_of(read_token(file)) for file in files] == [None, "alice-2", "alice"]
    assert known.name_of("an earlier one") is None


def test_token_whose_hash_can_not_be_written_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens.sha256"
    token_command("alice", tokens, tmp_path / "alice.token")
    before = tokens.read_text()

    def full(source: Path, target: Path) -> None:
        if Path(target) == tokens:
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        token_command("bob", tokens, tmp_path / "bob.token")
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.sha256", "alice.token"}
    assert tokens.read_text() == before
