"""All that a server is sent during an inference, taken from the wire by a proxy between the two parties.

Chi-square tests count values in 256 cells. They reject at 1e-7: a test here fails by chance once in a million runs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from heinfer.plan import read_plan
from heinfer.ring import RingParameters, packed_bytes, unpack
from heinfer.wire import BlockRequest, Chunk, Hello, NodeEvent
from heinfer.wire.codec import decode_node_event
from partitioner import partition
from tests.captured_traffic import Proxy, flatten, messages, without_payloads
from tests.parties import WatchedPool, parties
from tests.small_models import convolution_model
from trusted_node.seal import SealContext

RING = RingParameters.default()
SAMPLES, CELLS = 40, 256
#: Above this a chi-square of 255 degrees of freedom is expected once in ten million (Wilson and Hilferty, z = 5.2).
CHI_SQUARE_LIMIT = 255 * (1 - 2 / (9 * 255) + 5.2 * sqrt(2 / (9 * 255))) ** 3
SEAL_HEADER = struct.pack("<HBB", 0xA15E, 16, 4)


def chi_square(cells: np.ndarray) -> float:
    counts = np.bincount(cells.ravel(), minlength=CELLS)
    assert len(counts) == CELLS
    expected = cells.size / CELLS
    return float(((counts - expected) ** 2 / expected).sum())


def high_cells(residues: np.ndarray) -> np.ndarray:
    """Cells of equal width over [0, q)."""
    return (residues * np.float64(CELLS) / RING.modulus).astype(np.int64)


def low_cells(residues: np.ndarray) -> np.ndarray:
    return residues % CELLS


def query(kind: str) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(SAMPLES, 2, 6, 6))
    return (x * {"usual": 1.0, "zero": 0.0, "huge": 1e6}[kind]).astype(np.float32)


@dataclass(frozen=True)
class Capture:
    """One query as it went over the wire, and what the node knew; `rest` is all that is not ciphertext."""

    up: bytes
    events: list[NodeEvent]
    secrets: list[bytes]
    scales: list[np.ndarray]
    rest: bytes
    blocks: int

    def ciphertexts(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return b (rows, samples) and a (rows, N) of one block's upload."""
        (request,) = [e for e in self.events if isinstance(e, BlockRequest) and e.block == block]
        data = b"".join(e.data for e in self.events if isinstance(e, Chunk) and e.request_id == request.request_id)
        packed = np.frombuffer(data, np.uint8).reshape(request.rows, -1)
        head = packed_bytes(request.samples)
        b = unpack(packed[:, :head], request.samples, RING.modulus)
        return b, unpack(packed[:, head:], RING.degree, RING.modulus)

    def all_ciphertexts(self) -> tuple[np.ndarray, np.ndarray]:
        parts = [self.ciphertexts(block) for block in range(self.blocks)]
        return np.concatenate([b for b, _ in parts]), np.concatenate([a for _, a in parts])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convolution")
    partition(convolution_model(folder / "convolution.onnx"), folder / "bundle")
    return folder / "bundle"


def capture(bundle: Path, pool: WatchedPool, x: np.ndarray) -> Capture:
    proxies: list[Proxy] = []
    blocks = len(read_plan(bundle)[0].blocks)

    def through(address: object) -> object:
        proxies.append(Proxy(address))  # type: ignore[arg-type]
        return proxies[0].address

    with parties(bundle, pool, through) as both:
        result = both.engine.infer({"x": x})
        assert np.isfinite(result.outputs["y"]).all()
        assert len(both.evaluator.requests) == blocks
    with proxies[0] as proxy:
        (connection,) = proxy.connections
        up = bytes(connection.up)
    said = [decode_node_event(*message) for message in messages(up)]
    events = [part for event in said for part in flatten(event)]
    return Capture(up, events, list(pool.secrets), list(pool.scales), without_payloads(up), blocks)


@pytest.fixture(scope="module")
def captures(bundle: Path, pool: WatchedPool) -> dict[str, Capture]:
    names = {"usual": "usual", "again": "usual", "zero": "zero", "huge": "huge"}
    return {name: capture(bundle, pool, query(kind)) for name, kind in names.items()}


def test_traffic_is_a_greeting_and_the_uploads_and_nothing_else(captures: dict[str, Capture]) -> None:
    usual = captures["usual"]
    assert isinstance(usual.events[0], Hello)
    assert all(isinstance(event, BlockRequest | Chunk) for event in usual.events[1:])
    payload = sum(len(e.data) for e in usual.events if isinstance(e, Chunk))
    rows = 72 + 48
    assert payload == rows * (packed_bytes(SAMPLES) + packed_bytes(RING.degree))
    # What is not payload: the magic, lengths, envelopes. Less than one in a hundred.
    assert len(usual.up) - payload < payload / 100


def test_traffic_holds_no_key(captures: dict[str, Capture]) -> None:
    for found in captures.values():
        assert len(found.secrets) == found.blocks
        assert all(secret.startswith(SEAL_HEADER) for secret in found.secrets)  # what is looked for is what keys have
        streams = [found.up, b"".join(e.data for e in found.events if isinstance(e, Chunk))]
        for stream in streams:
            assert SEAL_HEADER + b"\x03" not in stream
            assert SEAL_HEADER + b"\x01" not in stream
            for secret in found.secrets:
                windows = {secret[i : i + 16] for i in range(16, len(secret) - 16, 64)}
                assert not any(window in stream for window in windows)


@pytest.mark.parametrize("kind", ["<f8", ">f8"])
def test_traffic_holds_no_scale(captures: dict[str, Capture], kind: str) -> None:
    for name in ("usual", "huge"):
        found = captures[name]
        scales = np.unique(np.concatenate(found.scales))
        assert len(scales) >= SAMPLES  # every sample has its own
        for scale in scales:
            assert np.array(scale, kind).tobytes() not in found.up
        # Four bytes may occur by chance among a million residues; in the rest, some thousand bytes, they do not.
        assert len(found.rest) < 8192
        for scale in scales:
            assert np.array(scale, kind[0] + "f4").tobytes() not in found.rest


@pytest.mark.parametrize("name", ["usual", "zero", "huge"])
def test_traffic_residues_are_uniform(captures: dict[str, Capture], name: str) -> None:
    for residues in captures[name].all_ciphertexts():
        assert residues.size > 4000
        assert chi_square(high_cells(residues)) < CHI_SQUARE_LIMIT
        assert chi_square(low_cells(residues)) < CHI_SQUARE_LIMIT


def decrypted(found: Capture, block: int, secret: bytes) -> np.ndarray:
    """Return b + a s mod q at the coefficients that were sent."""
    b, a = found.ciphertexts(block)
    residues = np.zeros((len(b), 2, RING.degree), np.int64)
    residues[:, 0, : b.shape[1]], residues[:, 1] = b, a
    centred = SealContext(RING).open(secret).decrypt(residues)[:, : b.shape[1]]
    return np.rint(centred).astype(np.int64) % RING.modulus


@pytest.mark.parametrize("name", ["usual", "zero", "huge"])
def test_traffic_is_uniform_again_under_wrong_keys(captures: dict[str, Capture], name: str) -> None:
    found = captures[name]
    for _ in range(3):
        wrong = bytes(SealContext(RING).generate_secret())
        cells = high_cells(np.concatenate([decrypted(found, block, wrong) for block in range(found.blocks)]))
        assert chi_square(cells) < CHI_SQUARE_LIMIT
    # The other block's key is as wrong as any, and the key 0 leaves b as it is (the test above).
    cells = high_cells(decrypted(found, 0, found.secrets[1]))
    assert chi_square(cells) < CHI_SQUARE_LIMIT


def test_traffic_under_the_right_key_is_not_uniform(captures: dict[str, Capture]) -> None:
    """The test above can fail: this is what it looks like when a key is right."""
    found = captures["zero"]
    assert chi_square(high_cells(decrypted(found, 0, found.secrets[0]))) > 10 * CHI_SQUARE_LIMIT


def test_traffic_of_the_same_query_twice_is_unrelated(captures: dict[str, Capture]) -> None:
    first, second = captures["usual"], captures["again"]
    assert len(set(first.secrets + second.secrets)) == 2 * first.blocks
    for one, two in zip(first.all_ciphertexts(), second.all_ciphertexts(), strict=True):
        x, y = (residues.ravel() / RING.modulus - 0.5 for residues in (one, two))
        assert abs(np.corrcoef(x, y)[0, 1]) < 6 / sqrt(x.size)
        assert chi_square(high_cells((one - two) % RING.modulus)) < CHI_SQUARE_LIMIT
        assert not (one == two).any()  # equal residues are expected 2e-10 times


def test_traffic_within_one_upload_has_rows_that_are_unrelated(captures: dict[str, Capture]) -> None:
    b, a = captures["zero"].ciphertexts(0)  # 72 equal messages under one secret
    assert len({row.tobytes() for row in a}) == len(a)
    assert chi_square(high_cells((b[1:] - b[:-1]) % RING.modulus)) < CHI_SQUARE_LIMIT


def shape_of(found: Capture) -> list[tuple[object, ...]]:
    """All that a server sees besides residues: kinds, order, sizes, numbers."""
    shape: list[tuple[object, ...]] = []
    for event in found.events:
        match event:
            case Hello():
                shape.append(("hello", event.plan_hash, event.protocol_version))
            case BlockRequest():
                shape.append(
                    ("request", event.block, event.request_id, event.samples, event.rows, event.attempt, event.mode)
                )
            case Chunk():
                shape.append(("chunk", event.request_id, event.first_row, event.rows, len(event.data)))
    return shape


@pytest.mark.parametrize("name", ["again", "zero", "huge"])
def test_traffic_has_the_same_messages_whatever_the_values(captures: dict[str, Capture], name: str) -> None:
    assert shape_of(captures[name]) == shape_of(captures["usual"])
