"""Activations become polynomials that can be trained on and exported. On networks and data made up here, in seconds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from heinfer.errors import InputError  # noqa: E402
from heinfer.training.architectures import build_network  # noqa: E402
from heinfer.training.datasets.dataset import Dataset, Examples  # noqa: E402
from heinfer.training.export import export_network, run_model  # noqa: E402
from heinfer.training.polynomials import (  # noqa: E402
    PolynomialActivation,
    check_replaced,
    excess,
    fraction_outside,
    freeze,
    load_start,
    replace_activations,
)
from heinfer.training.recipe import Polynomials, Recipe, parse_recipe  # noqa: E402
from heinfer.training.release import release_model  # noqa: E402
from heinfer.training.trainer import train  # noqa: E402

RECIPE = """
name = "tiny"
architecture = "mlp"
epochs = 10
batch_size = 40
learning_rate = 0.01
schedule = "cosine"
seed = 3
accuracy_floor = 0.5

[network]
hidden = [12, 8]

[data]
name = "Synthetic"
license = "CC0"
credit = "nobody"
"""


def settings(**changes: Any) -> Polynomials:
    return Polynomials(**{"start": "model.onnx", **changes})


def make_convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5)
    )


def make_images(count: int = 200) -> torch.Tensor:
    return torch.rand(count, 1, 10, 10, generator=torch.Generator().manual_seed(1))


def polynomials_of(network: nn.Module) -> list[PolynomialActivation]:
    return [m for m in network.modules() if isinstance(m, PolynomialActivation)]


def make_table() -> Dataset:
    """Whether a point lies in the unit circle: no linear classifier does better than the larger class."""
    generator = np.random.default_rng(5)

    def draw(count: int) -> Examples:
        rows = generator.uniform(-1.25, 1.25, size=(count, 2)).astype(np.float32)
        return Examples(rows, (np.hypot(rows[:, 0], rows[:, 1]) < 1).astype(np.int64))

    return Dataset("Synthetic", draw(1200), draw(400), classes=2)


def make_recipe(**changes: object) -> Recipe:
    return parse_recipe({**tomllib.loads(RECIPE), **changes})


@pytest.mark.parametrize("degree", [2, 3, 7])
def test_replacing_keeps_shapes_and_fits_closer_with_the_degree(degree: int) -> None:
    network, images = make_convolutional(), make_images()
    before = network(images).detach()
    made = replace_activations(network, images, settings(degree=degree))
    after = network(images).detach()
    assert after.shape == before.shape
    assert [(r.name, r.function, r.degree) for r in made] == [("1", "ReLU", degree), ("4", "Tanh", degree)]
    assert [tuple(p.coefficients.shape) for p in polynomials_of(network)] == [(degree + 1,)] * 2
    relative = float((after - before).std() / before.std())
    assert relative < {2: 0.1, 3: 0.1, 7: 0.03}[degree]


def test_replaced_tanh_is_near_on_the_whole_interval() -> None:
    """The oracle interpolates in Chebyshev points; least squares leave more at the ends, but not five times as much."""
    network = nn.Sequential(nn.Tanh())
    replace_activations(network, torch.linspace(-2, 2, 1000)[:, None], settings(degree=7))
    (polynomial,) = polynomials_of(network)
    assert float(polynomial.limit) == pytest.approx(2.5)
    everywhere = np.linspace(-2.5, 2.5, 501)
    oracle = np.polynomial.Chebyshev.interpolate(np.tanh, 7, domain=[-2.5, 2.5])
    found = network(torch.tensor(everywhere)[:, None].float()).detach().numpy()[:, 0]
    assert np.abs(found - np.tanh(everywhere)).max() < 5 * np.abs(oracle(everywhere) - np.tanh(everywhere)).max()


def test_activation_that_is_a_polynomial_on_its_range_is_found_exactly() -> None:
    """On [-1, 1], Hardtanh is the identity."""
    network = nn.Sequential(nn.Hardtanh())
    replace_activations(network, torch.linspace(-0.8, 0.8, 400)[:, None], settings(degree=3, margin=1.25))
    (polynomial,) = polynomials_of(network)
    np.testing.assert_allclose(polynomial.coefficients.detach().numpy(), [0, 1.0, 0, 0], atol=1e-6)


def test_gradients_reach_coefficients_and_weights_and_the_penalty_counts_what_is_outside() -> None:
    network, images = make_convolutional(), make_images()
    replace_activations(network, images, settings(degree=2))
    network.train()
    network(images)
    assert float(excess(network).detach()) == 0.0  # the margin holds what was measured
    network(5 * images)
    lost = excess(network)
    assert float(lost.detach()) > 0.0
    (network(5 * images).square().mean() + lost).backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().max()) > 0.0


def test_penalty_is_the_squared_distance_to_the_range_by_record() -> None:
    polynomial = PolynomialActivation(torch.tensor([0.0, 1.0, 0.0]), torch.tensor(2.0)).train()
    polynomial(torch.tensor([[2.0, -3.0], [1.0, 4.0]]))  # u = 1, -1.5, 0.5, 2
    assert float(excess(polynomial).detach()) == pytest.approx((0.25 + 1.0) / 2)


def test_fixed_coefficients_are_not_trained() -> None:
    network, images = make_convolutional(), make_images()
    replace_activations(network, images, settings(learned=False))
    assert not any(p.coefficients.requires_grad for p in polynomials_of(network))


def test_fraction_outside_counts_records() -> None:
    network = nn.Sequential(nn.Tanh())
    replace_activations(network, torch.linspace(-1, 1, 100)[:, None].repeat(1, 2), settings())
    batches = [torch.tensor([[0.0, 0.0], [2.0, 2.0]]), torch.tensor([[1.0, 1.2], [-9.0, 0.0]])]
    assert fraction_outside(network, batches) == 0.5


@pytest.mark.parametrize("degree", [2, 5])
def test_exported_polynomials_equal_torch_and_hold_no_activation(degree: int) -> None:
    network, images = make_convolutional(), make_images()
    replace_activations(network, images, settings(degree=degree, average_pooling=True))
    model = export_network(freeze(network), (1, 10, 10))
    kinds = {node.op_type for node in model.graph.node}
    assert {"Mul", "Add", "AveragePool"} <= kinds
    assert not kinds & {"Relu", "Tanh", "MaxPool"}
    expected = network.eval()(images).detach().numpy()
    # float32 sums of a hundred terms, and powers of x against powers of x / R: a few units in the 2**-20s.
    np.testing.assert_allclose(run_model(model, images.numpy()), expected, atol=1e-5 * np.abs(expected).max())


def test_max_pooling_stays_unless_averages_are_asked_for() -> None:
    network = make_convolutional()
    replace_activations(network, make_images(), settings())
    assert isinstance(network[2], nn.MaxPool2d)
    replaced = make_convolutional()
    replace_activations(replaced, make_images(), settings(average_pooling=True))
    assert isinstance(replaced[2], nn.AvgPool2d)
    assert replaced[2].kernel_size == 2


def test_activation_used_twice_becomes_one_polynomial_over_both_ranges() -> None:
    torch.manual_seed(2)
    activation = nn.ReLU()
    network = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 6), activation, nn.Linear(6, 2))
    (made,) = replace_activations(network, torch.randn(100, 4), settings())
    assert made.name == "1"
    assert network[1] is network[3]
    assert isinstance(network[1], PolynomialActivation)


class Functional(nn.Module):
    """One activation that is a module, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.activation = nn.Linear(4, 4), nn.Linear(4, 2), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.activation(self.first(x))))
        return result


def test_activation_that_is_no_module_is_refused_before_training() -> None:
    network = Functional()
    replace_activations(network, torch.randn(50, 4), settings())
    with pytest.raises(InputError, match="still computes Relu"):
        check_replaced(network, (4,))


def test_network_without_activations_is_refused() -> None:
    with pytest.raises(InputError, match="no activations"):
        replace_activations(nn.Sequential(nn.Linear(4, 2)), torch.randn(50, 4), settings())


def test_load_start_restores_a_released_network_and_refuses_others(tmp_path: Path) -> None:
    torch.manual_seed(1)
    path = tmp_path / "model.onnx"
    network = build_network("mlp", (6,), 3, options={"hidden": [5]})
    onnx.save_model(export_network(network, (6,)), path)
    other = build_network("mlp", (6,), 3, options={"hidden": [5]})
    load_start(other, path)
    x = torch.randn(10, 6)
    torch.testing.assert_close(other(x), network(x), rtol=0, atol=0)
    with pytest.raises(InputError, match=r"no fitting weights for .*0\.weight"):
        load_start(build_network("mlp", (6,), 3, options={"hidden": [7]}), path)


def test_load_start_of_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model", encoding="utf-8")
    for name, message in (("text.onnx", "not an ONNX model"), ("missing.onnx", "cannot read")):
        with pytest.raises(InputError, match=message):
            load_start(nn.Linear(2, 2), tmp_path / name)


def test_training_on_repairs_what_the_replacement_broke_and_says_both(tmp_path: Path) -> None:
    data = make_table()
    first = train(make_recipe(), data)
    assert first.test_accuracy > 0.9
    onnx.save_model(export_network(first.network, (2,)), tmp_path / "model.onnx")
    changes = {"start": str(tmp_path / "model.onnx"), "degree": 2, "range_penalty": 10.0}
    card = release_model(make_recipe(polynomials=changes), data, tmp_path / "degree2")
    told = card["polynomials"]
    assert told["start_accuracy"] == pytest.approx(first.test_accuracy)
    assert [r["name"] for r in told["replacements"]] == ["1", "3"]
    assert card["accuracy"] > told["replaced_accuracy"]
    assert card["accuracy"] > 0.9
    assert 0.0 <= told["test_outside"] < 0.1
    model = onnx.load(tmp_path / "degree2" / "model.onnx")
    assert not any(node.op_type == "Tanh" for node in model.graph.node)


def test_recipe_with_privacy_and_polynomials_is_refused() -> None:
    with pytest.raises(InputError, match="polynomials: training goes on without privacy"):
        make_recipe(polynomials={"start": "model.onnx"}, privacy={"target_epsilon": 1.0})


@pytest.mark.parametrize(
    ("key", "value"), [("degree", 1), ("degree", 8), ("margin", 0.9), ("range_penalty", -1.0), ("each", "channel")]
)
def test_recipe_with_impossible_polynomials_is_refused(key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"polynomials\.{key}"):
        make_recipe(polynomials={"start": "model.onnx", key: value})
