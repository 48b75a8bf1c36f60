"""Masks and corrections: exact, each used once, each from a secret of its own, noise in every coefficient.

Chi-square tests reject at 1e-7. The oracle for products with secrets is a plain convolution of integers.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import comb, prod, sqrt
from pathlib import Path

import numpy as np
import onnx
import pytest

from heinfer.errors import LocalProtocolError
from heinfer.operators import HintKind, ResidueProgram
from heinfer.plan import NodeBundle, ServerBundle, block_ring, load_node, load_server, public_polynomials
from heinfer.ring import LANES, NOISE_LIMIT, scratch_array
from partitioner import partition
from tests.partitioner.examples import graph, weights
from tests.small_models import convolution_model
from trusted_node import preparation
from trusted_node.preparation import PreparedQuery, Preparer, _SpareMemory, secret_memory
from trusted_node.sampling import draw_noise, draw_ternary

#: Few samples are prepared polynomial by polynomial, many eight samples at a time: a full group, and a part of one.
SAMPLES = (3, 10)
THREADS = 8
CELLS = 256


def _conv(pads: int = 0, **attributes: object) -> str:
    text = ", ".join(f"{name} = {value}" for name, value in {"pads": [pads] * 4, **attributes}.items())
    return f"Conv<kernel_shape = [3, 3], {text}>"


#: Text of a graph, its constants, and what its one block must look like: kinds of hints, and steps after the weights.
MODELS: dict[str, tuple[str, dict[str, np.ndarray], set[HintKind], list[str]]] = {
    "padding": (
        f"g (float[b,3,9,9] x) => (float y) {{ y = {_conv(1, strides=[2, 2])}(x, w, c) }}",
        {"w": weights(4, 3, 3, 3), "c": weights(4)},
        {HintKind.POLYNOMIAL},
        [],
    ),
    "channels": (
        f"g (float[b,20,16,16] x) => (float y) {{ y = {_conv(1)}(x, w) }}",
        {"w": weights(9, 20, 3, 3)},
        {HintKind.POLYNOMIAL},
        [],
    ),
    "groups": (
        f"g (float[b,4,8,8] x) => (float y) {{ y = {_conv(1, group=2)}(x, w) }}",
        {"w": weights(6, 2, 3, 3)},
        {HintKind.POLYNOMIAL},
        [],
    ),
    "bands": (
        f"g (float[b,1,100,100] x) => (float y) {{ y = {_conv(1)}(x, w) }}",
        {"w": weights(2, 1, 3, 3)},
        {HintKind.POLYNOMIAL},
        ["take"],
    ),
    "tokens": (
        "g (float[b,5,8] x) => (float y) { y = MatMul(x, w) }",
        {"w": weights(8, 6)},
        {HintKind.POLYNOMIAL},
        [],
    ),
    "dense": (
        "g (float[b,3000] x) => (float y) { y = Gemm<transB = 1>(x, w, c) }",  # two ciphertexts
        {"w": weights(5, 3000), "c": weights(5)},
        {HintKind.DENSE},
        [],
    ),
    "elementwise": (
        "g (float[b,40] x) => (float y) { h = Mul(x, w) \n y = Add(h, c) }",
        {"w": weights(40), "c": weights(40)},
        {HintKind.ELEMENTWISE},
        [],
    ),
    "branches": (
        f"g (float[b,2,8,8] x) => (float y) {{ p = {_conv(1)}(x, w)\n"
        "r = Conv<kernel_shape = [1, 1]>(x, v)\n y = Add(p, r) }",
        {"w": weights(3, 2, 3, 3), "v": weights(3, 2, 1, 1)},
        {HintKind.POLYNOMIAL},
        ["sum"],
    ),
    "pooling": (
        f"g (float[b,2,8,8] x) => (float y) {{ p = {_conv(1)}(x, w)\n"
        "y = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(p) }",
        {"w": weights(3, 2, 3, 3)},
        {HintKind.POLYNOMIAL},
        ["window_sum"],
    ),
}


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(freedom: int) -> float:
    """Above this a chi-square is expected once in ten million (Wilson and Hilferty, z = 5.2)."""
    return freedom * (1 - 2 / (9 * freedom) + 5.2 * sqrt(2 / (9 * freedom))) ** 3


def fits_centred_binomial(noise: np.ndarray, edge: int = 8) -> bool:
    """Whether values are distributed like 42 fair bits less 21; values beyond the edges are counted together."""
    count = 2 * NOISE_LIMIT
    probabilities = np.array([comb(count, k) for k in range(count + 1)], np.float64) / 2.0**count
    cells = np.clip(noise, -edge, edge) + edge
    first, last = NOISE_LIMIT - edge, NOISE_LIMIT + edge
    merged = probabilities[first : last + 1].copy()
    merged[0], merged[-1] = probabilities[: first + 1].sum(), probabilities[last:].sum()
    found = np.bincount(cells.ravel(), minlength=2 * edge + 1)
    assert noise.size * merged.min() > 5, "too few values for the test"
    return chi_square(found, noise.size * merged) < chi_square_limit(2 * edge)


def is_uniform(residues: np.ndarray, modulus: int) -> bool:
    assert residues.size > 5 * CELLS, "too few values for the test"
    expected = np.full(CELLS, residues.size / CELLS)
    high = (residues.ravel() * np.float64(CELLS) / modulus).astype(np.int64)
    cells = (high, residues.ravel() % CELLS)
    return all(chi_square(np.bincount(c, minlength=CELLS), expected) < chi_square_limit(CELLS - 1) for c in cells)


def times(a: np.ndarray, s: np.ndarray, modulus: int) -> np.ndarray:
    """Multiply modulo X^N + 1 and q; sums of at most 2**13 residues below 2**49 in magnitude fit into 63 bits."""
    centred = np.where(a > modulus // 2, a - modulus, a)
    whole = np.convolve(centred, s.astype(np.int64))
    product = whole[: len(a)].copy()
    product[:-1] -= whole[len(a) :]
    return product % modulus


def centre(residues: np.ndarray, modulus: int) -> np.ndarray:
    return np.where(residues > modulus // 2, residues - modulus, residues)


@dataclass(frozen=True)
class Case:
    """A model as both parties have it."""

    node: NodeBundle
    server: ServerBundle
    preparer: Preparer

    def positions_times(self, block: int, secret: np.ndarray) -> np.ndarray:
        """Return a s mod q where the block's values lie."""
        assert self.node.hints is not None
        form = self.node.hints.blocks[block].form
        public = public_polynomials(self.node.plan, self.node.plan_hash, self.node.hints.seed, block)
        q = self.node.plan.ring.modulus
        return np.concatenate([times(a, secret, q) for a in public])[form.positions]

    def apply(self, block: int, values: np.ndarray) -> np.ndarray:
        """Run the server's program on residues of one sample."""
        form = self.server.forms[block]
        assert form is not None
        program = ResidueProgram(form.program, {**self.server.arrays, **form.arrays}, block_ring(self.server.plan, 0))
        inputs, first = [], 0
        for shape in form.program.inputs:
            inputs.append(values[first : first + prod(shape)].reshape(1, *shape))
            first += prod(shape)
        return np.concatenate([y.ravel() for y in program.evaluate(inputs)])


def load(folder: Path) -> Case:
    node = load_node(folder / "node")
    return Case(node, load_server(folder / "server"), Preparer(node))


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    text, constants, kinds, after = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    onnx.save(graph(text, constants), folder / "model.onnx")
    partition(folder / "model.onnx", folder / "bundle")
    made = load(folder / "bundle")
    (form,) = (material.form for material in made.preparer.materials)
    assert {hint.kind for hint in form.hints} == kinds  # the model is what its name says
    assert [step.kind for step in form.program.steps if step.kind in ("sum", "window_sum", "take")] == after
    return made


@pytest.fixture(scope="module")
def two_blocks(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("convolution")
    partition(convolution_model(folder / "convolution.onnx"), folder / "bundle")
    return load(folder / "bundle")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Copies of secrets as they are drawn, one array a degree: row `block * samples + sample`."""
    copies: list[np.ndarray] = []

    def draw(count: int, degree: int) -> np.ndarray:
        secrets = draw_ternary(count, degree)
        copies.append(secrets.copy())
        return secrets

    monkeypatch.setattr(preparation, "draw_ternary", draw)
    return copies


def query_of(made: Case, samples: int = 1) -> PreparedQuery:
    return made.preparer.prepare(samples)


def encrypt(query: PreparedQuery, made: Case, block: int = 0, value: float = 0.5) -> np.ndarray:
    material = made.preparer.materials[block]
    elements = int(material.form.gather.max()) + 1
    x = np.full((query.samples, elements), value, np.float32)
    return query.encrypt(block, x, np.full(query.samples, 2.0**20))


def decrypt(query: PreparedQuery, made: Case, block: int = 0) -> np.ndarray:
    down = made.preparer.materials[block].form.values_down
    return query.decrypt(block, np.zeros((query.samples, down), np.int64), np.full(query.samples, 2.0**20))


# --- what masks and corrections are --------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", SAMPLES)
def test_masks_hide_noise_and_nothing_else_padding_included(case: Case, drawn: list[np.ndarray], samples: int) -> None:
    query = query_of(case, samples)
    masks, _ = query.material(0)
    q = case.node.plan.ring.modulus
    assert masks.min() >= 0
    assert masks.max() < q
    (secrets,) = drawn
    assert len(secrets) == samples
    for sample in range(samples):
        noise = centre((masks[sample] + case.positions_times(0, secrets[sample])) % q, q)
        assert np.abs(noise).max() <= NOISE_LIMIT
        assert len(np.unique(noise)) > 3
        # Another sample's secret explains nothing.
        other = (masks[sample] + case.positions_times(0, secrets[(sample + 1) % samples])) % q
        assert (np.abs(centre(other, q)) > NOISE_LIMIT).all()


@pytest.mark.parametrize("samples", SAMPLES)
def test_corrections_are_the_servers_program_on_a_times_s_exactly(
    case: Case, drawn: list[np.ndarray], samples: int
) -> None:
    query = query_of(case, samples)
    _, corrections = query.material(0)
    for sample, secret in enumerate(drawn[0]):
        wanted = case.apply(0, case.positions_times(0, secret))
        assert np.array_equal(corrections[sample], wanted)


def test_every_value_has_a_coefficient_of_its_own(case: Case) -> None:
    assert case.node.hints is not None
    form = case.node.hints.blocks[0].form
    assert len(np.unique(form.positions)) == len(form.positions) == form.values_up
    assert form.positions.max() < form.ciphertexts * form.degree
    public = public_polynomials(case.node.plan, case.node.plan_hash, case.node.hints.seed, 0)
    assert len(np.unique(public)) > 0.999 * public.size  # no polynomial, nor part of one, occurs twice


def test_noise_fits_the_centred_binomial_over_values_and_over_padding(tmp_path: Path, drawn: list[np.ndarray]) -> None:
    text, constants, _, _ = MODELS["padding"]
    onnx.save(graph(text, constants), tmp_path / "model.onnx")
    partition(tmp_path / "model.onnx", tmp_path / "bundle")
    made = load(tmp_path / "bundle")
    samples, q = 120, made.node.plan.ring.modulus
    masks, _ = made.preparer.prepare(samples).material(0)
    noise = np.stack([centre((m + made.positions_times(0, s)) % q, q) for m, s in zip(masks, drawn[0], strict=True)])
    padding = made.preparer.materials[0].form.gather < 0
    assert 100 < padding.sum() < len(padding) - 100
    assert fits_centred_binomial(noise[:, ~padding])
    assert fits_centred_binomial(noise[:, padding])
    assert not fits_centred_binomial(np.zeros_like(noise[:, padding]))  # the test can fail
    at_each = np.abs(noise).max(axis=0)
    assert at_each.min() > 0  # no coefficient is without noise in all samples
    assert np.abs(np.corrcoef(noise[:, padding].T) - np.eye(padding.sum())).max() < 8 / sqrt(samples)


def test_masks_of_two_samples_are_unrelated_and_uniform(two_blocks: Case) -> None:
    q = two_blocks.node.plan.ring.modulus
    one, two = (np.concatenate([query_of(two_blocks, 40).material(b)[0].ravel() for b in (0, 1)]) for _ in range(2))
    assert is_uniform(one, q)
    assert is_uniform((one - two) % q, q)
    first = query_of(two_blocks, 40).material(0)[0]
    assert is_uniform((first[1:] - first[:-1]) % q, q)
    assert abs(np.corrcoef(one / q, two / q)[0, 1]) < 6 / sqrt(one.size)
    assert not (one == two).any()


def test_every_sample_of_every_block_has_a_secret_of_its_own(two_blocks: Case, drawn: list[np.ndarray]) -> None:
    queries = [query_of(two_blocks, samples) for samples in (1, 1, 4, 3)]
    secrets = np.concatenate(drawn)
    blocks, q = len(two_blocks.preparer.materials), two_blocks.node.plan.ring.modulus
    assert len(secrets) == blocks * 9
    assert len(np.unique(secrets, axis=0)) == len(secrets)
    used = set()
    for query in queries:
        for block in range(blocks):
            for mask in query.material(block)[0]:
                fits = [
                    number
                    for number, secret in enumerate(secrets)
                    if np.abs(centre((mask + two_blocks.positions_times(block, secret)) % q, q)).max() <= NOISE_LIMIT
                ]
                assert len(fits) == 1
                used.add(fits[0])
    assert len(used) == len(secrets)  # one mask a secret, one secret a mask


def test_encrypt_adds_rounded_values_to_masks_and_decrypt_undoes_it(two_blocks: Case) -> None:
    query = query_of(two_blocks, 2)
    material = two_blocks.preparer.materials[0]
    masks, corrections = (array.copy() for array in query.material(0))
    x = np.random.default_rng(0).normal(size=(2, 72)).astype(np.float32)
    scale, q = np.array([2.0**20, 2.0**25]), material.ring.modulus
    b = query.encrypt(0, x, scale)
    wanted = np.rint(x.astype(np.float64) * scale[:, None]).astype(np.int64)[:, material.form.gather]
    wanted[:, material.form.gather < 0] = 0
    assert np.array_equal(b, (masks + wanted) % q)
    y = np.concatenate([two_blocks.apply(0, row)[None] for row in b])
    found = query.decrypt(0, y, scale)
    exact = centre((y + corrections) % q, q) / (scale[:, None] * material.scale) + material.bias
    assert np.allclose(found, exact, rtol=2.0**-23, atol=0)


def test_encrypt_padding_is_the_mask_itself(tmp_path: Path) -> None:
    text, constants, _, _ = MODELS["groups"]
    onnx.save(graph(text, constants), tmp_path / "model.onnx")
    partition(tmp_path / "model.onnx", tmp_path / "bundle")
    made = load(tmp_path / "bundle")
    query = query_of(made)
    masks = query.material(0)[0].copy()
    b = encrypt(query, made)
    padding = made.preparer.materials[0].form.gather < 0
    assert padding.sum() > 100
    assert np.array_equal(b[:, padding], masks[:, padding])
    assert (b[:, ~padding] != masks[:, ~padding]).all()


# --- once ----------------------------------------------------------------------------------------------------------


def test_encrypt_twice_is_refused(two_blocks: Case) -> None:
    query = query_of(two_blocks)
    encrypt(query, two_blocks)
    with pytest.raises(LocalProtocolError, match="once"):
        encrypt(query, two_blocks)
    encrypt(query, two_blocks, block=1)  # another block's mask is there still
    with pytest.raises(LocalProtocolError, match="once"):
        encrypt(query, two_blocks, block=1)


def test_decrypt_twice_is_refused(two_blocks: Case) -> None:
    query = query_of(two_blocks)
    encrypt(query, two_blocks)
    decrypt(query, two_blocks)
    with pytest.raises(LocalProtocolError):
        decrypt(query, two_blocks)
    with pytest.raises(LocalProtocolError, match="once"):
        encrypt(query, two_blocks)


def test_decrypt_before_encrypt_is_refused_and_uses_nothing_up(two_blocks: Case) -> None:
    query = query_of(two_blocks)
    encrypt(query, two_blocks, block=1)
    with pytest.raises(LocalProtocolError, match="nothing was encrypted"):
        decrypt(query, two_blocks)
    encrypt(query, two_blocks)
    assert decrypt(query, two_blocks).shape == (1, 48)


def test_encrypt_of_another_number_of_samples_is_refused_and_uses_the_mask_up(two_blocks: Case) -> None:
    query = query_of(two_blocks, 2)
    with pytest.raises(LocalProtocolError, match="2 samples"):
        query.encrypt(0, np.zeros((1, 72), np.float32), np.ones(1))
    with pytest.raises(LocalProtocolError, match="once"):
        encrypt(query, two_blocks)


@pytest.mark.parametrize("started", [False, True], ids=["untouched", "encrypted"])
def test_wiped_query_does_nothing_any_more(two_blocks: Case, started: bool) -> None:
    query = query_of(two_blocks)
    if started:
        encrypt(query, two_blocks)
    query.wipe()
    for act in (encrypt, decrypt):
        for block in (0, 1):
            with pytest.raises(LocalProtocolError):
                act(query, two_blocks, block)
    query.wipe()  # twice does no harm


@pytest.mark.parametrize("act", [encrypt, decrypt])
def test_of_eight_threads_that_race_for_a_mask_one_gets_it(two_blocks: Case, act: Callable[..., np.ndarray]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(25):
            query = query_of(two_blocks)
            if act is decrypt:
                encrypt(query, two_blocks)
            barrier = threading.Barrier(THREADS)

            def race(query: PreparedQuery = query, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait(20)
                try:
                    act(query, two_blocks)
                except LocalProtocolError:
                    return False
                return True

            assert sum(future.result() for future in [threads.submit(race) for _ in range(THREADS)]) == 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_is_refused(two_blocks: Case, protocol: int) -> None:
    query = query_of(two_blocks)
    for thing in (query, [query], {"query": query}):
        with pytest.raises(TypeError, match="copied or pickled"):
            pickle.dumps(thing, protocol)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda q: copy.deepcopy([q]), lambda q: q.__reduce__()])
def test_copy_is_refused(two_blocks: Case, copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="copied or pickled"):
        copied(query_of(two_blocks))


# --- processes and memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [encrypt, decrypt])
def test_another_process_id_is_refused_and_uses_nothing_up(
    two_blocks: Case, monkeypatch: pytest.MonkeyPatch, act: Callable[..., np.ndarray]
) -> None:
    query = query_of(two_blocks)
    if act is decrypt:
        encrypt(query, two_blocks)
    own = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(LocalProtocolError, match="process"):
            act(query, two_blocks)
    act(query, two_blocks)


def in_child(report: Callable[[], int]) -> int:
    """Fork; return what the child reports, a number below 100."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # since Python 3.12 there is one for a process with threads
        pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = report()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


def test_forked_child_can_not_encrypt_and_finds_zeros(two_blocks: Case) -> None:
    query = query_of(two_blocks)
    x, scale = np.ones((1, 72), np.float32), np.ones(1)
    kept = query._memory.copy()
    ordinary = np.ones(10, np.int64)

    def report() -> int:
        refused = 1
        try:
            query.encrypt(0, x, scale)
            refused = 0
        except LocalProtocolError:
            pass
        return refused + 2 * (not query._memory.any()) + 4 * bool(ordinary.all())

    assert in_child(report) == 1 + 2 + 4
    assert np.array_equal(query._memory, kept)  # the parent's is as it was
    encrypt(query, two_blocks)


def test_secret_memory_is_all_that_was_asked_for_and_its_own() -> None:
    one, two = secret_memory(1000), secret_memory(1000)
    assert one.shape == (1000,)
    assert one.dtype == np.int64
    one[:] = 7
    assert not two.any()
    assert secret_memory(0).shape == (0,)


def test_memory_is_zero_after_wipe_but_for_ciphertexts(two_blocks: Case) -> None:
    query = query_of(two_blocks, 2)
    memory = query._memory
    views = [array for block in (0, 1) for array in query.material(block)]
    used = sum(view.size for view in views)
    assert all(np.shares_memory(view, memory[:used]) for view in views)
    assert not memory[used:].any()  # what lengths are rounded up by
    assert all(view.any() for view in views)
    masks = views[0].copy()
    b = encrypt(query, two_blocks)
    assert (b != masks).all()
    sent = b.copy()
    query.wipe()
    assert np.array_equal(memory[: sent.size].reshape(sent.shape), sent)  # what the server has seen anyway
    assert not memory[sent.size :].any()
    assert not any(view.any() for view in views[1:])


@pytest.mark.parametrize("part", ["samples", "answer"])
def test_what_does_not_fit_wipes_what_it_would_have_used(two_blocks: Case, part: str) -> None:
    query = query_of(two_blocks, 2)
    masks, corrections = query.material(0)
    x = np.zeros((3 if part == "samples" else 2, 100), np.float32)
    if part == "samples":
        with pytest.raises(LocalProtocolError):
            query.encrypt(0, x, np.ones(3))
        assert not masks.any()
        return
    encrypt(query, two_blocks)
    with pytest.raises(LocalProtocolError):
        query.decrypt(0, np.zeros((2, corrections.shape[1] + 1), np.int64), np.ones(2))
    assert not corrections.any()


def test_memory_is_used_again_and_overwritten(two_blocks: Case) -> None:
    first = query_of(two_blocks, 2)
    memory, before = first._memory, first._memory.copy()
    first.wipe()
    second = query_of(two_blocks, 2)
    assert second._memory is memory
    assert (memory != before)[memory != 0].all()  # a row of zeros has zeros for corrections
    assert query_of(two_blocks, 2)._memory is not memory


def test_corrections_are_zero_after_decrypt(two_blocks: Case) -> None:
    query = query_of(two_blocks, 2)
    _, corrections = query.material(0)
    _, others = query.material(1)
    encrypt(query, two_blocks)
    assert corrections.any()
    decrypt(query, two_blocks)
    assert not corrections.any()
    assert others.any()


class Watched:
    """Keeps the very arrays that preparation draws, and the queries that it makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.secret: list[np.ndarray] = []
        self.queries: list[PreparedQuery] = []
        self.memories: list[np.ndarray | None] = []
        monkeypatch.setattr(preparation, "draw_ternary", lambda *a: self._keep(draw_ternary(*a)))
        monkeypatch.setattr(preparation, "draw_noise", lambda *a: self._keep(draw_noise(*a)))
        monkeypatch.setattr(preparation, "PreparedQuery", self._query)

    def _keep(self, array: np.ndarray) -> np.ndarray:
        self.secret.append(array)
        return array

    def _query(self, *arguments: object) -> PreparedQuery:
        query = PreparedQuery(*arguments)  # type: ignore[arg-type]
        self.queries.append(query)
        self.memories.append(query._memory)
        return query


def scratch_left(degree: int = 2048) -> bool:
    """Whether this thread's scratch memory holds anything."""
    return any(scratch_array(name, degree, LANES).any() for name in ("secrets", "products"))


def test_prepare_leaves_no_secret_behind(two_blocks: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    two_blocks.preparer.prepare(3, threads=1)
    assert len(watched.secret) == 1 + 2 * 3  # all secrets at once; the noise of two blocks of three samples
    assert not any(array.any() for array in watched.secret)
    assert not scratch_left()


@pytest.mark.parametrize("case", ["bands", "branches", "pooling"], indirect=True)
def test_prepare_leaves_nothing_of_what_follows_the_weights(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    (material,) = case.preparer.materials
    left: list[np.ndarray] = []

    def keeping(run: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def keep(values: list[np.ndarray]) -> np.ndarray:
            left.extend(values)
            made = run(values)
            left.append(made)
            assert made.any()
            return made

        return keep

    monkeypatch.setattr(material, "after", [(number, keeping(run)) for number, run in material.after])
    assert query_of(case).material(0)[1].any()
    assert not any(array.any() for array in left)


@pytest.mark.parametrize("function", ["make_masks", "make_polynomial_corrections", "make_dense_corrections"])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("samples", [3, 20])
def test_failure_in_the_middle_of_prepare_wipes_what_was_made(
    two_blocks: Case, monkeypatch: pytest.MonkeyPatch, function: str, threads: int, samples: int
) -> None:
    watched = Watched(monkeypatch)
    real, calls = getattr(preparation, function), []

    def fail_later(*arguments: object) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError("as in the middle of a query")
        real(*arguments)

    monkeypatch.setattr(preparation, function, fail_later)
    with pytest.raises(MemoryError):
        two_blocks.preparer.prepare(samples, threads=threads)
    (query,), memories = watched.queries, watched.memories
    assert query._memory is None
    assert memories[0] is not None
    assert not memories[0].any()
    with pytest.raises(LocalProtocolError):
        encrypt(query, two_blocks)
    assert not any(array.any() for array in watched.secret)
    if threads == 1:
        assert not scratch_left()
    calls.extend([None] * 3)
    assert query_of(two_blocks).material(0)[0].any()  # the next one is prepared as if nothing had been


def test_prepare_from_eight_threads_makes_queries_that_are_right(two_blocks: Case, drawn: list[np.ndarray]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        queries = [f.result() for f in [threads.submit(query_of, two_blocks) for _ in range(16)]]
    secrets, q = np.concatenate(drawn), two_blocks.node.plan.ring.modulus
    assert len(np.unique(secrets, axis=0)) == 32
    products = [two_blocks.positions_times(0, secret) for secret in secrets]
    for query in queries:
        mask, correction = (array[0] for array in query.material(0))
        fits = [p for p in products if np.abs(centre((mask + p) % q, q)).max() <= NOISE_LIMIT]
        assert len(fits) == 1
        assert np.array_equal(correction, two_blocks.apply(0, fits[0]))


def test_spare_memory_serves_other_lengths_so_that_little_is_kept_for_groups_of_all_sizes() -> None:
    spare = _SpareMemory()
    for words in range(1, 65):
        memory = spare.take(100 * words)
        assert 100 * words <= len(memory) <= 150 * words + 1
        spare.give_back(memory)
    assert sum(map(len, spare._kept.values())) < 16
    assert spare._bytes == sum(memory.nbytes for kept in spare._kept.values() for memory in kept)
    one, two = spare.take(1000), spare.take(1000)
    assert not np.shares_memory(one, two)
    assert len(spare.take(5 * 2**20 + 1)) == 5 * 2**20 + 1
