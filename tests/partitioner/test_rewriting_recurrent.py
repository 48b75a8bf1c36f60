"""Recurrent layers, unrolled."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from partitioner.rewriting import why_left
from tests.partitioner.examples import check as check_partition
from tests.partitioner.rewritten_models import BATCH, FLOAT32_ORDER, compare, imported, operators, rewritten, run

STEPS, INPUTS, HIDDEN = 4, 3, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DIRECTIONS = ("forward", "reverse", "bidirectional")
ACTIVATIONS = {
    "Relu": (0, 0),
    "Tanh": (0, 0),
    "Sigmoid": (0, 0),
    "Affine": (1, 1),
    "LeakyRelu": (1, 0),
    "ThresholdedRelu": (1, 0),
    "ScaledTanh": (1, 1),
    "HardSigmoid": (1, 1),
    "Elu": (1, 0),
    "Softsign": (0, 0),
    "Softplus": (0, 0),
}


def values(*shape: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng([seed, *shape])
    return generator.normal(size=shape, scale=0.6).astype(np.float32)


def recurrent(
    operator: str,
    direction: str = "forward",
    given: tuple[str, ...] = ("B",),
    computed: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("Y", "Y_h", "Y_c"),
    lengths: list[int] | None = None,
    steps: int = STEPS,
    **attributes: Any,
) -> onnx.ModelProto:
    """Build a model of one layer whose batch is symbolic.

    Args:
        operator: LSTM, GRU or RNN.
        direction: of the layer.
        given: which optional operands are constants: B, initial_h, initial_c, P.
        computed: which operands are inputs of the model.
        outputs: which of the layer's outputs there are.
        lengths: sequence_lens.
        steps: time steps.
        attributes: further ones of the operator.
    """
    d, gates = 2 if direction == "bidirectional" else 1, GATES[operator]
    batch_first = attributes.get("layout", 0)
    state = [BATCH, d, HIDDEN] if batch_first else [d, BATCH, HIDDEN]
    shapes: dict[str, list[Any]] = {
        "W": [d, gates * HIDDEN, INPUTS],
        "R": [d, gates * HIDDEN, HIDDEN],
        "B": [d, 2 * gates * HIDDEN],
        "sequence_lens": [BATCH],
        "initial_h": state,
        "initial_c": state,
        "P": [d, 3 * HIDDEN],
    }
    positions = list(shapes)[: 7 if operator == "LSTM" else 5]
    constants = [
        numpy_helper.from_array(values(*(1 if n == BATCH else n for n in shapes[name]), seed=i), name)
        for i, name in enumerate(shapes)
        if name in ("W", "R", *given) and name not in computed
    ]
    if lengths is not None:
        constants.append(numpy_helper.from_array(np.array(lengths, np.int32), "sequence_lens"))
    known = {t.name for t in constants} | set(computed)
    inputs = [tensor("X", [BATCH, steps, INPUTS] if batch_first else [steps, BATCH, INPUTS])]
    inputs += [tensor(n, shapes[n], TensorProto.INT32 if n == "sequence_lens" else 1) for n in computed]
    names = [n for n in ("Y", "Y_h", "Y_c") if n != "Y_c" or operator == "LSTM"]
    node = helper.make_node(
        operator,
        ["X", *(n if n in known else "" for n in positions)],
        [n if n in outputs else "" for n in names],
        name="layer",
        hidden_size=HIDDEN,
        direction=direction,
        **attributes,
    )
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names if n in outputs]
    graph = helper.make_graph([node], "recurrent", inputs, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def tensor(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def feeds(model: onnx.ModelProto, batch: int) -> dict[str, np.ndarray]:
    return {
        value.name: values(*(d.dim_value or batch for d in value.type.tensor_type.shape.dim), seed=7 + i)
        for i, value in enumerate(model.graph.input)
    }


def check(model: onnx.ModelProto) -> ir.Model:
    """Compare at a batch of 1 and of 3 with the original; the layer itself must be gone."""
    changed = rewritten(model)
    assert not set(operators(changed)) & set(GATES)
    for batch in (1, 3):
        compare(model, changed, feeds(model, batch))
    return changed


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("operator", GATES)
class TestEveryOperator:
    def test_plain_layer(self, operator: str, direction: str) -> None:
        check(recurrent(operator, direction))

    def test_without_bias(self, operator: str, direction: str) -> None:
        check(recurrent(operator, direction, given=()))

    def test_clipped(self, operator: str, direction: str) -> None:
        check(recurrent(operator, direction, clip=0.2))

    def test_computed_initial_state(self, operator: str, direction: str) -> None:
        computed = ("initial_h", "initial_c") if operator == "LSTM" else ("initial_h",)
        check(recurrent(operator, direction, computed=computed))

    def test_constant_initial_state_is_every_samples(self, operator: str, direction: str) -> None:
        model = recurrent(operator, direction, given=("B", "initial_h", "initial_c"))
        changed, fed = rewritten(model), feeds(model, 3)
        one_by_one = [run(model, {"X": fed["X"][:, i : i + 1]}) for i in range(3)]
        for position, found in enumerate(run(changed, fed)):
            expected = np.concatenate([results[position] for results in one_by_one], axis=-2)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)

    def test_batch_first_layout_is_the_other_one_transposed(self, operator: str, direction: str) -> None:
        computed = ("initial_h", "initial_c") if operator == "LSTM" else ("initial_h",)
        model = recurrent(operator, direction, computed=computed)
        batch_first = rewritten(recurrent(operator, direction, computed=computed, layout=1))
        fed = feeds(model, 3)
        found = run(batch_first, {name: array.swapaxes(0, 1) for name, array in fed.items()})
        for want, got in zip(run(model, fed), found, strict=True):
            turned = want.transpose(2, 0, 1, 3) if want.ndim == 4 else want.swapaxes(0, 1)
            np.testing.assert_allclose(got, turned, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("output", ["Y", "Y_h"])
    def test_single_output(self, operator: str, direction: str, output: str) -> None:
        check(recurrent(operator, direction, outputs=(output,)))

    def test_single_time_step(self, operator: str, direction: str) -> None:
        check(recurrent(operator, direction, steps=1))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cell_as_single_output(direction: str) -> None:
    check(recurrent("LSTM", direction, outputs=("Y_c",)))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_peepholes(direction: str) -> None:
    check(recurrent("LSTM", direction, given=("B", "P")))


@pytest.mark.parametrize("given", [("B",), ("B", "P")])
def test_coupled_gates_of_clipped_lstm(given: tuple[str, ...]) -> None:
    check(recurrent("LSTM", "bidirectional", given=given, clip=0.4, input_forget=1))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("computed", [(), ("initial_h",)])
@pytest.mark.parametrize("given", [(), ("B",)])
def test_gru_with_reset_after_the_product(direction: str, computed: tuple[str, ...], given: tuple[str, ...]) -> None:
    check(recurrent("GRU", direction, given=given, computed=computed, linear_before_reset=1))


@pytest.mark.parametrize(("name", "alpha", "beta"), [(n, a, b) for n, (a, b) in ACTIVATIONS.items()])
def test_activation_with_parameters(name: str, alpha: int, beta: int) -> None:
    parameters = {"activation_alpha": [0.3] * alpha, "activation_beta": [0.2] * beta}
    check(recurrent("RNN", activations=[name], **{k: v for k, v in parameters.items() if v}))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS.keys() - {"Affine", "ScaledTanh", "ThresholdedRelu"}))
def test_activation_with_default_parameters(name: str) -> None:
    check(recurrent("RNN", activations=[name]))


def test_parameters_are_consumed_in_the_order_of_the_functions_that_take_them() -> None:
    names = ["HardSigmoid", "Tanh", "LeakyRelu", "Sigmoid", "Affine", "ScaledTanh"]
    parameters = {"activation_alpha": [0.3, 0.1, 0.7, 0.9], "activation_beta": [0.4, 0.05, 1.1]}
    check(recurrent("LSTM", "bidirectional", activations=names, **parameters))


def test_gru_activations_by_direction() -> None:
    check(recurrent("GRU", "bidirectional", activations=["Sigmoid", "Softsign", "HardSigmoid", "Relu"]))


def test_one_product_for_all_inputs_and_one_for_each_later_step_and_direction() -> None:
    changed = rewritten(recurrent("LSTM", "bidirectional"))
    assert operators(changed)["MatMul"] == 1 + 2 * (STEPS - 1)
    assert operators(rewritten(recurrent("GRU")))["MatMul"] == 1 + 2 * (STEPS - 1)
    assert operators(rewritten(recurrent("GRU", linear_before_reset=1)))["MatMul"] == 1 + (STEPS - 1)


def test_weights_are_kept_once() -> None:
    changed = rewritten(recurrent("LSTM", "bidirectional"))
    matrices = [value for value in changed.graph.initializers.values() if value.shape and value.shape.rank() == 2]
    assert len(matrices) == 1 + 2


def test_full_sequence_lengths_are_taken() -> None:
    model = recurrent("GRU", "reverse", lengths=[STEPS])
    changed = rewritten(model)
    assert "GRU" not in operators(changed)
    compare(model, changed, feeds(model, 1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (recurrent("LSTM", lengths=[STEPS - 1]), "sequence_lens may differ from the 4 time steps"),
        (recurrent("LSTM", computed=("sequence_lens",)), "sequence_lens may differ"),
        (recurrent("GRU", computed=("R",)), "weights are computed"),
        (recurrent("LSTM", computed=("P",)), "weights are computed"),
        (recurrent("RNN", activations=["Affine"]), "Affine lacks activation_alpha or activation_beta"),
        (recurrent("RNN", activations=["Gelu"]), "Gelu is no activation function"),
        (recurrent("LSTM", activations=["Sigmoid"]), "has 1 activations, expected 3"),
        (recurrent("RNN", direction="sideways"), "direction is 'sideways'"),
    ],
)
def test_layer_that_stays_has_a_reason(model: onnx.ModelProto, reason: str) -> None:
    changed = rewritten(model)
    (node,) = changed.graph
    assert reason in str(why_left(node))


def test_layer_of_float64_stays() -> None:
    model = recurrent("RNN")
    for constant in model.graph.initializer:
        constant.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(constant).astype(np.float64), constant.name))
    (node,) = imported(model).graph
    assert why_left(node) == "weights are float64; export the model in float32"


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        ("LSTM", {"given": ("B", "P", "initial_h", "initial_c"), "clip": 0.9}),
        ("GRU", {"given": ("B", "initial_h")}),
        ("GRU", {"linear_before_reset": 1}),
        ("RNN", {"activations": ["Relu", "Tanh"]}),
    ],
)
def test_partitioned_layer_has_its_weights_on_the_server(
    operator: str, attributes: Mapping[str, Any], tmp_path: Path
) -> None:
    model = recurrent(operator, "bidirectional", outputs=("Y",), **attributes)
    turn = helper.make_node("Transpose", ["samples"], ["X"], perm=[1, 0, 2])
    back = helper.make_node("Transpose", ["Y"], ["y"], perm=[2, 0, 1, 3])
    nodes = [turn, *model.graph.node, back]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(
        nodes, "recurrent", [tensor("samples", [BATCH, STEPS, INPUTS])], results, model.graph.initializer
    )
    whole = helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)
    found = check_partition(onnx.shape_inference.infer_shapes(whole), tmp_path)
    assert found.server_operators.count("MatMul") >= 1 + 2 * (STEPS - 1)
    assert not {"MatMul", "Gemm"} & set(found.node_operators)


class Tagger(torch.nn.Module):
    """A recurrent layer, and a linear one on all of its time steps or on the last."""

    def __init__(self, layer: torch.nn.RNNBase, last: bool) -> None:
        super().__init__()
        self.layer, self.last = layer, last
        self.head = torch.nn.Linear(HIDDEN * (2 if layer.bidirectional else 1), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(x)
        if self.last:
            states = states[:, -1] if self.layer.batch_first else states[-1]
        return self.head(states)


@pytest.mark.parametrize("batch_first", [False, True], ids=["steps_first", "batch_first"])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.filterwarnings(
    "ignore:You are using the legacy TorchScript:DeprecationWarning",
    "ignore:The feature will be removed:DeprecationWarning",
    "ignore:Exporting a model to ONNX with a batch_size:UserWarning",
    "ignore::torch.jit.TracerWarning",
)
def test_export_by_torchscript(kind: type[torch.nn.RNNBase], batch_first: bool) -> None:
    module = tagger(kind, batch_first)
    buffer, axes = io.BytesIO(), {"x": {0 if batch_first else 1: BATCH}}
    torch.onnx.export(
        module,
        (sequences(2, batch_first),),
        buffer,
        dynamo=False,
        opset_version=20,
        input_names=["x"],
        dynamic_axes=axes,
    )
    changed = rewritten(onnx.version_converter.convert_version(onnx.load_from_string(buffer.getvalue()), 21))
    assert not set(operators(changed)) & set(GATES)
    for batch in (1, 3):
        compare_with_torch(module, changed, sequences(batch, batch_first))


# nn.RNN comes unrolled from this exporter.
@pytest.mark.parametrize(("kind", "batch_first"), [(torch.nn.LSTM, True), (torch.nn.GRU, False)])
@pytest.mark.filterwarnings("ignore:_check_is_size:FutureWarning")
@pytest.mark.usefixtures("operators_registered_once")
def test_export_by_dynamo(kind: type[torch.nn.RNNBase], batch_first: bool) -> None:
    module = tagger(kind, batch_first)
    x = sequences(1, batch_first)
    program = torch.onnx.export(module, (x,), dynamo=True, input_names=["x"], opset_version=21, verbose=False)
    assert program is not None
    changed = rewritten(program.model_proto)
    assert not set(operators(changed)) & set(GATES)
    compare_with_torch(module, changed, x)


def tagger(kind: type[torch.nn.RNNBase], batch_first: bool) -> Tagger:
    """Return a tagger of two bidirectional layers."""
    torch.manual_seed(0)
    layer = kind(INPUTS, HIDDEN, num_layers=2, bidirectional=True, batch_first=batch_first)
    return Tagger(layer, last=kind is torch.nn.GRU).eval()


def sequences(batch: int, batch_first: bool) -> torch.Tensor:
    return torch.from_numpy(values(*((batch, STEPS) if batch_first else (STEPS, batch)), INPUTS))


def compare_with_torch(module: torch.nn.Module, changed: ir.Model, x: torch.Tensor) -> None:
    with torch.no_grad():
        expected = module(x).numpy()
    (found,) = run(changed, {"x": x.numpy()})
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32_ORDER * np.max(np.abs(expected)))
