"""All that a server is sent during an inference in prepared mode, taken from the wire by a proxy between the parties.

Chi-square tests count values in 256 cells. They reject at 1e-7: a test here fails by chance once in a million runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path

import numpy as np
import pytest

from heinfer.plan import load_node, public_polynomials, read_plan
from heinfer.ring import NOISE_LIMIT, RingParameters, pack, unpack
from heinfer.wire import BlockRequest, Chunk, Hello, Mode, NodeEvent
from heinfer.wire.codec import decode_node_event
from partitioner import partition
from tests.captured_traffic import Proxy, flatten, messages, without_payloads
from tests.parties import WatchedPool, parties
from tests.small_models import logarithm_model, padded_model
from trusted_node import preparation, prepared_uploads
from trusted_node.engine import DataError
from trusted_node.modes import ModeChoice
from trusted_node.sampling import draw_ternary
from trusted_node.scaling import scale_samples

RING = RingParameters.default()
SAMPLES, CELLS = 40, 256
#: Residues of one sample, block by block: two planes of 8 x 8, padding included; 3 x 6 x 6.
VALUES = (2 * 8 * 8, 3 * 6 * 6)
#: Above this a chi-square of 255 degrees of freedom is expected once in ten million (Wilson and Hilferty, z = 5.2).
CHI_SQUARE_LIMIT = 255 * (1 - 2 / (9 * 255) + 5.2 * sqrt(2 / (9 * 255))) ** 3
#: Bytes of a window of secret material that is looked for: by chance it occurs once in 2**100 places.
WINDOW = 16


def row_bytes(values: int) -> int:
    """Bytes of one sample: packs of 32 residues take 200 bytes."""
    return -(-values // 32) * 200


def chi_square(residues: np.ndarray) -> float:
    """The larger statistic of the highest and of the lowest bits."""
    assert residues.size > 4000
    high = (residues.ravel() * np.float64(CELLS) / RING.modulus).astype(np.int64)
    expected = residues.size / CELLS
    found = (np.bincount(cells, minlength=CELLS) for cells in (high, residues.ravel() % CELLS))
    return max(float(((counts - expected) ** 2 / expected).sum()) for counts in found)


def is_uniform(residues: np.ndarray) -> bool:
    return chi_square(residues) < CHI_SQUARE_LIMIT


def query(kind: str) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(SAMPLES, 2, 6, 6))
    return (x * {"usual": 1.0, "zero": 0.0, "huge": 1e6}[kind]).astype(np.float32)


@dataclass(frozen=True)
class Capture:
    """One query as it went over the wire, and what the node knew; `rest` is all that is not payload.

    `secrets` holds one row a sample of a block, block after block.
    """

    up: bytes
    events: list[NodeEvent]
    secrets: np.ndarray
    scales: list[np.ndarray]
    rest: bytes

    @property
    def payload(self) -> bytes:
        return b"".join(event.data for event in self.events if isinstance(event, Chunk))

    def residues(self, block: int) -> np.ndarray:
        """Return what was sent for a block, shape (samples, values)."""
        (request,) = [e for e in self.events if isinstance(e, BlockRequest) and e.block == block]
        data = b"".join(e.data for e in self.events if isinstance(e, Chunk) and e.request_id == request.request_id)
        packed = np.frombuffer(data, np.uint8).reshape(request.samples, -1)
        return unpack(packed, VALUES[block], RING.modulus)

    def all_residues(self) -> np.ndarray:
        return np.concatenate([self.residues(block).ravel() for block in range(len(VALUES))])

    def block_secrets(self, block: int) -> np.ndarray:
        return self.secrets[block * SAMPLES : (block + 1) * SAMPLES]


@dataclass(frozen=True)
class Setting:
    """A bundle, and what of it is public or the node's."""

    bundle: Path
    public: list[np.ndarray]
    positions: list[np.ndarray]
    padding: list[np.ndarray]
    seed: bytes

    def decrypted(self, found: Capture, block: int, secrets: np.ndarray) -> np.ndarray:
        """Return b + a s mod q for every sample and its secret."""
        b = found.residues(block)
        return np.stack([(row + self.times(block, s)) % RING.modulus for row, s in zip(b, secrets, strict=True)])

    def times(self, block: int, secret: np.ndarray) -> np.ndarray:
        """Return a s mod q, modulo X^N + 1, where the block's values lie: sums below 2**61 of centred residues."""
        parts = []
        for a in self.public[block]:
            whole = np.convolve(np.where(a > RING.modulus // 2, a - RING.modulus, a), secret.astype(np.int64))
            product = whole[: RING.degree].copy()
            product[:-1] -= whole[RING.degree :]
            parts.append(product % RING.modulus)
        return np.concatenate(parts)[self.positions[block]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("padded")
    partition(padded_model(folder / "model.onnx", seed=11, deviation=1.0), folder / "bundle")
    node = load_node(folder / "bundle" / "node")
    assert node.hints is not None
    forms = [block.form for block in node.hints.blocks]
    assert tuple(form.values_up for form in forms) == VALUES
    assert {form.degree for form in forms} == {RING.degree}
    return Setting(
        folder / "bundle",
        [public_polynomials(node.plan, node.plan_hash, node.hints.seed, block) for block in (0, 1)],
        [form.positions for form in forms],
        [form.gather < 0 for form in forms],
        node.hints.seed,
    )


def capture(bundle: Path, pool: WatchedPool, x: np.ndarray, fails: bool = False) -> Capture:
    """Run a query on masks that are all prepared for it, and watch."""
    proxies: list[Proxy] = []
    secrets: list[np.ndarray] = []
    scales: list[np.ndarray] = []

    def through(address: object) -> object:
        proxies.append(Proxy(address))  # type: ignore[arg-type]
        return proxies[0].address

    def draw(count: int, degree: int) -> np.ndarray:
        drawn = draw_ternary(count, degree)
        secrets.append(drawn.copy())
        return drawn

    def choose(*arguments: object) -> object:
        made = scale_samples(*arguments)  # type: ignore[arg-type]
        scales.append(made.scale.copy())
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "draw_ternary", draw)
        patch.setattr(prepared_uploads, "scale_samples", choose)
        with parties(bundle, pool, through, mode=ModeChoice.PREPARED, ready=0) as both:
            if fails:
                with pytest.raises(DataError):
                    both.engine.infer({"x": x})
            else:
                result = both.engine.infer({"x": x})
                assert np.isfinite(result.outputs["y"]).all()
                assert result.statistics.mode == "prepared"
            assert both.evaluator.requests == []
    (made,) = secrets
    with proxies[0] as proxy:
        (connection,) = proxy.connections
        up = bytes(connection.up)
    said = [decode_node_event(*message) for message in messages(up)]
    events = [part for event in said for part in flatten(event)]
    return Capture(up, events, made, scales, without_payloads(up))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def captures(setting: Setting, pool: WatchedPool) -> dict[str, Capture]:
    """In this order: the secrets of `usual` are old ones when `again` runs."""
    names = {"usual": "usual", "again": "usual", "zero": "zero", "huge": "huge"}
    return {name: capture(setting.bundle, pool, query(kind)) for name, kind in names.items()}


def test_traffic_is_a_greeting_and_b_alone(captures: dict[str, Capture]) -> None:
    for found in captures.values():
        assert isinstance(found.events[0], Hello)
        assert [type(event) for event in found.events[1:]] == [BlockRequest, Chunk] * 2
        requests = [event for event in found.events if isinstance(event, BlockRequest)]
        assert [(r.block, r.samples, r.mode, r.attempt) for r in requests] == [
            (block, SAMPLES, Mode.PREPARED, 0) for block in (0, 1)
        ]
        for request in requests:
            sizes = [len(e.data) for e in found.events if isinstance(e, Chunk) and e.request_id == request.request_id]
            assert sum(sizes) == SAMPLES * row_bytes(VALUES[request.block])
        # What is not payload: the magic, lengths, envelopes.
        assert len(found.up) - len(found.payload) < 4096


def test_traffic_fills_packs_with_zeros(captures: dict[str, Capture]) -> None:
    """A row is made of whole packs; what is beyond its last value carries nothing."""
    found = captures["usual"]
    (request,) = [e for e in found.events if isinstance(e, BlockRequest) and e.block == 1]
    data = b"".join(e.data for e in found.events if isinstance(e, Chunk) and e.request_id == request.request_id)
    rows = unpack(np.frombuffer(data, np.uint8).reshape(SAMPLES, -1), 128, RING.modulus)
    assert not rows[:, VALUES[1] :].any()
    assert rows[:, : VALUES[1]].all()


def windows(data: bytes, step: int = 8) -> set[bytes]:
    return {data[i : i + WINDOW] for i in range(0, len(data) - WINDOW + 1, step)}


def test_traffic_holds_no_a(setting: Setting, captures: dict[str, Capture]) -> None:
    for found in captures.values():
        for public in setting.public:
            for form in (pack(public).tobytes(), public.astype("<i8").tobytes(), public.astype(">i8").tobytes()):
                assert not any(window in found.up for window in windows(form, 200))
        for block in (0, 1):
            sent = found.residues(block)
            assert not np.isin(sent, setting.public[block]).any()


def test_traffic_holds_no_secret_and_no_seed(setting: Setting, captures: dict[str, Capture]) -> None:
    for found in captures.values():
        assert found.secrets.shape == (2 * SAMPLES, RING.degree)
        for stream in (found.up, found.payload):
            for secret in found.secrets[:: SAMPLES // 4]:
                shifted = (secret + 1).astype(np.uint8)
                for form in (secret.tobytes(), shifted.tobytes(), np.packbits(secret != 0).tobytes()):
                    assert not any(window in stream for window in windows(form, 64))
            assert not any(window in stream for window in windows(setting.seed, 1))


@pytest.mark.parametrize("kind", ["<f8", ">f8"])
def test_traffic_holds_no_scale(captures: dict[str, Capture], kind: str) -> None:
    for name in ("usual", "huge"):
        found = captures[name]
        scales = np.unique(np.concatenate(found.scales))
        assert len(scales) >= SAMPLES  # every sample has its own
        assert len(found.rest) < 4096
        for scale in scales:
            assert np.array(scale, kind).tobytes() not in found.up
            assert np.array(scale, kind[0] + "f4").tobytes() not in found.rest


@pytest.mark.parametrize("name", ["usual", "again", "zero", "huge"])
def test_traffic_residues_are_uniform(setting: Setting, captures: dict[str, Capture], name: str) -> None:
    found = captures[name]
    for block in (0, 1):
        assert is_uniform(found.residues(block))
    together = np.concatenate([captures[name].residues(0)[:, setting.padding[0]] for name in captures])
    assert is_uniform(together)  # padding alone
    assert len(np.unique(found.all_residues())) == found.all_residues().size  # no mask twice, no two values alike


@pytest.mark.parametrize("name", ["usual", "zero", "huge"])
def test_traffic_is_uniform_still_under_wrong_secrets(
    setting: Setting, captures: dict[str, Capture], name: str
) -> None:
    found = captures[name]
    old = captures["zero" if name == "huge" else "usual" if name == "zero" else "again"]
    for block in (0, 1):
        right, other = found.block_secrets(block), found.block_secrets(1 - block)
        wrong = {
            "fresh": draw_ternary(SAMPLES, RING.degree),
            "zero": np.zeros_like(right),
            "of the other upload": other,
            "of the next sample": np.roll(right, 1, axis=0),
            "of another query": old.block_secrets(block),
            "negated": -right,
        }
        for kind, secrets in wrong.items():
            assert is_uniform(setting.decrypted(found, block, secrets)), kind


def test_traffic_under_the_right_secrets_is_the_values_and_noise(
    setting: Setting, captures: dict[str, Capture]
) -> None:
    """The tests above can fail: this is what it looks like when a secret is right."""
    for block in (0, 1):
        for name, found in captures.items():
            plain = setting.decrypted(found, block, found.block_secrets(block))
            centred = np.where(plain > RING.modulus // 2, plain - RING.modulus, plain)
            assert np.abs(centred[:, setting.padding[block]]).max(initial=0) <= NOISE_LIMIT
            if name == "zero" and block == 0:
                assert np.abs(centred).max() <= NOISE_LIMIT
            # In block 1 many values are zero after Relu: noise alone.
            assert chi_square(plain) > 2 * CHI_SQUARE_LIMIT


def test_traffic_has_noise_in_every_coefficient(setting: Setting, captures: dict[str, Capture]) -> None:
    found = captures["zero"]
    plain = setting.decrypted(found, 0, found.block_secrets(0))
    noise = np.where(plain > RING.modulus // 2, plain - RING.modulus, plain)
    assert np.abs(noise).max(axis=0).min() > 0  # 40 samples of noise zero at one place: once in 1e36
    for part in (noise[:, setting.padding[0]], noise[:, ~setting.padding[0]]):
        assert part.size > 1000
        deviation, error = sqrt(NOISE_LIMIT / 2), sqrt(NOISE_LIMIT / 2) / sqrt(2 * part.size)
        assert abs(part.std() - deviation) < 6 * error
        assert abs(part.mean()) < 6 * deviation / sqrt(part.size)


def test_traffic_of_the_same_query_twice_is_unrelated(captures: dict[str, Capture]) -> None:
    first, second = captures["usual"], captures["again"]
    one, two = first.all_residues(), second.all_residues()
    assert abs(np.corrcoef(one / RING.modulus, two / RING.modulus)[0, 1]) < 6 / sqrt(one.size)
    assert is_uniform((one - two) % RING.modulus)
    assert not np.isin(one, two).any()  # equal residues are expected 1e-7 times
    secrets = np.concatenate([found.secrets for found in captures.values()])
    assert len(np.unique(secrets, axis=0)) == len(secrets) == 4 * 2 * SAMPLES


def test_traffic_of_samples_of_one_query_is_unrelated(captures: dict[str, Capture]) -> None:
    b = captures["zero"].residues(0)  # forty equal samples
    assert is_uniform((b[1:] - b[:-1]) % RING.modulus)
    assert is_uniform((b[:, 1:] - b[:, :-1]) % RING.modulus)  # and equal values of one sample


def shape_of(found: Capture) -> list[tuple[object, ...]]:
    """All that a server sees besides residues: kinds, order, sizes, numbers."""
    shape: list[tuple[object, ...]] = []
    for event in found.events:
        match event:
            case Hello():
                shape.append(("hello", event.plan_hash, event.protocol_version))
            case BlockRequest():
                numbers = (event.block, event.request_id, event.samples, event.rows, event.attempt, event.mode)
                shape.append(("request", *numbers))
            case Chunk():
                shape.append(("chunk", event.request_id, event.first_row, event.rows, len(event.data)))
    return shape


@pytest.mark.parametrize("name", ["again", "zero", "huge"])
def test_traffic_has_the_same_messages_whatever_the_values(captures: dict[str, Capture], name: str) -> None:
    assert shape_of(captures[name]) == shape_of(captures["usual"])


def test_traffic_has_the_same_messages_where_values_inside_are_nan(tmp_path: Path, pool: WatchedPool) -> None:
    partition(logarithm_model(tmp_path / "model.onnx"), tmp_path / "bundle")
    plan, _ = read_plan(tmp_path / "bundle")
    good = np.full((SAMPLES, 3), 0.3, np.float32)
    one, all_bad = good.copy(), np.full_like(good, -5)
    one[7] = -5  # the logarithm of a negative number
    usual = capture(tmp_path / "bundle", pool, good)
    sizes = [sum(map(prod, (t.shape for t in block.inputs))) for block in plan.blocks]
    assert len(usual.payload) == SAMPLES * sum(map(row_bytes, sizes))
    for x in (one, all_bad):
        found = capture(tmp_path / "bundle", pool, x, fails=True)
        assert shape_of(found) == shape_of(usual)
        assert len(found.up) - len(found.payload) < 4096
