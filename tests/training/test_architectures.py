"""Architectures fit their data, keep records apart, and can be exported and partitioned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import onnx  # noqa: E402

from heinfer.errors import InputError  # noqa: E402
from heinfer.training.architectures import ARCHITECTURES, build_network, find_architecture  # noqa: E402
from heinfer.training.export import export_network, run_model  # noqa: E402
from heinfer.training.input_scaling import DeclaredRanges  # noqa: E402
from heinfer.training.scattering_networks import make_scattering_cnn, make_scattering_linear  # noqa: E402
from heinfer.training.small_networks import LeNet5, TanhCnn  # noqa: E402
from partitioner import partition  # noqa: E402

pytestmark = pytest.mark.usefixtures("operators_registered_once")

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "lenet5": [(1, 28, 28)],
    "mlp": [(30,), (1, 8, 8)],
    "resnet20_gn": [(3, 32, 32), (1, 28, 28)],
    "scattering_cnn": [(1, 28, 28), (3, 16, 20)],
    "scattering_linear": [(1, 28, 28)],
    "tanh_cnn": [(1, 28, 28), (3, 32, 32), (1, 17, 22)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


def count_weights(network: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def test_every_architecture_is_tested() -> None:
    assert set(SHAPES) == set(ARCHITECTURES)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_network_gives_one_logit_per_class_and_keeps_records_apart(name: str, shape: tuple[int, ...]) -> None:
    network = build_network(name, shape, classes=7)
    assert network.training
    records = torch.rand(3, *shape)
    logits = network(records)
    assert logits.shape == (3, 7)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(network(records[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lenet5", (1, 28, 28)),
        ("mlp", (30,)),
        ("resnet20_gn", (3, 16, 16)),
        ("scattering_cnn", (1, 16, 16)),
        ("scattering_linear", (2, 16, 16)),
        ("tanh_cnn", (1, 28, 28)),
    ],
)
def test_network_exported_is_partitioned_as_it_is(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    model = export_network(build_network(name, shape, classes=10), shape)  # compares with torch
    onnx.save(model, tmp_path / "model.onnx")
    result = partition(tmp_path / "model.onnx", tmp_path / "bundle")  # compares with onnxruntime
    assert result.difference < 1e-4
    assert result.plan.blocks


def test_lenet5_has_the_documented_number_of_weights() -> None:
    convolutions = (25 * 1 + 1) * 6 + (25 * 6 + 1) * 16
    linear = (256 + 1) * 120 + (120 + 1) * 84 + (84 + 1) * 10
    assert count_weights(LeNet5()) == convolutions + linear == 44_426


def test_lenet5_normalises_inside() -> None:
    normalising, plain = LeNet5(mean=0.25, deviation=0.5), LeNet5(mean=0.0, deviation=1.0)
    plain.load_state_dict(normalising.state_dict())
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(normalising(images), plain((images - 0.25) / 0.5))


def test_tanh_cnn_has_the_weights_of_the_paper() -> None:
    assert count_weights(TanhCnn((1, 28, 28), 10)) == 26_010  # Papernot et al. 2021


def test_resnet20_has_the_weights_of_the_paper_under_their_usual_names() -> None:
    network = build_network("resnet20_gn", (3, 32, 32), 10)
    assert count_weights(network) == 269_722  # He et al. 2016 round to 0.27 million; normalisation's are as many
    names = {name.rsplit(".", 1)[0] for name in network.state_dict()}
    assert {"conv1", "gn1", "layer1.0.conv1", "layer3.2.gn2", "linear"} <= names


def test_scattering_networks_train_the_head_only() -> None:
    cnn = make_scattering_cnn((1, 28, 28), 10)
    head = (81 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + (32 * 16 + 1) * 32 + (32 + 1) * 10
    assert count_weights(cnn) == count_weights(cnn.head) == head
    linear = make_scattering_linear((1, 28, 28), 10)
    assert count_weights(linear) == (81 * 49 + 1) * 10


def test_scattering_network_fixed_scales_bring_orders_to_one_size(shared: Path) -> None:
    with np.load(shared / "data" / "fashion_mnist.npz") as archive:
        images = torch.from_numpy(archive["train_images"][:200, np.newaxis]) / 255
    network = make_scattering_linear((1, 28, 28), 10, normalisation="fixed")
    scaled = network.features(images).unflatten(1, (81, 49))
    for order in (scaled[:, :1], scaled[:, 1:17], scaled[:, 17:]):
        assert 0.8 < order.square().mean().sqrt() < 1.25


def test_declared_ranges_map_to_unit_size_and_clip() -> None:
    ranges = ((0.0, 4000.0), (0.001, 0.002), (-5.0, -1.0))
    rows = torch.tensor([[0.0, 0.001, -5.0], [4000.0, 0.002, -1.0], [3000.0, 0.00125, -2.0], [1e9, -1e9, 0.0]])
    expected = torch.tensor([[-1.0, -1, -1], [1, 1, 1], [0.5, -0.5, 0.5], [1, -1, 1]])
    torch.testing.assert_close(DeclaredRanges(ranges)(rows), expected, rtol=0, atol=1e-6)


def test_declared_ranges_stay_on_the_node(tmp_path: Path) -> None:
    network = build_network("mlp", (2,), 3, ranges=((0.0, 4000.0), (0.0, 0.001)))
    model = export_network(network, (2,))
    onnx.save(model, tmp_path / "model.onnx")
    plan = partition(tmp_path / "model.onnx", tmp_path / "bundle").plan
    assert plan.steps[0].kind == "node"
    assert any("PRelu" in operator for operator in plan.steps[0].operators)
    assert len(plan.blocks) == 3  # the three linear layers
    rows = np.array([[3000, 0.0002]], np.float32)
    with torch.no_grad():
        np.testing.assert_allclose(run_model(model, rows), network(torch.from_numpy(rows)), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet", (1, 28, 28), {}, r"unknown architecture 'resnet', did you mean 'resnet20_gn'\?.*lenet5"),
        ("lenet5", (3, 32, 32), {}, r"takes images of shape \(1, 28, 28\)"),
        ("tanh_cnn", (30,), {}, "takes images"),
        ("lenet5", (1, 28, 28), {"pooling": "averages"}, "unknown pooling 'averages', did you mean 'average'"),
        ("resnet20_gn", (3, 32, 32), {"groups": 5}, "groups = 5 does not divide"),
        ("scattering_cnn", (1, 28, 28), {"groups": 2}, "groups = 2 does not divide"),
        ("scattering_cnn", (1, 28, 28), {"normalisation": "batch"}, "found 'batch'"),
        ("scattering_cnn", (1, 28, 28), {"widths": [4]}, "one stride for each"),
        ("scattering_linear", (30,), {}, "are those of images"),
        ("mlp", (4,), {"hiden": [3]}, r"no option 'hiden', did you mean 'hidden'\?"),
        ("mlp", (4,), {"hidden": "many"}, "can't be built"),
    ],
)
def test_build_network_what_does_not_fit_is_refused(
    name: str, shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build_network(name, shape, 10, options=options)


def test_find_architecture_imports_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_networks.py").write_text(
        "from torch import nn\n"
        "def perceptron(input_shape, classes, bias=True):\n"
        "    return nn.Linear(input_shape[0], classes, bias=bias)\n"
        "number = 3\n"
        "def nothing(input_shape, classes):\n"
        "    return None\n"
    )
    monkeypatch.chdir(tmp_path)
    network = build_network("own_networks:perceptron", (5,), 3, options={"bias": False})
    assert count_weights(network) == 15
    for name, message in (
        ("own_networks:absent", "cannot import"),
        ("absent_module:perceptron", "cannot import"),
        ("own_networks:number", "expected a function"),
        ("own_networks:", "cannot import"),
    ):
        with pytest.raises(InputError, match=message):
            find_architecture(name)
    with pytest.raises(InputError, match="gave NoneType"):
        build_network("own_networks:nothing", (5,), 3)
