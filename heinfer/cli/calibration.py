"""Measure what a machine takes for the parts of a query: the constants of `heinfer.plan.machine.Machine`.

Two models made for it run under encryption as real ones do: client, node and server, processes of their own. In the
first, twelve blocks of few values show what every step, block and exchange of messages costs. In the second each block
is dominated by one thing: values, products, a large result, weights that come from memory. What the first has shown is
taken off, and what is left is shared out. What the node's statistics don't part (transforms, dense hints, masks, SEAL,
onnxruntime), and all that deep blocks do with SEAL, is measured by calling it, on all cores where queries do. All are
medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import heinfer
from heinfer.client.environment import machine_name
from heinfer.plan import Block, NodeStep, Plan, read_bundle_plan
from heinfer.plan.execution import open_session
from heinfer.plan.forecast import forecast
from heinfer.plan.machine import SHIPPED, Machine
from heinfer.plan.work import weight_count
from heinfer.processes import core_count
from heinfer.ring import COEFFICIENT_BYTES, LANES, THREADED_WORK, RingParameters, Transform, pack, run_tiles, unpack
from heinfer.ring.chain import choose_chain
from heinfer.server.polynomial.arithmetic import Cipher, SealArithmetic, open_chain
from trusted_node.deep import DeepContext
from trusted_node.deep_workers import unpack_chain
from trusted_node.masking import make_dense_corrections, make_masks, make_polynomial_corrections, tables_of
from trusted_node.sampling import draw_noise
from trusted_node.scaling import sample_peaks
from trusted_node.seal import SealContext

_QUERIES: Final = 24
#: Times that a measurement in this process is repeated.
_REPETITIONS: Final = 7
#: Operators of the step that shows what one costs.
_OPERATORS: Final = 16
#: Primes of a deep block of two squares.
_CHAIN_BITS: Final = (50, 24, 34, 34, 34, 34)
Costs = dict[str, float]
Tell = Callable[[str, int, int], None]


def calibrate(progress: Tell | None = None) -> Machine:
    """Measure this machine, in less than a minute.

    Args:
        progress: called with (phase, done, total).
    """
    tell = progress or (lambda phase, done, total: None)
    tell("kernels", 0, 1)
    found = _kernel_costs() | _chain_costs() | _operator_costs()
    tell("kernels", 1, 1)
    small = _measure(_small_model(), lambda done: tell("small blocks", done, _QUERIES))
    found |= _fixed_costs(small, found)
    large = _measure(_large_model(), lambda done: tell("large blocks", done, _QUERIES))
    found |= _size_costs(large, found)
    machine = Machine(name=machine_name(), cores=core_count(), preparation_s=0.0, **found)
    known = forecast(small.plan, "prepared", 1, machine).preparation_s
    return replace(machine, preparation_s=_left(small.background_s, known) * machine.cores / len(small.plan.blocks))


# --- in this process -----------------------------------------------------------------------------------------------


def _timed(function: Callable[[], object]) -> float:
    """Return the median seconds of calls, after one that compiles."""
    function()
    times = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return median(times)


def _core_seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one core that a call takes while all cores are at it, as in preparation."""
    cores, tiles = core_count(), 4 * core_count()
    return _timed(lambda: run_tiles(lambda _: function(), range(tiles))) * cores / tiles


def _kernel_costs() -> Costs:
    """Time products with secrets, masks and SEAL."""
    parameters = RingParameters.default()
    degree, rows = parameters.degree, 8 * LANES
    levels, coefficients = degree.bit_length() - 1, rows * degree
    generator = np.random.default_rng(0)
    transform = Transform.of(parameters)
    tables = tables_of(transform)
    residues = generator.integers(0, parameters.modulus, (rows, degree))
    hints = transform.forward(residues)
    secrets = np.abs(transform.forward(np.ones((LANES, degree), np.int8))[0])
    elements = np.arange(coefficients, dtype=np.int32).reshape(rows, degree)
    reads = np.zeros(1, np.int64)
    signs = -generator.integers(0, 2, (2, 1, degree))

    def multiply() -> None:
        scratch, out = np.empty((2, degree, LANES)), np.empty((1, rows), np.int64)
        make_polynomial_corrections(hints, rows, secrets, tables, reads, 1, 1, scratch[0], scratch[1], out)

    def mask() -> None:
        scratch, out = np.empty((2, degree, LANES)), np.empty((1, coefficients), np.int64)
        noise = draw_noise(coefficients).reshape(1, -1)
        make_masks(hints, secrets, tables, elements, noise, scratch[0], scratch[1], out)

    def sum_up() -> None:
        make_dense_corrections(residues, signs[0], signs[1], parameters.modulus, np.empty((1, rows), np.int64))

    products_s = _core_seconds(multiply)
    return {
        "transform_s": products_s / (coefficients * levels),
        "mask_s": _left(_core_seconds(mask), products_s) / coefficients,
        "dense_s": _core_seconds(sum_up) / coefficients,
        "seal_s": _seal_cost(parameters, residues[:LANES] // 4),
    }


def _seal_cost(parameters: RingParameters, integers: NDArray[np.int64]) -> float:
    """Return the seconds of a coefficient of a ciphertext that is encrypted or decrypted."""
    seal, (count, degree) = SealContext(parameters), integers.shape
    secret = seal.open(seal.generate_secret())

    def both_ways() -> None:
        packed = pack(secret.encrypt(integers).reshape(2 * count, degree))
        secret.decrypt(unpack(packed, degree, parameters.modulus).reshape(count, 2, degree))

    return _timed(both_ways) / (2 * integers.size)


def _chain_costs() -> Costs:
    """Time what deep blocks do with SEAL: a ciphertext of a chain of two squares, from one query."""
    parameters = choose_chain(_CHAIN_BITS)
    primes, degree = len(parameters.primes), parameters.degree
    context = DeepContext(parameters)
    secret, scale = context.open(context.generate_secret()), 2.0**32
    encrypted = secret.encrypt(np.full((1, 1), 0.5), scale)
    packed = pack(encrypted.reshape(-1, degree)).tobytes()
    chain = open_chain(parameters)
    arithmetic = SealArithmetic(chain, chain.load_keys(secret.make_keys()))
    value = Cipher(chain.load(encrypted[0], scale), primes, scale)

    def seal() -> None:
        pack(secret.encrypt(np.full((1, 1), 0.5), scale).reshape(-1, degree)).tobytes()
        secret.decrypt(unpack_chain(packed, parameters.primes, degree), scale, 1)

    rescale_s = _timed(lambda: arithmetic.rescale(value))

    def relinearise() -> None:  # which is in place, so that each time needs another product
        arithmetic.rescale(arithmetic.multiply(value, value))

    multiply_s = _timed(lambda: arithmetic.multiply(value, value))
    pair = 2 * primes * degree
    return {
        "chain_seal_s": _timed(seal) / (2 * pair),
        "pass_s": _timed(lambda: chain.dump(chain.load(encrypted[0], scale))) / (2 * pair),
        "combine_s": multiply_s / (3 * primes * degree),
        "rescale_s": rescale_s / pair,
        "switch_s": _left(_timed(relinearise), multiply_s + rescale_s) / (pair * (primes + 1)),
    }


def _operator_costs() -> Costs:
    """Time onnxruntime: operators on few values, and on many."""
    few, many = np.zeros((1, 16), np.float32), np.zeros((1, 128, 32, 32), np.float32)
    names = ["Tanh", "Sin"] * (_OPERATORS // 2)
    one, chain = (_session([helper.make_node(n, [], []) for n in part], few.shape) for part in (names[:1], names))
    pooling = helper.make_node("MaxPool", [], [], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    large = _session([pooling, helper.make_node("Relu", [], [])], many.shape)

    def run_many() -> None:
        sample_peaks(large(many))

    operator_s = _left(_timed(lambda: [chain(few) for _ in range(100)]), _timed(lambda: [one(few) for _ in range(100)]))
    return {"operator_s": operator_s / 100 / (len(names) - 1), "step_value_s": _timed(run_many) / (2 * many.size)}


def _session(nodes: Sequence[onnx.NodeProto], shape: tuple[int, ...]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that runs nodes one after the other."""
    for i, node in enumerate(nodes):
        node.input[:], node.output[:] = [f"v{i}"], [f"v{i + 1}"]
    session = open_session(_assembled(nodes, {"v0": shape}, {}).SerializeToString(), core_count())
    return lambda x: session.run(None, {"v0": x})[0]


# --- under encryption ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    """Queries of one sample whose masks were prepared before: the plan, statistics, seconds of each."""

    plan: Plan
    answers: list[dict[str, Any]]
    seconds: list[float]

    @property
    def background_s(self) -> float:
        """Seconds of preparing a sample."""
        return float(median(answer["background_s"] for answer in self.answers))

    @property
    def operators_s(self) -> float:
        """Seconds of the node's own operators."""
        return float(median(answer["node_s"] for answer in self.answers))

    @property
    def elsewhere_s(self) -> float:
        """Seconds that neither party computes: messages on their way, processes that wake up."""
        parts = ("encrypt_s", "decrypt_s", "server_s")
        away = [sum(block[part] for block in answer["blocks"] for part in parts) for answer in self.answers]
        pairs = zip(self.seconds, self.answers, away, strict=True)
        return float(median(seconds - answer["node_s"] - parties for seconds, answer, parties in pairs))

    def block_s(self, block: int, part: str) -> float:
        """Seconds of a part of a block."""
        return float(median(answer["blocks"][block][part] for answer in self.answers))


def _measure(model: onnx.ModelProto, tell: Callable[[int], None]) -> _Measured:
    """Partition a model, start both parties, wait until all queries are prepared, and ask them."""
    with TemporaryDirectory() as folder:
        path, bundle = Path(folder) / "model.onnx", Path(folder) / "bundle"
        onnx.save(model, path)
        heinfer.partition(path, bundle, reference=False)
        plan = read_bundle_plan(bundle)
        generator = np.random.default_rng(1)
        x = {t.name: generator.normal(size=(1, *t.shape)).astype(np.float32) for t in plan.inputs}
        answers, seconds = [], []
        with heinfer.local(bundle, mode="prepared", prepared=_QUERIES + 1) as served:
            served.predict(x)
            for done in range(_QUERIES):
                started = time.perf_counter()
                answers.append(served.query(x, statistics=True).statistics)
                seconds.append(time.perf_counter() - started)
                tell(done + 1)
    return _Measured(plan, answers, seconds)


class _Chain:
    """A model of operators one after the other, with drawn weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self._generator = np.random.default_rng(0)

    def add(self, operator: str, weights: tuple[int, ...] = (), **attributes: Any) -> None:
        """Append an operator; names count from v0, and a block's is that of its operator."""
        number = len(self.nodes)
        sources = [f"v{number}"]
        if weights:
            inputs = weights[0] if operator == "Gemm" else int(np.prod(weights[1:]))
            self.constants[f"w{number}"] = self._generator.normal(0, inputs**-0.5, weights).astype(np.float32)
            sources.append(f"w{number}")
        self.nodes.append(helper.make_node(operator, sources, [f"v{number + 1}"], name=f"n{number}", **attributes))

    def model(self, shape: tuple[int, ...]) -> onnx.ModelProto:
        """Return the model for one sample of a shape."""
        return _assembled(self.nodes, {"v0": (1, *shape)}, self.constants)


def _assembled(
    nodes: Sequence[onnx.NodeProto], inputs: dict[str, tuple[int, ...]], constants: dict[str, NDArray[Any]]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "calibration",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def _small_model() -> onnx.ModelProto:
    """Twelve blocks of at most 400 values: convolutions, then dense layers."""
    chain = _Chain()
    for _ in range(6):
        chain.add("Conv", (4, 4, 3, 3), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        chain.add("Relu")
    chain.add("Flatten")
    chain.add("Gemm", (256, 16))
    for _ in range(5):
        chain.add("Tanh")
        chain.add("Gemm", (16, 16))
    return chain.model((4, 8, 8))


#: Blocks of `_large_model`: convolutions, the one with the largest result, the dense layer with most weights.
_CONVOLUTIONS, _RESULT, _WEIGHTS = range(4), 3, 5


def _large_model() -> onnx.ModelProto:
    """Convolutions of few products and of many, one with half a million results, and a dense layer of 8 MB."""
    chain = _Chain()
    chain.add("Conv", (8, 64, 1, 1), kernel_shape=[1, 1])
    chain.add("Relu")
    chain.add("Conv", (64, 8, 3, 3), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    chain.add("Relu")
    chain.add("Conv", (64, 64, 3, 3), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    chain.add("Relu")
    chain.add("Conv", (512, 64, 1, 1), kernel_shape=[1, 1])
    chain.add("Relu")
    chain.add("GlobalMaxPool")
    chain.add("Flatten")
    chain.add("Gemm", (512, 1024))
    chain.add("Relu")
    chain.add("Gemm", (1024, 1024))
    return chain.model((64, 32, 32))


def _fixed_costs(measured: _Measured, found: Costs) -> Costs:
    """Find what a step, a block and an exchange cost, whatever their sizes."""
    plan = measured.plan
    steps = sum(isinstance(step, NodeStep) for step in plan.steps)
    costs = {field.name: 0.0 for field in fields(SHIPPED) if field.name.endswith("_s")} | found
    known = forecast(plan, "prepared", 1, Machine(name="", cores=1, **costs)).operators_s
    blocks = range(len(plan.blocks))
    return {
        "step_s": _left(measured.operators_s, known) / steps,
        "exchange_s": measured.elsewhere_s / (plan.rounds + 1),
        "node_block_s": median(measured.block_s(i, "encrypt_s") + measured.block_s(i, "decrypt_s") for i in blocks),
        "server_block_s": median(measured.block_s(i, "server_s") for i in blocks),
    }


def _size_costs(measured: _Measured, found: Costs) -> Costs:
    """Share out the seconds of large blocks among values, products, weights and bytes."""
    blocks, cores = measured.plan.blocks, core_count()
    up, down = [_up(block) for block in blocks], [_down(block) for block in blocks]
    products = [block.program.multiply_adds() for block in blocks]
    server = [_left(measured.block_s(i, "server_s"), found["server_block_s"]) for i in range(len(blocks))]
    spread = [count / (cores if 2 * count >= THREADED_WORK else 1) for count in products]
    # The convolutions' residues and products, each block's relative error counting alike.
    counts = np.array([[up[i] + down[i], spread[i]] for i in _CONVOLUTIONS]) / [[server[i]] for i in _CONVOLUTIONS]
    solution = np.linalg.lstsq(counts, np.ones(len(_CONVOLUTIONS)))[0]
    residue_s, product_s = (max(0.0, float(constant)) for constant in solution)
    half = found["node_block_s"] / 2
    return {
        "residue_s": residue_s,
        "product_s": product_s,
        "weight_s": _left(server[_WEIGHTS], product_s * products[_WEIGHTS]) / weight_count(blocks[_WEIGHTS].program),
        "up_s": _left(measured.block_s(0, "encrypt_s"), half) / up[0],
        "down_s": _left(measured.block_s(_RESULT, "decrypt_s"), half) / down[_RESULT],
        "byte_s": measured.block_s(_RESULT, "wire_s") / (COEFFICIENT_BYTES * down[_RESULT]),
    }


def _left(seconds: float, known: float) -> float:
    """Return what is left, never less than nothing: a machine that is busy for a moment makes differences negative."""
    return max(0.0, seconds - known)


def _up(block: Block) -> int:
    assert block.prepared is not None  # the models have prepared mode
    return block.prepared.values_up


def _down(block: Block) -> int:
    assert block.prepared is not None
    return block.prepared.values_down
