"""What is exported is static, self-contained and computes what torch computes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import onnx  # noqa: E402

from heinfer.training.export import RELATIVE_TOLERANCE, ExportError, export_network, run_model  # noqa: E402
from heinfer.training.small_networks import LeNet5, Mlp  # noqa: E402

pytestmark = pytest.mark.usefixtures("operators_registered_once")

IMAGE_SHAPE = (1, 28, 28)


class ChangesWhenExported(torch.nn.Module):
    """A network whose exported form differs from what it computes in torch."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        flat = image.flatten(1)
        return flat * 2 if torch.compiler.is_exporting() else flat


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return LeNet5().eval()


@pytest.fixture(scope="module")
def model(network: torch.nn.Module) -> onnx.ModelProto:
    return export_network(network, IMAGE_SHAPE)


@pytest.mark.parametrize("batch", [1, 3])
def test_export_network_agrees_with_torch(network: torch.nn.Module, model: onnx.ModelProto, batch: int) -> None:
    images = np.random.default_rng(batch).random((batch, *IMAGE_SHAPE), dtype=np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).numpy()
    found = run_model(model, images)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE_TOLERANCE * np.abs(expected).max())


def test_export_network_graph_is_static_and_plain(model: onnx.ModelProto) -> None:
    inputs = [
        (value.name, [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim])
        for value in (*model.graph.input, *model.graph.output)
    ]
    assert inputs == [("image", ["batch", 1, 28, 28]), ("logits", ["batch", 10])]
    convolution = ["Conv", "Relu", "MaxPool"]
    assert [node.op_type for node in model.graph.node] == [
        "Sub", "Div", *convolution, *convolution, "Reshape", "Gemm", "Relu", "Gemm", "Relu", "Gemm",
    ]  # fmt: skip
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]


def test_export_network_table_is_called_features() -> None:
    model = export_network(Mlp((5,), 3), (5,))
    (value,) = model.graph.input
    assert value.name == "features"
    assert run_model(model, np.zeros((7, 5), np.float32), batch=2).shape == (7, 3)


def test_export_network_keeps_weights_inside_and_paths_outside(model: onnx.ModelProto) -> None:
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    serialised = model.SerializeToString()
    assert b".py" not in serialised
    assert b"stack_trace" not in serialised


def test_export_network_other_function_than_torch_is_refused() -> None:
    with pytest.raises(ExportError, match="differ by"):
        export_network(ChangesWhenExported(), IMAGE_SHAPE)
