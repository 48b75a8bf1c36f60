"""Published architectures, exported by both exporters of torch, run encrypted in both modes and against onnxruntime."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from onnxruntime import quantization

torch = pytest.importorskip("torch")

from heinfer.plan import NodeBundle, Reference, load_node, load_reference  # noqa: E402
from heinfer.plan.execution import open_original  # noqa: E402
from partitioner import partition  # noqa: E402
from tests.coverage.architectures import ARCHITECTURES, TOKEN_IDS, Architecture  # noqa: E402
from tests.parties import WatchedPool, parties  # noqa: E402
from tests.partitioner.examples import one_by_one  # noqa: E402
from trusted_node.modes import ModeChoice  # noqa: E402

pytestmark = pytest.mark.usefixtures("operators_registered_once")

Inputs = dict[str, np.ndarray]

EXPORTERS = ("dynamo", "torchscript")
#: Exported with a symbolic batch too: each has operators whose constants depend on the batch.
SYMBOLIC = {
    "dynamo": ("vit", "swin_block", "squeeze_excite"),  # recurrent layers take it long with a symbolic batch
    "torchscript": ("vit", "swin_block", "squeeze_excite", "lstm"),
}
#: Quantised models get more samples, to count how many of their outputs differ.
SAMPLES, QUANTISED_SAMPLES = 2, 16
#: A quantiser gives the next step where noise moves a value across a tie. Such a step inside moves an output by less
#: than one of the output's own, so outputs are a step off at most, and few are.
QUANTISED_STEPS, QUANTISED_SHARE = 1, 0.05
#: Operators of ONNX whose second or a later operand may be learned weights.
WEIGHTED = {
    "Conv", "ConvTranspose", "ConvInteger", "DeformConv", "Einsum", "Gemm", "GRU", "LSTM", "MatMul", "MatMulInteger",
    "QLinearConv", "QLinearMatMul", "RNN",
}  # fmt: skip


# --- exports -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An architecture and how it is exported."""

    name: str
    exporter: str
    symbolic: bool = False

    def __str__(self) -> str:
        return "-".join([self.name, self.exporter, *(["symbolic"] if self.symbolic else [])])


#: Both exporters give the same operators but for constants, or another architecture here has what differs: the older
#: exporter's only with the long tests.
ALIKE = (
    "transformer", "mobilenet_v2", "mobilenet_v3_block", "grouped_convolutions", "unet", "separable_upsample",
    "pixel_shuffle", "temporal_dilated", "quantised_operators",
)  # fmt: skip
CASES = [Case(name, exporter) for name in ARCHITECTURES for exporter in EXPORTERS]
CASES += [Case(name, exporter, symbolic=True) for exporter, names in SYMBOLIC.items() for name in names]


def timed(case: Case) -> Any:
    """Mark what is left to the long tests."""
    is_long = case.name in ALIKE and case.exporter == "torchscript"
    return pytest.param(case, marks=pytest.mark.long) if is_long else case


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Silence what the exporters say about themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that torchvision is not installed
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*legacy TorchScript-based ONNX export", DeprecationWarning)
            warnings.filterwarnings("ignore", "The feature will be removed", DeprecationWarning)
            warnings.filterwarnings(
                "ignore", category=torch.jit.TracerWarning
            )  # sizes become constants, as they should
            warnings.filterwarnings("ignore", "Exporting a model to ONNX with a batch_size other than 1", UserWarning)
            yield
    finally:
        logger.setLevel(level)


def export(case: Case, folder: Path) -> onnx.ModelProto:
    """Export an architecture, at a batch of 1 or with a symbolic batch."""
    architecture = ARCHITECTURES[case.name]
    network = architecture.network()
    examples = architecture.examples(2 if case.symbolic else 1)  # a symbolic axis of length 1 is taken for a constant
    names = [f"input_{i}" for i in range(len(examples))]
    with quiet_exporters():
        if case.exporter == "dynamo":
            shapes = tuple({0: torch.export.Dim("batch", min=1)} for _ in examples) if case.symbolic else None
            program = torch.onnx.export(
                network, examples, dynamo=True, input_names=names, dynamic_shapes=shapes, external_data=False,
                verbose=False,
            )  # fmt: skip
            assert program is not None
            model = program.model_proto
        else:
            axes = {name: {0: "batch"} for name in names} if case.symbolic else None
            buffer = io.BytesIO()
            torch.onnx.export(network, examples, buffer, dynamo=False, input_names=names, dynamic_axes=axes)
            model = onnx.load_model_from_string(buffer.getvalue())
    return model if architecture.quantised is None else quantise(model, architecture, folder)


class RandomReader(quantization.CalibrationDataReader):
    """Random samples to choose the quantisation's ranges from."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        generator = np.random.default_rng(5)
        samples = generator.normal(size=(16, 1, *shape)).astype(np.float32)
        self._queries = iter([{name: sample} for sample in samples])

    def get_next(self) -> Inputs | None:
        return next(self._queries, None)


def quantise(model: onnx.ModelProto, architecture: Architecture, folder: Path) -> onnx.ModelProto:
    """Quantise statically to 8 bits, weights per channel."""
    form = architecture.quantised
    types = quantization.QuantType
    target = folder / "quantised.onnx"
    quantization.quantize_static(
        model,
        target,
        RandomReader(model.graph.input[0].name, architecture.inputs[0]),
        quant_format=quantization.QuantFormat[form],
        # In operator form all others become operators of onnxruntime's own domain.
        op_types_to_quantize=["Conv", "MatMul"] if form == "QOperator" else None,
        activation_type=types.QUInt8 if form == "QOperator" else types.QInt8,
        per_channel=True,
        reduce_range=True,  # products of full 8 bits saturate in onnxruntime where the processor lacks VNNI
    )
    return onnx.load_model(target)


@dataclass(frozen=True)
class Example:
    """An export and its bundle."""

    case: Case
    model: onnx.ModelProto
    bundle: Path

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.case.name]

    @property
    def modes(self) -> tuple[ModeChoice, ...]:
        """Both; prepared mode alone where standard mode is slow, or has run the same plan from a fixed batch."""
        both = self.architecture.standard and not self.case.symbolic
        return (ModeChoice.STANDARD, ModeChoice.PREPARED) if both else (ModeChoice.PREPARED,)

    @cached_property
    def node(self) -> NodeBundle:
        return load_node(self.bundle / "node")

    @cached_property
    def reference(self) -> Reference:
        return load_reference(self.bundle, self.node.plan)

    @property
    def samples(self) -> int:
        return SAMPLES if self.architecture.quantised is None else QUANTISED_SAMPLES

    @cached_property
    def inputs(self) -> Inputs:
        generator = np.random.default_rng(1)
        made = {}
        for spec in self.node.plan.inputs:
            shape = (self.samples, *spec.shape)
            values = (
                generator.integers(TOKEN_IDS, size=shape) if spec.dtype == "int64" else generator.normal(size=shape)
            )
            made[spec.name] = values.astype(spec.dtype)
        return made

    @cached_property
    def expected(self) -> dict[str, np.ndarray]:
        return one_by_one(open_original(self.model.SerializeToString()), self.inputs)


@pytest.fixture(scope="module", params=[*map(timed, CASES)], ids=str)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    folder = tmp_path_factory.mktemp(str(request.param))
    model = export(request.param, folder)
    onnx.save_model(model, folder / "model.onnx")
    partition(folder / "model.onnx", folder / "bundle")
    return Example(request.param, model, folder / "bundle")


# --- tests ---------------------------------------------------------------------------------------------------------


def test_weighted_operators_are_on_the_server_and_no_weights_are_on_the_node(example: Example) -> None:
    operators = [operator.rpartition("(")[2].rstrip(")") for b in example.node.plan.blocks for operator in b.operators]
    assert sum(operator in WEIGHTED for operator in operators) == example.architecture.weighted, operators
    for content in example.node.submodels.values():
        graph = onnx.load_model_from_string(content).graph
        constants = {initialiser.name for initialiser in graph.initializer}
        assert not [n.name for n in graph.node if n.op_type in WEIGHTED and constants.intersection(n.input)]


def test_architecture_agrees_with_onnxruntime_and_every_block_is_within_its_bound(
    example: Example, pool: WatchedPool
) -> None:
    for mode in example.modes:
        with parties(example.bundle, pool, mode=mode) as both:
            answer = both.engine.infer(example.inputs, example.samples)
        assert answer.statistics.mode == mode.value
        check_outputs(example, answer.outputs)
        check_blocks(example, answer.trace)


def check_outputs(example: Example, outputs: Inputs) -> None:
    """Compare with onnxruntime on the original, sample by sample."""
    for name, want in example.expected.items():
        found, tolerance = outputs[name], example.architecture.tolerance * np.abs(want).max()
        assert found.shape == want.shape
        assert np.abs(want[0] - want[1]).max() > 10 * tolerance  # the answer depends on the query
        error = np.abs(found - want)
        if example.architecture.quantised is None:
            assert error.max() <= tolerance
        else:
            assert error.max() <= QUANTISED_STEPS * last_step(example.model) + tolerance
            assert (error > tolerance).mean() <= QUANTISED_SHARE


def last_step(model: onnx.ModelProto) -> float:
    """Return the step of the last activation that a quantised model dequantises."""
    constants = {initialiser.name: initialiser for initialiser in model.graph.initializer}
    scales = [
        constants[node.input[1]]
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] not in constants
    ]
    return float(onnx.numpy_helper.to_array(scales[-1]))


def check_blocks(example: Example, trace: Inputs) -> None:
    """Compare every block's traced outputs with float64 on its traced inputs."""
    for index, block in enumerate(example.node.plan.blocks):
        values = [trace[f"trace/{index}/input/{i}"].astype(np.float64) for i in range(len(block.inputs))]
        for position, want in enumerate(example.reference.evaluate_block(index, values)):
            found = trace[f"trace/{index}/output/{position}"]
            # The node states bounds in float64, the trace carries them in float32.
            bound = trace[f"trace/{index}/bound/{position}"].astype(np.float64) * (1 + 2.0**-23)
            assert found.shape == want.shape == bound.shape
            assert (np.abs(found - want) <= bound).all(), (index, position)
