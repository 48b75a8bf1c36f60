"""Faults of every kind, at the command line and at both ports: one clear error, nothing half-written, no hang."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import LocalModel, connect
from heinfer.errors import HeinferError
from heinfer.plan import load_node, load_server, read_plan
from heinfer.wire import (
    BlockRequest,
    Chunk,
    End,
    Failure,
    FailureCode,
    Hello,
    Limits,
    QueryFailure,
    QueryFailureCode,
    Ready,
    ResultEvent,
    ServerEvent,
    parse_address,
    row_bytes,
    session_framing,
)
from heinfer.wire import (
    connect as connect_to_server,
)
from heinfer.wire.codec import decode_server_event, encode_node_event
from heinfer.wire.frames import QUERY_MAGIC, SESSION_MAGIC
from heinfer.wire.query_codec import decode_result_event
from partitioner import partition
from tests.captured_traffic import flatten, framed
from tests.parties import WatchedPool, command, parties, refusal, refused, start
from tests.small_models import dense_model

X = np.ones((2, 3), np.float32)


@pytest.fixture
def copy(dense_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that a test may break."""
    return Path(shutil.copytree(dense_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def address(dense: LocalModel) -> str:
    """Where a healthy node listens."""
    return str(dense.address)


def edit_plan(folder: Path, **changes: object) -> None:
    """Change plan.json in a bundle and both its parties' folders."""
    for path in (folder, folder / "server", folder / "node"):
        plan = json.loads((path / "plan.json").read_text())
        (path / "plan.json").write_text(json.dumps({**plan, **changes}))


# --- queries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.ones((2, 4), np.float32), r"expected shape (samples, 3), found (2, 4)"),
        (np.ones((2, 3), np.uint8), "--divide"),
        (np.full((2, 3), "a"), "expected numbers"),
        (np.full((2, 3), np.nan, np.float32), "NaN or infinity"),
        (np.array([[1, np.inf, 2]], np.float32), "NaN or infinity"),
        (np.zeros((0, 3), np.float32), "no samples"),
    ],
    ids=["shape", "integers", "text", "nan", "infinity", "empty"],
)
def test_infer_query_that_does_not_fit_is_refused_and_nothing_written(
    address: str, tmp_path: Path, array: np.ndarray, reason: str
) -> None:
    np.save(tmp_path / "query.npy", array)
    result, figures = tmp_path / "result.npy", tmp_path / "figures.json"
    said = refusal("infer", "--node", address, tmp_path / "query.npy", "-o", result, "--json", figures)
    assert reason in said
    assert not result.exists()
    assert not figures.exists()


def test_infer_pickled_query_is_refused(address: str, tmp_path: Path) -> None:
    np.save(tmp_path / "query.npy", np.array([{}, 1], object), allow_pickle=True)
    assert "can't read" in refusal("infer", "--node", address, tmp_path / "query.npy")


def test_infer_without_a_node_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "query.npy", X)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "no node answers" in refusal("infer", "--node", f"127.0.0.1:{port}", tmp_path / "query.npy")


@pytest.mark.parametrize("arguments", [[], ["--node", "127.0.0.1:1", "--bundle", "b"]])
def test_infer_with_neither_or_both_of_node_and_bundle_is_a_usage_error(tmp_path: Path, arguments: list[str]) -> None:
    np.save(tmp_path / "query.npy", X)
    done = command("infer", tmp_path / "query.npy", *arguments)
    assert done.code == 2
    assert "--node or --bundle" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arrays", "arguments", "reason"),
    [
        ({"images": X}, [], "no array 'x'"),
        ({"x": X, "y": np.zeros(2, int)}, ["--y", "classes"], "no array 'classes'"),
        ({"x": X, "y": np.zeros(3, int)}, [], "labels must be 2 integers"),
        ({"x": np.ones((2, 3), np.uint8)}, [], "--divide"),
        ({"x": np.full((2, 3), np.nan, np.float32)}, [], "NaN or infinity"),
    ],
    ids=["no samples", "no labels", "label count", "integers", "nan"],
)
def test_evaluate_data_that_do_not_fit_are_refused(
    dense_bundle: Path, tmp_path: Path, arrays: dict[str, np.ndarray], arguments: list[str], reason: str
) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    report = tmp_path / "report.json"
    done = command("evaluate", dense_bundle, "--data", tmp_path / "data.npz", "--json", report, *arguments)
    assert done.code == 1, done
    assert reason in done.err
    assert "Traceback" not in done.err
    assert "Warning" not in done.err
    assert not report.exists()


# --- bundles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["", "plan.json", "weights.safetensors"])
def test_serve_with_parts_missing_is_refused(copy: Path, missing: str) -> None:
    target = copy / "server" / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    said = refusal("serve", copy / "server", "--listen", "127.0.0.1:0")
    assert str(copy / "server") in said


@pytest.mark.parametrize("missing", ["", "plan.json", "scales.safetensors", "node_1.onnx"])
def test_node_with_parts_missing_is_refused(copy: Path, missing: str) -> None:
    target = copy / "node" / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    said = refusal("node", copy / "node", "--server", "127.0.0.1:9", "--listen", "127.0.0.1:0")
    assert str(copy / "node") in said


@pytest.mark.parametrize("part", ["server/weights.safetensors", "node/scales.safetensors", "node/node_1.onnx"])
def test_inspect_edited_bundle_is_refused(copy: Path, part: str) -> None:
    content = bytearray((copy / part).read_bytes())
    content[-1] ^= 1
    (copy / part).write_bytes(content)
    assert "changed, added or lost" in refusal("inspect", copy)


def test_inspect_bundle_with_a_file_added_is_refused(copy: Path) -> None:
    (copy / "node" / "extra.onnx").write_bytes(b"x")
    assert "changed, added or lost" in refusal("inspect", copy)


@pytest.mark.parametrize("name", ["plan.json", "reference"])
def test_evaluate_bundle_with_parts_missing_is_refused(copy: Path, tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "data.npz", x=X)
    target = copy / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    assert "missing" in refusal("evaluate", copy, "--data", tmp_path / "data.npz")


def test_evaluate_other_model_in_reference_is_refused(copy: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=X)
    dense_model(copy / "reference" / "model.onnx", seed=7)
    assert "not the model" in refusal("evaluate", copy, "--data", tmp_path / "data.npz")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 3}', "\x00\xff"])
def test_inspect_plan_that_is_none_is_refused(copy: Path, text: str) -> None:
    (copy / "plan.json").write_bytes(text.encode("latin-1"))
    assert "not a plan" in refusal("inspect", copy)


RINGS = {
    "degree too small": {"degree": 1024, "modulus": 1125899906826241},
    "modulus too large": {"degree": 2048, "modulus": 2**54 + 1},
    "not prime": {"degree": 2048, "modulus": 1125899906826241 - 2**12},
    "no such degree": {"degree": 2000, "modulus": 1125899906826241},
}


@pytest.mark.parametrize(
    ("party", "ring"), [("serve", "degree too small"), ("node", "degree too small"), *(("inspect", r) for r in RINGS)]
)
def test_parameters_outside_the_security_table_are_refused(copy: Path, party: str, ring: str) -> None:
    edit_plan(copy, ring=RINGS[ring])  # plan.json is outside the digests: nothing else would notice
    arguments = {
        "serve": ["serve", copy / "server", "--listen", "127.0.0.1:0"],
        "node": ["node", copy / "node", "--server", "127.0.0.1:9", "--listen", "127.0.0.1:0"],
        "inspect": ["inspect", copy],
    }
    said = refusal(*arguments[party])
    assert "degree" in said or "modulus" in said


# --- both parties --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server_address(dense: LocalModel, dense_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the small model that is a process of its own."""
    with start(
        tmp_path_factory.mktemp("server") / "errors", "serve", str(dense_bundle / "server"), "--listen", "127.0.0.1:0"
    ) as server:
        yield server.address
        assert server.process.poll() is None  # it survived all that these tests sent
        assert "Traceback" not in server.said()


def test_node_with_another_plan_than_the_server_s_is_refused(server_address: str, tmp_path: Path) -> None:
    partition(dense_model(tmp_path / "other.onnx", seed=9), tmp_path / "bundle")
    words = ("node", tmp_path / "bundle" / "node", "--server", server_address, "--listen", "127.0.0.1:0")
    assert "PLAN" in refused(command(*words))


def test_port_in_use_is_refused_by_both(server_address: str, dense_bundle: Path) -> None:
    for words in (("serve", dense_bundle / "server"), ("node", dense_bundle / "node", "--server", server_address)):
        assert "port is in use" in refused(command(*words, "--listen", server_address))


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:99999", "0.0.0.0:0", ":7700", "a b:1"])
def test_serve_address_that_is_none_or_not_loopback_is_refused(dense_bundle: Path, listen: str) -> None:
    refusal("serve", dense_bundle / "server", "--listen", listen)


def garbage(magic: bytes) -> list[bytes]:
    generator = np.random.default_rng(0)
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        generator.bytes(100_000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + generator.bytes(5000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + generator.bytes(500),
        b"heinfer\x01" + generator.bytes(100),
        QUERY_MAGIC + generator.bytes(100),
        SESSION_MAGIC + generator.bytes(100),
        magic[:5],
        magic,
        magic + b"\x20\x00\x00",
        magic + b"\xff" * 8 + generator.bytes(5000),
        magic + framed(50, 2**20, bytes(50_000)),
        magic + generator.bytes(5000),
    ]


def throw_at(address: str, data: bytes) -> None:
    """Send raw bytes and close, whatever the peer does."""
    target = parse_address(address)
    with socket.create_connection((target.host, target.port), timeout=5) as raw:
        raw.settimeout(0.2)
        try:
            raw.sendall(data)
            raw.recv(1000)
        except OSError:
            pass


def send_raw(address: str, *pieces: bytes, pause_s: float = 0.0, half: bool = True) -> bytes:
    """Send pieces to the server, close our half perhaps, and return all that it says until it closes its own."""
    target = parse_address(address)
    said = b""
    with socket.create_connection((target.host, target.port), timeout=10) as raw:
        for piece in pieces:
            raw.sendall(piece)
            time.sleep(pause_s)
        if half:
            raw.shutdown(socket.SHUT_WR)
        while data := raw.recv(1 << 16):
            said += data
    return said


def read_frames(said: bytes) -> list[tuple[bytes, bytes]]:
    frames, position = [], 0
    while position < len(said):
        envelope_bytes, payload_bytes = struct.unpack_from("<II", said, position)
        middle = position + 16 + envelope_bytes
        position = middle + payload_bytes
        frames.append((said[middle - envelope_bytes : middle], said[middle:position]))
    return frames


def read_server_events(said: bytes) -> list[ServerEvent]:
    return [decode_server_event(*frame) for frame in read_frames(said)]


def read_node_events(said: bytes) -> list[ResultEvent]:
    return [decode_result_event(*frame, Limits()) for frame in read_frames(said)]


def ask_server(address: str, folder: Path, change: object = None) -> list[object]:
    """Hold one whole session for block 0 with zeros as ciphertexts; return what the server said."""
    bundle = load_server(folder)
    block = bundle.plan.blocks[0]
    data = bytes(block.input_rows * row_bytes(1, bundle.plan.ring.degree))
    session = bytes(16)
    events = [
        Hello(bundle.plan_hash, session),
        BlockRequest(session, bundle.plan_hash, 0, 1, 1, block.input_rows),
        Chunk(1, 0, block.input_rows, data),
        End(),
    ]
    if change is not None:
        events = change(events)  # type: ignore[operator]
    said: list[object] = []
    limits = Limits(reply_s=10)
    connection = connect_to_server(parse_address(address), limits, session_framing(limits))
    try:
        for event in events:
            if not isinstance(event, End):
                connection.send(*encode_node_event(event))
        connection.end_output()
        while (message := connection.receive()) is not None:
            said += flatten(decode_server_event(*message))
    finally:
        connection.close()
    return said


def answers_properly(address: str, folder: Path) -> bool:
    said = ask_server(address, folder)
    return len(said) == 3 and isinstance(said[0], Ready) and isinstance(said[2], Chunk) and said[2].rows == 4


def test_server_survives_raw_garbage(server_address: str, dense_bundle: Path) -> None:
    for data in garbage(SESSION_MAGIC):
        throw_at(server_address, data)
    assert answers_properly(server_address, dense_bundle / "server")


NONE = {
    "empty": framed(0, 0),
    "noise": framed(50, 0, b"\xff" * 50),
    "truncated": framed(5, 0, b"\x0a\x05abc"),
    "payload alone": framed(0, 9, bytes(9)),
    "envelope too long": framed(2000, 0, bytes(2000)),
    "payload too long": framed(0, 2**20 + 1, bytes(2**20 + 1)),
    "both enormous": b"\xff" * 8,
    "half a header": b"\x05\0\0",
    "half an envelope": framed(50, 0, bytes(20)),
    "half a payload": framed(0, 50, bytes(20)),
}


@pytest.mark.parametrize("frame", NONE.values(), ids=NONE)
@pytest.mark.parametrize("pause_s", [0.0, 0.2])
def test_server_survives_messages_that_are_none(
    server_address: str, dense_bundle: Path, frame: bytes, pause_s: float
) -> None:
    said = send_raw(server_address, SESSION_MAGIC, frame, pause_s=pause_s)
    assert read_server_events(said) == [Failure(FailureCode.FAILED)]
    assert answers_properly(server_address, dense_bundle / "server")


@pytest.mark.parametrize(
    "beginning", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"\0"]
)
def test_server_closes_other_protocols_without_a_word(
    server_address: str, dense_bundle: Path, beginning: bytes
) -> None:
    started = time.monotonic()
    try:
        said = send_raw(server_address, beginning, half=False)
    except ConnectionError:  # closed with our bytes unread
        said = b""
    assert said == b""
    assert time.monotonic() - started < 2
    assert answers_properly(server_address, dense_bundle / "server")


def test_server_answers_a_peer_that_sends_slowly(server_address: str, dense_bundle: Path) -> None:
    bundle = load_server(dense_bundle / "server")
    envelope, _ = encode_node_event(Hello(bundle.plan_hash, bytes(16)))
    data = SESSION_MAGIC + framed(len(envelope), 0, envelope)
    said = send_raw(server_address, *(data[i : i + 5] for i in range(0, len(data), 5)), pause_s=0.02)
    assert read_server_events(said) == [Ready()]


def test_server_serves_others_while_peers_are_silent(server_address: str, dense_bundle: Path) -> None:
    target = parse_address(server_address)
    silent = [socket.create_connection((target.host, target.port), timeout=5) for _ in range(10)]
    for number, raw in enumerate(silent):
        raw.sendall((SESSION_MAGIC + framed(50, 50, bytes(20)))[: 3 * number])
    assert answers_properly(server_address, dense_bundle / "server")
    for raw in silent:
        raw.close()


def _residues_beyond(events: list[object]) -> list[object]:
    chunk = events[2]
    assert isinstance(chunk, Chunk)
    return [*events[:2], Chunk(1, 0, chunk.rows, b"\xff" * len(chunk.data)), End()]


def _too_few_bytes(events: list[object]) -> list[object]:
    chunk = events[2]
    assert isinstance(chunk, Chunk)
    return [*events[:2], Chunk(1, 0, chunk.rows, chunk.data[:-1]), End()]


def _row_by_row(*order: int) -> Callable[[list[object]], list[object]]:
    """Send the rows of the upload one by one, in an order of one's own."""

    def change(events: list[object]) -> list[object]:
        chunk = events[2]
        assert isinstance(chunk, Chunk)
        size = len(chunk.data) // chunk.rows
        rows = [Chunk(1, row, 1, chunk.data[row * size : (row + 1) * size]) for row in order]
        return [*events[:2], *rows, End()]

    return change


@pytest.mark.parametrize(
    "change",
    [
        _row_by_row(1, 0, 2),
        _row_by_row(0, 0, 1, 2),
        _row_by_row(0, 2),
        _residues_beyond,
        _too_few_bytes,
        lambda e: [*e[:2], End()],
        lambda e: e[1:],
        lambda e: [*e[:2], e[1], End()],
    ],
    ids=[
        "reordered",
        "duplicate",
        "row lost",
        "residues beyond q",
        "bytes missing",
        "rows missing",
        "no greeting",
        "announced twice",
    ],
)
def test_server_says_failed_and_survives(server_address: str, dense_bundle: Path, change: object) -> None:
    said = ask_server(server_address, dense_bundle / "server", change)
    assert said[-1] == Failure(FailureCode.FAILED)
    assert not any(isinstance(event, Chunk) for event in said)
    assert answers_properly(server_address, dense_bundle / "server")


def test_node_survives_raw_garbage(dense: LocalModel, address: str) -> None:
    for data in garbage(QUERY_MAGIC):
        throw_at(address, data)
    assert dense.predict(X).shape == (2, 2)


@pytest.mark.parametrize(
    "frame",
    [
        *(frame for name, frame in NONE.items() if name != "envelope too long"),
        framed(4 * 2**20 + 1, 0, bytes(4 * 2**20 + 1)),
    ],
    ids=[*(name for name in NONE if name != "envelope too long"), "envelope too long"],
)
def test_node_survives_messages_that_are_none(dense: LocalModel, address: str, frame: bytes) -> None:
    (failure,) = read_node_events(send_raw(address, QUERY_MAGIC, frame))
    assert isinstance(failure, QueryFailure)
    assert failure.code is QueryFailureCode.INPUT
    assert dense.predict(X).shape == (2, 2)


@pytest.mark.parametrize("magic", [SESSION_MAGIC, QUERY_MAGIC], ids=["session", "query"])
def test_magic_of_the_other_party_is_closed_without_a_word(
    dense: LocalModel, address: str, server_address: str, magic: bytes
) -> None:
    other = address if magic == SESSION_MAGIC else server_address
    assert send_raw(other, magic, half=False) == b""
    assert dense.predict(X).shape == (2, 2)


def test_node_survives_an_answer_whose_residues_exceed_the_modulus(dense_bundle: Path, pool: WatchedPool) -> None:
    with parties(dense_bundle, pool) as both:
        honest = both.evaluator.evaluate
        both.evaluator.evaluate = lambda block, x: honest(block, x) * 0 + 2**50 - 1  # type: ignore[method-assign]
        with pytest.raises(HeinferError, match=r"residue|modulus"):
            both.engine.infer({"x": X})
        both.evaluator.evaluate = honest  # type: ignore[method-assign]
        assert both.engine.infer({"x": X}).outputs["y"].shape == (2, 2)
        assert not any(any(secret) for secret in pool.live)


@pytest.mark.slow
def test_server_killed_in_mid_inference_is_an_error_at_once_and_the_node_recovers(
    lenet_bundle: Path, lenet_samples: dict[str, np.ndarray], tmp_path: Path
) -> None:
    x = lenet_samples["x"][:200]
    serve = ("serve", str(lenet_bundle / "server"), "--listen")
    with start(tmp_path / "first", *serve, "127.0.0.1:0") as server:
        listen = server.address
        with (
            start(
                tmp_path / "node",
                "node",
                str(lenet_bundle / "node"),
                "--server",
                listen,
                "--listen",
                "127.0.0.1:0",
                "--retry",
                "1s",
            ) as node,
            connect(node.address) as model,
        ):
            outcome: list[object] = []

            def ask() -> None:
                try:
                    while True:  # one query after the other, so that the server dies in one of them
                        model.predict(x)
                except HeinferError as error:
                    outcome.append(error)

            client = threading.Thread(target=ask)
            client.start()
            time.sleep(0.5)
            assert client.is_alive(), outcome
            killed = time.monotonic()
            os.kill(server.process.pid, signal.SIGKILL)
            client.join(20)
            assert time.monotonic() - killed < 5
            assert len(outcome) == 1
            assert isinstance(outcome[0], HeinferError), outcome
            assert getattr(outcome[0], "code", None) is QueryFailureCode.SERVER
            started = time.monotonic()
            with pytest.raises(HeinferError):
                model.predict(x[:1])
            assert time.monotonic() - started < 5
            assert node.process.poll() is None
            with start(tmp_path / "second", *serve, listen):
                deadline = time.monotonic() + 15
                while True:
                    try:
                        found = model.predict(x[:1])
                        break
                    except HeinferError:
                        assert time.monotonic() < deadline, "the node does not find the server again"
                        time.sleep(0.2)
                assert found.shape == (1, 10)
        assert "Traceback" not in node.said()


def test_plan_hash_is_that_of_both_parties_files(dense_bundle: Path) -> None:
    _, plan_hash = read_plan(dense_bundle)
    assert load_server(dense_bundle / "server").plan_hash == plan_hash == load_node(dense_bundle / "node").plan_hash
    assert hashlib.sha256((dense_bundle / "plan.json").read_bytes()).digest() == plan_hash
