"""Polynomials in the place of a trained network's activations, to be trained on and exported as x * x and sums.

    network   conv --ReLU--> pool              weights of a released model
    replace   conv --p(x / R)--> pool          R: largest |x| seen on training records, widened; p fitted there
    train     loss + weight * excess           excess: max(0, |x / R| - 1)**2, summed over a record's values, so that
                                               they stay inside: outside, a polynomial goes where it likes
    freeze    conv --(c2 x + c1) x + c0-->     constants alone, which `heinfer partition` recognises as exact

For example relu on [-2, 2], in u = x / 2, by degree 2 and with values spread evenly: 0.19 + u + 0.94 u**2.

Activations are replaced from the front, each on what those before it, already replaced, make of the records. Networks
with polynomials alone go back to Gilad-Bachrach et al., "CryptoNets" (2016); training with values held in an interval,
by normalisation, to Chabanne et al., "Privacy-preserving classification on deep neural network" (2017).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

from heinfer.errors import InputError
from heinfer.training.export import export_network
from heinfer.training.settings import Polynomials

#: Activations that are replaced: functions of single values without weights of their own.
ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6,
    nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softsign, nn.Tanh,
)  # fmt: skip
#: What none of them may be left as in the exported graph.
_ONNX_ACTIVATIONS = frozenset(
    ["Celu", "Clip", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu",
     "Sigmoid", "Softplus", "Softsign", "Swish", "Tanh"]
)  # fmt: skip
#: Training records on which ranges are measured, records in a forward pass, and values that a fit looks at.
MEASURED_RECORDS = 2000
_BATCH = 500
_FITTED_VALUES = 20_000
#: Points that cover the whole interval, and their weight beside the values seen, so that no end of it is ignored.
_GRID_POINTS = 201
_GRID_SHARE = 0.05
#: A range is at least this: a layer of zeros must not divide by nothing.
_SMALLEST_RANGE = 2.0**-8


class PolynomialActivation(nn.Module):
    """p(x / R) with trainable coefficients.

    Args:
        coefficients: of powers of u = x / R, from the constant up, shape (degree + 1,).
        limit: R, positive.
        learned: whether the coefficients are trained.
    """

    limit: Tensor
    coefficients: Tensor

    def __init__(self, coefficients: Tensor, limit: Tensor, learned: bool = True) -> None:
        super().__init__()
        self.register_buffer("limit", limit)
        self.coefficients = nn.Parameter(coefficients, requires_grad=learned)
        #: max(0, |x / R| - 1)**2, summed over a record's elements: its mean over the last batch in training.
        self.excess: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every element; shape (batch, *shape) stays as it is."""
        u = x / self.limit
        if self.training:
            self.excess = (u.abs() - 1).clamp(min=0).square().flatten(1).sum(dim=1).mean()
        return _horner(u, self.coefficients)


class FrozenPolynomial(nn.Module):
    """The same polynomial in x itself, of constants alone: what is exported.

    Args:
        trained: whose coefficients it takes.
    """

    def __init__(self, trained: PolynomialActivation) -> None:
        super().__init__()
        limit = float(trained.limit)
        coefficients = trained.coefficients.detach().double().tolist()
        self.constants = [c / limit**power for power, c in enumerate(coefficients)]

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every element."""
        return _horner(x, self.constants)


def _horner(x: Tensor, coefficients: Any) -> Tensor:
    *lower, value = coefficients
    for coefficient in reversed(lower):
        value = value * x + coefficient
    result: Tensor = value
    return result


@dataclass(frozen=True, slots=True)
class Replacement:
    """An activation that became a polynomial.

    Attributes:
        name: of the layer.
        function: what it was.
        degree: of the polynomial.
        range: R.
        error: of the first polynomial: root mean square over the activation's standard deviation, on the values seen.
    """

    name: str
    function: str
    degree: int
    range: float
    error: float


def load_start(network: nn.Module, path: Path) -> str:
    """Take the weights of a released model into an untrained network of the same architecture.

    Args:
        network: changed.
        path: an ONNX model that `heinfer.training.export` wrote.

    Returns:
        The file's SHA-256, in hexadecimal digits.

    Raises:
        InputError: the file is no such model, or its weights don't fit.
    """
    try:
        content = path.read_bytes()
        model = onnx.load_model_from_string(content)
    except OSError as error:
        raise InputError(f"cannot read the model to start from, {path}: {error.strerror}") from None
    except Exception as error:  # protobuf has kinds of its own
        raise InputError(f"{path} is not an ONNX model: {error}") from None
    given = {tensor.name: tensor for tensor in model.graph.initializer}
    wanted = network.state_dict()
    missing = [
        name for name, weights in wanted.items() if tuple(getattr(given.get(name), "dims", (-1,))) != weights.shape
    ]
    if missing:
        raise InputError(
            f"{path} has no fitting weights for {', '.join(missing)}; start from a model of the same architecture, "
            "[network] options included, that `heinfer train` wrote"
        )
    network.load_state_dict({name: torch.tensor(numpy_helper.to_array(given[name])) for name in wanted})
    return hashlib.sha256(content).hexdigest()


def replace_activations(network: nn.Module, inputs: Tensor, settings: Polynomials) -> list[Replacement]:
    """Put polynomials in the place of all activations, and averages in that of largest values where this is asked.

    Args:
        network: trained; changed, and left in evaluation mode.
        inputs: training records as the network takes them, shape (records, *input_shape).
        settings: degree, margin of the ranges, and whether coefficients are trained.

    Raises:
        InputError: there is no activation that can be replaced.
    """
    network.eval()
    if settings.average_pooling:
        _replace_pooling(network)
    measured = inputs[:MEASURED_RECORDS]
    made = []
    for name in _in_order(network, measured[:1]):
        activation = network.get_submodule(name)
        seen = _seen(network, activation, measured)
        polynomial, error = _fit(activation, seen, settings)
        _swap(network, activation, polynomial)
        made.append(Replacement(name, type(activation).__name__, settings.degree, float(polynomial.limit), error))
    if not made:
        raise InputError("the network has no activations that can become polynomials: none is a module of torch.nn")
    return made


def check_replaced(network: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse, before anything is trained, a network that computes activations where they can't be found.

    Raises:
        InputError: it does.
    """
    with torch.random.fork_rng():
        model = export_network(freeze(network), input_shape)
    left = sorted({node.op_type for node in model.graph.node} & _ONNX_ACTIVATIONS)
    if left:
        raise InputError(
            f"the network still computes {', '.join(left)} after its activations were replaced: make them modules of "
            "torch.nn, such as nn.ReLU, rather than calls of functions"
        )


def excess(network: nn.Module) -> Tensor:
    """Return how far values of the last batch were outside their ranges, summed over the polynomials."""
    found = [m.excess for m in network.modules() if isinstance(m, PolynomialActivation) and m.excess is not None]
    return torch.stack(found).sum()


@torch.no_grad()
def fraction_outside(network: nn.Module, batches: Iterable[Tensor]) -> float:
    """Return which part of the records makes some activation's input leave its range."""
    polynomials = [m for m in network.modules() if isinstance(m, PolynomialActivation)]
    outside: list[Tensor] = []

    def look(limit: Tensor) -> Callable[..., None]:
        return lambda _, arguments: outside.append(((arguments[0] / limit).abs() > 1).flatten(1).any(dim=1))

    handles = [polynomial.register_forward_pre_hook(look(polynomial.limit)) for polynomial in polynomials]
    found, records = 0, 0
    try:
        for batch in batches:
            outside.clear()
            network(batch)
            found += int(torch.stack(outside).any(dim=0).sum())
            records += len(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found / records


def freeze(network: nn.Module) -> nn.Module:
    """Return a copy with constants in place of what was trainable in the polynomials, ready to be exported."""
    frozen = copy.deepcopy(_forgetting(network)).eval()
    for module in list(frozen.modules()):
        if isinstance(module, PolynomialActivation):
            _swap(frozen, module, FrozenPolynomial(module))
    return frozen


def _forgetting(network: nn.Module) -> nn.Module:
    """Drop what the last batch left in the polynomials: it belongs to a graph, which can't be copied."""
    for module in network.modules():
        if isinstance(module, PolynomialActivation):
            module.excess = None
    return network


def _replace_pooling(network: nn.Module) -> None:
    for module in list(network.modules()):
        if isinstance(module, nn.MaxPool2d):
            if module.dilation not in (1, (1, 1)):
                raise InputError("average pooling has no dilation, the network's max pooling has; set it to 1")
            average = nn.AvgPool2d(module.kernel_size, module.stride, module.padding, module.ceil_mode)
            _swap(network, module, average)


def _swap(network: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever the network holds it."""
    for parent in list(network.modules()):
        for name, child in list(parent._modules.items()):  # named_children leaves a second name out
            if child is old:
                setattr(parent, name, new)


@torch.no_grad()
def _in_order(network: nn.Module, example: Tensor) -> list[str]:
    """Return the names of the activations in the order in which they are computed."""
    order: list[str] = []
    named = {name: module for name, module in network.named_modules() if isinstance(module, ACTIVATIONS)}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: order.append(name)

    handles = [module.register_forward_pre_hook(note(name)) for name, module in named.items()]
    try:
        network(example)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(order))


@torch.no_grad()
def _seen(network: nn.Module, activation: nn.Module, inputs: Tensor) -> Tensor:
    """Return all values that an activation is given, shape (values,)."""
    seen: list[Tensor] = []
    handle = activation.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach().flatten()))
    try:
        for batch in torch.split(inputs, _BATCH):
            network(batch)
    finally:
        handle.remove()
    return torch.cat(seen)


def _fit(activation: nn.Module, seen: Tensor, settings: Polynomials) -> tuple[PolynomialActivation, float]:
    """Return an activation's first polynomial, and its error."""
    limit = settings.margin * max(float(seen.abs().max()), _SMALLEST_RANGE)
    u = (seen[:: -(-len(seen) // _FITTED_VALUES)].double() / limit).cpu().numpy()
    fitted, expected = _least_squares(activation, u, limit, settings.degree)
    powers = np.zeros(settings.degree + 1)
    found = chebyshev.cheb2poly(fitted)
    powers[: len(found)] = found
    made = PolynomialActivation(
        torch.tensor(powers, dtype=torch.float32, device=seen.device),
        torch.tensor(limit, dtype=torch.float32, device=seen.device),
        learned=settings.learned,
    )
    spread = float(np.std(expected))
    wrong = float(np.sqrt(np.mean((chebyshev.chebval(u, fitted) - expected) ** 2)))
    return made, wrong / spread if spread else 0.0


def _least_squares(
    activation: nn.Module, u: NDArray[np.float64], limit: float, degree: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fit a Chebyshev series to an activation on [-1, 1] times `limit`; return it, and what is exact at u."""
    grid = np.linspace(-1, 1, _GRID_POINTS)
    points = np.concatenate([u, grid])
    with torch.no_grad():
        exact = activation(torch.tensor(points * limit)).numpy()
    weights = np.sqrt(
        np.concatenate([np.full(len(u), (1 - _GRID_SHARE) / len(u)), np.full(len(grid), _GRID_SHARE / len(grid))])
    )
    return np.asarray(chebyshev.chebfit(points, exact, degree, w=weights), np.float64), exact[: len(u)]
