"""Per-record gradients against plain autograd in float64, one record at a time."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional

from heinfer.errors import ParameterError
from heinfer.training.privacy import layers
from heinfer.training.privacy.clipping import ROUNDING_MARGIN, Flat, PerLayer
from heinfer.training.privacy.gradients import ClippedGradients, ClippedSum

# torch's own remark on the "same" padding of an even kernel, which a test uses on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

#: Relative error of a gradient: a few hundred float32 roundings (2^-24) in passes of a few layers.
TOLERANCE = 2e-5
RECORDS, CLASSES = 5, 3


@dataclass(frozen=True)
class Weighted:
    """A rule for tests: given factors, or one for all records, whatever the norms."""

    weights: tuple[float, ...]
    sensitivity: float = 1.0

    def factors(self, norms: Tensor) -> Tensor:
        return torch.tensor(self.weights, dtype=norms.dtype).view(-1, 1).expand_as(norms)

    def within(self, norms: Tensor) -> Tensor:
        return norms.sum(dim=1) >= 0


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


def head(features: int) -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(features, CLASSES))


class Tied(nn.Module):
    """One parameter in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Twice(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Reused(nn.Module):
    """A layer's weight used beside the layer, which no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x) @ self.layer.weight))


class Own(nn.Module):
    """Parameters of the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.rand(6)), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x * self.scale))


class PositionsFirst(nn.Module):
    """The layer sees (positions, records, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x.transpose(0, 1))).transpose(0, 1).mean(dim=1))


class Overwritten(nn.Module):
    """The layers' outputs are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.mul_(3)
        hidden.relu_()
        return self.second(hidden).mul_(2)


def convolution(layer: nn.Module, *shape: int) -> tuple[nn.Module, tuple[int, ...]]:
    with torch.no_grad():
        features = layer(torch.zeros(1, *shape)).numel()
    return nn.Sequential(layer, head(features)), shape


NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(7, 6), head(6)), (7,)),
    "linear without bias": lambda: (nn.Sequential(nn.Linear(7, 6, bias=False), head(6)), (7,)),
    "linear over tokens": lambda: (nn.Sequential(nn.Linear(7, 6), head(24)), (4, 7)),
    "linear over few tokens, by Gram matrices": lambda: (nn.Sequential(nn.Linear(40, 60), head(120)), (2, 40)),
    "linear over a grid": lambda: (nn.Sequential(nn.Linear(7, 6), head(36)), (2, 3, 7)),
    "layer norm": lambda: (nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), head(6)), (7,)),
    "layer norm over tokens": lambda: (nn.Sequential(nn.LayerNorm((4, 7)), head(84)), (3, 4, 7)),
    "layer norm without bias": lambda: (nn.Sequential(nn.LayerNorm(7, bias=False), head(7)), (7,)),
    "conv2d": lambda: convolution(nn.Conv2d(3, 4, 3), 3, 8, 7),
    "conv2d on one channel": lambda: convolution(nn.Conv2d(1, 4, 3, stride=2, padding=1), 1, 9, 8),
    "conv2d strided, padded, dilated": lambda: convolution(
        nn.Conv2d(3, 4, (3, 2), stride=(2, 3), padding=(1, 2), dilation=(2, 1)), 3, 9, 8
    ),
    "conv2d same": lambda: convolution(nn.Conv2d(2, 4, 4, padding="same"), 2, 6, 5),
    "conv2d circular": lambda: convolution(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), 2, 6, 5),
    "conv2d reflect": lambda: convolution(nn.Conv2d(2, 4, 3, padding=2, padding_mode="reflect"), 2, 6, 5),
    "conv2d grouped": lambda: convolution(nn.Conv2d(4, 6, 3, groups=2, stride=2), 4, 8, 7),
    "conv2d depthwise": lambda: convolution(nn.Conv2d(4, 4, 3, groups=4, bias=False), 4, 6, 6),
    "conv2d of one position": lambda: convolution(nn.Conv2d(4, 5, 4), 4, 4, 4),
    "conv2d, by Gram matrices": lambda: convolution(nn.Conv2d(16, 48, 3, stride=2), 16, 5, 5),
    "conv1d": lambda: convolution(nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2), 3, 12),
    "conv1d same, grouped": lambda: convolution(nn.Conv1d(4, 4, 4, padding="same", groups=2), 4, 9),
    "conv1d circular": lambda: convolution(nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular"), 2, 9),
    "group norm": lambda: convolution(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), 2, 6, 6),
    "embedding": lambda: (nn.Sequential(nn.Embedding(9, 5, padding_idx=0), head(30)), (6,)),
    "overwritten outputs": lambda: (Overwritten(), (6,)),
}
GENERAL: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "tied": lambda: (Tied(), (6,)),
    "twice": lambda: (Twice(), (6,)),
    "reused weight": lambda: (Reused(), (6,)),
    "own parameter": lambda: (Own(), (6,)),
    "positions first": lambda: (PositionsFirst(), (4, 6)),
    "positions first, as many as checked": lambda: (PositionsFirst(), (3, 6)),
    "positions first, as many as records": lambda: (PositionsFirst(), (RECORDS, 6)),
    "prelu": lambda: (nn.Sequential(nn.Linear(6, 6), nn.PReLU(6), nn.Linear(6, CLASSES)), (6,)),
    "conv3d": lambda: convolution(nn.Conv3d(2, 3, 2), 2, 4, 4, 4),
    "weight norm": lambda: (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), head(6)), (6,)),
}


def make(factory: Callable[[], tuple[nn.Module, tuple[int, ...]]], copies: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs (records, copies, ...) and labels."""
    torch.manual_seed(1)
    network, shape = factory()
    inputs = torch.randn(RECORDS, copies, *shape)
    if any(isinstance(layer, nn.Embedding) for layer in network.modules()):
        inputs = torch.randint(0, 4, (RECORDS, copies, *shape))  # few values: indices repeat within a record
    return network, inputs, torch.randint(0, CLASSES, (RECORDS,))


def record_gradients(network: nn.Module, inputs: Tensor, labels: Tensor) -> list[list[Tensor]]:
    """By autograd in float64, one record at a time; inputs (records, copies, ...): the mean over the copies' losses."""
    network = copy.deepcopy(network).double()
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    found = []
    for record, label in zip(inputs, labels, strict=True):
        loss = cross_entropy(network(record), label.expand(len(record))).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)])
    return found


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    scale = torch.stack([e.norm() for e in expected]).norm()
    return float(torch.stack([(f - e).norm() for f, e in zip(found, expected, strict=True)]).norm() / scale)


def assert_records_match(
    gradients: ClippedGradients, inputs: Tensor, labels: Tensor, expected: list[list[Tensor]], *, augmented: bool
) -> None:
    for record, gradient in enumerate(expected):
        only = Weighted(tuple(float(i == record) for i in range(len(labels))))
        found = gradients.sum(inputs, labels, only, augmented=augmented)
        assert relative_error(found.sums, gradient) < TOLERANCE
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        assert float(found.norms[record]) == pytest.approx(float(norm), rel=TOLERANCE)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_supported_layer_gives_autograds_record_gradients(
    name: str, copies: int, caplog: pytest.LogCaptureFixture
) -> None:
    network, inputs, labels = make(NETWORKS[name], copies)
    gradients = ClippedGradients(network, cross_entropy)
    with caplog.at_level(logging.WARNING):
        assert_records_match(
            gradients,
            inputs if copies > 1 else inputs.squeeze(1),
            labels,
            record_gradients(network, inputs, labels),
            augmented=copies > 1,
        )
    assert not caplog.records  # the fast way, not torch.func


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("name", GENERAL)
def test_another_network_gives_autograds_record_gradients_through_torch_func(
    name: str, copies: int, caplog: pytest.LogCaptureFixture
) -> None:
    network, inputs, labels = make(GENERAL[name], copies)
    gradients = ClippedGradients(network, cross_entropy)
    with caplog.at_level(logging.WARNING):
        assert_records_match(
            gradients,
            inputs if copies > 1 else inputs.squeeze(1),
            labels,
            record_gradients(network, inputs, labels),
            augmented=copies > 1,
        )
    assert "torch.func" in caplog.text


@settings(max_examples=25)
@given(st.data())
def test_any_convolution_gives_autograds_record_gradients(data: st.DataObject) -> None:
    draw, pair = data.draw, st.tuples(st.integers(1, 3), st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    layer = nn.Conv2d(
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
        draw(pair),
        stride=draw(pair),
        padding=draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        dilation=draw(pair),
        groups=groups,
        bias=draw(st.booleans()),
    )
    network, inputs, labels = make(lambda: convolution(layer, layer.in_channels, 7, 8), draw(st.integers(1, 2)))
    gradients = ClippedGradients(network, cross_entropy)
    expected = record_gradients(network, inputs, labels)
    assert_records_match(gradients, inputs, labels, expected, augmented=True)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # of Opacus' hook on the first layer
def test_opacus_finds_the_same_record_gradients() -> None:
    network, inputs, labels = make(NETWORKS["group norm"])
    wrapped = GradSampleModule(copy.deepcopy(network), loss_reduction="sum")
    cross_entropy(wrapped(inputs.squeeze(1)), labels).sum().backward()
    expected = [sum(parameter.grad_sample.unbind()) for parameter in wrapped.parameters()]
    found = ClippedGradients(network, cross_entropy).sum(inputs.squeeze(1), labels, Weighted((1.0,)))
    assert relative_error(found.sums, expected) < TOLERANCE


def test_frozen_parameters_are_left_out() -> None:
    network, inputs, labels = make(NETWORKS["group norm"])
    for parameter in (*network[0][0].parameters(), network[1][2].bias):
        parameter.requires_grad_(False)
    gradients = ClippedGradients(network, cross_entropy)
    assert gradients.layers == ("0.1", "1.2")
    assert gradients.layer_of == (0, 0, 1)
    expected = record_gradients(network, inputs, labels)
    assert_records_match(gradients, inputs.squeeze(1), labels, expected, augmented=False)


def test_a_layer_that_the_loss_does_not_reach_gets_zeros() -> None:
    network, inputs, labels = make(NETWORKS["linear"])
    network.unused = nn.Linear(2, 2)
    network.forward = lambda x: network[1](network[0](x))
    found = ClippedGradients(network, cross_entropy).sum(inputs.squeeze(1), labels, Flat(1.0))
    assert not found.sums[-1].any()
    assert found.sums[0].any()


def test_dropout_draws_for_every_record_and_leaves_the_fast_way_in_use(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))
    inputs, labels = torch.ones(2, 50), torch.zeros(2, dtype=torch.int64)
    gradients = ClippedGradients(network, cross_entropy)
    state = torch.get_rng_state()
    gradients._check(inputs, labels, 1)
    assert torch.equal(torch.get_rng_state(), state)  # the check leaves the run's generator alone
    first, second = (gradients.sum(inputs, labels, Weighted(w)).sums[0] for w in ((1.0, 0.0), (0.0, 1.0)))
    assert not torch.equal(first, second)
    assert not caplog.records


@pytest.mark.parametrize("name", ["conv2d", "twice"])
def test_physical_batches_do_not_change_the_sum(name: str) -> None:
    network, inputs, labels = make((NETWORKS | GENERAL)[name])
    inputs = inputs.squeeze(1)
    whole = ClippedGradients(network, cross_entropy, RECORDS).sum(inputs, labels, Flat(0.5))
    for size in range(1, RECORDS):
        pieces = ClippedGradients(network, cross_entropy, size).sum(inputs, labels, Flat(0.5))
        assert relative_error(pieces.sums, whole.sums) < TOLERANCE
        assert pieces.norms == pytest.approx(whole.norms, rel=TOLERANCE)
        assert (pieces.below, pieces.refused) == (whole.below, whole.refused)
        assert pieces.loss == pytest.approx(whole.loss, rel=TOLERANCE)


def test_a_batch_of_thousands_is_split_and_summed() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 5), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 24 * 24, CLASSES))
    inputs, labels = torch.rand(1500, 1, 28, 28), torch.randint(0, CLASSES, (1500,))
    gradients = ClippedGradients(network, cross_entropy)
    found = gradients.sum(inputs, labels, Weighted((1.0,)))
    assert gradients._choose_batch(1) < 1500
    cross_entropy(network(inputs), labels).sum().backward()
    assert relative_error(found.sums, [parameter.grad for parameter in network.parameters()]) < TOLERANCE


def test_clipping_per_layer_scales_each_layer_by_its_own_norm() -> None:
    network, inputs, labels = make(NETWORKS["linear"])
    gradients = ClippedGradients(network, cross_entropy)
    found = gradients.sum(inputs.squeeze(1), labels, PerLayer((0.2, 0.3)))
    expected = [torch.zeros_like(total, dtype=torch.float64) for total in found.sums]
    for gradient in record_gradients(network, inputs, labels):
        for layer, threshold in enumerate((0.2, 0.3)):
            members = [index for index, owner in enumerate(gradients.layer_of) if owner == layer]
            norm = torch.cat([gradient[index].flatten() for index in members]).norm()
            for index in members:
                expected[index] += gradient[index] * min(1.0, threshold / float(norm))
    assert relative_error(found.sums, expected) < 1e-4  # the margin for rounding, 2^-15, on top


def test_loss_norms_and_counts_describe_the_records() -> None:
    network, inputs, labels = make(NETWORKS["conv2d"])
    norms = [
        float(torch.cat([g.flatten() for g in record]).norm()) for record in record_gradients(network, inputs, labels)
    ]
    threshold = sum(sorted(norms)[2:4]) / 2
    found = ClippedGradients(network, cross_entropy).sum(inputs.squeeze(1), labels, Flat(threshold))
    assert found.norms.tolist() == pytest.approx(norms, rel=TOLERANCE)
    assert (found.below, found.refused) == (3, 0)
    assert found.loss == pytest.approx(
        float(cross_entropy(network(inputs.squeeze(1)), labels).mean().detach()), rel=TOLERANCE
    )


def test_an_empty_sample_gives_zeros() -> None:
    network, inputs, labels = make(NETWORKS["conv2d"])
    found = ClippedGradients(network, cross_entropy).sum(inputs.squeeze(1)[:0], labels[:0], Flat(1.0))
    assert [total.shape for total in found.sums] == [parameter.shape for parameter in network.parameters()]
    assert not any(total.any() for total in found.sums)
    assert (len(found.norms), found.below, found.refused, found.loss) == (0, 0, 0, 0.0)


def test_the_network_is_left_as_it_was() -> None:
    network, inputs, labels = make(NETWORKS["conv2d"])
    ClippedGradients(network, cross_entropy).sum(inputs.squeeze(1), labels, Flat(1.0))
    assert all(parameter.grad is None and parameter.is_contiguous() for parameter in network.parameters())
    assert not any(layer._forward_hooks for layer in network.modules())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["conv2d", "linear", "linear over few tokens, by Gram matrices", "twice"])
def test_a_record_without_a_finite_gradient_contributes_zero_and_is_counted(name: str, value: float) -> None:
    network, inputs, labels = make((NETWORKS | GENERAL)[name])
    inputs = inputs.squeeze(1)
    gradients = ClippedGradients(network, cross_entropy)
    without = gradients.sum(inputs[1:], labels[1:], Flat(0.5))
    inputs[0] = value
    assert_first_is_refused(gradients.sum(inputs, labels, Flat(0.5)), without)


def test_a_record_with_a_norm_beyond_float32_contributes_zero_and_is_counted() -> None:
    network, inputs, labels = make(lambda: (nn.Linear(7, CLASSES), (7,)))
    inputs = inputs.squeeze(1)
    inputs[0, :] = 3e38  # the loss and each element of the gradient are finite; their norm is not
    inputs[0, 1::2] *= -1
    with torch.no_grad():
        network.weight.zero_()
    gradients = ClippedGradients(network, cross_entropy)
    without = gradients.sum(inputs[1:], labels[1:], Flat(0.5))
    assert_first_is_refused(gradients.sum(inputs, labels, Flat(0.5)), without)


def assert_first_is_refused(found: ClippedSum, without: ClippedSum) -> None:
    assert found.refused == 1
    assert found.norms[0].isinf()
    assert found.norms[1:].isfinite().all()
    assert relative_error(found.sums, without.sums) < TOLERANCE
    assert found.below == without.below


def test_cancelling_positions_are_not_clipped_by_too_small_a_norm() -> None:
    """Huge positions whose products cancel: the ghost norm in float32 would be anything."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Flatten(), nn.Linear(128, CLASSES))
    network[2].requires_grad_(False)
    network[2].weight[:, 64:] = network[2].weight[:, :64]  # both positions get the same gradient
    inputs = torch.randn(30, 2, 64) * 1e6
    inputs[:, 1] = -inputs[:, 0] * (1 + 1e-6)
    label = torch.zeros(1, dtype=torch.int64)
    gradients = ClippedGradients(network, cross_entropy)
    assert gradients.layers == ("0",)
    for record in inputs:  # in float32 about half of them would get a norm of zero and go unclipped
        found = gradients.sum(record[None], label, Flat(1e-2))
        assert 0 < float(found.sums[0].double().norm()) <= 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"physical_batch": 0}, "physical batch"),
        ({"loss": lambda z, y: cross_entropy(z, y).mean()}, "one number a row"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    network, inputs, labels = make(NETWORKS["linear"])
    with pytest.raises(ParameterError, match=message):
        ClippedGradients(network, **{"loss": cross_entropy, **arguments}).sum(inputs.squeeze(1), labels, Flat(1.0))


def test_wrong_networks_and_data_are_refused() -> None:
    network, inputs, labels = make(NETWORKS["linear"])
    with pytest.raises(ParameterError, match="one label a record"):
        ClippedGradients(network, cross_entropy).sum(inputs.squeeze(1), labels[1:], Flat(1.0))
    with pytest.raises(ParameterError, match="float32"):
        ClippedGradients(copy.deepcopy(network).double(), cross_entropy)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ParameterError, match="no trainable"):
        ClippedGradients(network, cross_entropy)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-13, 1e-6, 1.0, 1e6, 1e13, 1e20, 1e30])
def test_row_norms_are_right_at_every_magnitude(scale: float) -> None:
    """Where the squares of float32 vanish or overflow, a record would pass for short and stay unclipped."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(7, 9000, generator=generator) * scale
    rows[3] = 0.0
    expected = torch.linalg.vector_norm(rows.double(), dim=1)
    torch.testing.assert_close(layers._row_norms(rows), expected, rtol=ROUNDING_MARGIN / 4, atol=0.0)
