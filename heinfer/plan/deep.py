"""Deep blocks: layers and polynomial activations that the server evaluates without asking the node in between.

    inputs (slots: one sample each, at `input_scale`) --> layer --> polynomial --> layer --> ... --> outputs

A value is a tensor, flattened; it has one ciphertext an element. Inputs are values 0 .. n-1, layers make the others.
A *weighted* layer is an integer matrix and a bias in the units of its result, which are chosen so that the range seen
in calibration is [-1, 1]; its result has a scale of its own. A *sum* adds elements up (pooling) and keeps the scale.
An activation drops primes and ends at `activation_scale`, whatever it is; factors that differ between the sources of a
layer are in its matrix. So every sum of ciphertexts meets its equal in level and scale, and this is checked here; that
no value outgrows its primes, in `heinfer.plan.headroom`.

Arrays, by layer name: `.indptr`, `.indices`, `.weights` (a compressed sparse matrix, rows x all sources joined, int32),
`.bias` (float64, rows), `.coefficients` (float64, rows x (degree + 1); `.shift` (rows) alone for a square).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import prod
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from heinfer.errors import PlanError
from heinfer.operators.polynomials import MAX_DEGREE, levels
from heinfer.operators.steps import CONFIG
from heinfer.plan.headroom import check_headroom, check_scales
from heinfer.plan.tensors import TensorSpec
from heinfer.ring.chain import CHAIN_WEIGHT_LIMIT, ChainParameters

Activation = Literal["none", "square", "polynomial"]
#: Primes that a square drops: two narrow ones.
SQUARE_PRIMES: Final = 2
#: Scales are products and quotients of the same numbers; they differ by roundings alone.
_SAME: Final = 1e-12


@dataclass(frozen=True, slots=True, config=CONFIG)
class ChainInfo:
    """A chain as numbers; `parameters` checks it against the security table."""

    degree: int
    primes: tuple[int, ...]
    special: int

    @property
    def parameters(self) -> ChainParameters:
        """The checked parameters."""
        return ChainParameters(self.degree, self.primes, self.special)


@dataclass(frozen=True, slots=True, config=CONFIG)
class Layer:
    """A linear map and the activation of its result.

    Attributes:
        name: prefix of its arrays.
        sources: numbers of the values that it reads, joined in this order.
        rows: elements of its result.
        columns: elements of its sources together.
        kind: "weighted", or "sum": its weights are small integers, and its scale that of its source.
        primes: of its result, before the activation.
        scale: likewise.
        activation: what follows.
        degree: of the polynomial; 2 for a square, 0 for none.
    """

    name: str
    sources: tuple[Annotated[int, Field(ge=0)], ...]
    rows: Annotated[int, Field(ge=1)]
    columns: Annotated[int, Field(ge=1)]
    kind: Literal["weighted", "sum"]
    primes: Annotated[int, Field(ge=1)]
    scale: Annotated[float, Field(gt=0)]
    activation: Activation = "none"
    degree: Annotated[int, Field(ge=0, le=MAX_DEGREE)] = 0

    @property
    def primes_left(self) -> int:
        """Primes of its result, after the activation."""
        match self.activation:
            case "none":
                return self.primes
            case "square":
                return self.primes - SQUARE_PRIMES
            case _:
                return self.primes - levels(self.degree)


@dataclass(frozen=True, slots=True, config=CONFIG)
class DeepBlock:
    """One upload, several layers.

    Attributes:
        chain: its moduli.
        inputs: tensors that are uploaded.
        outputs: tensors that come back.
        input_scale: that inputs are encrypted at, after they are divided by their calibrated range.
        activation_scale: of every activation's result.
        layers: in order.
        results: number of the value of every output.
        operators: what it holds, "name (type)" each, for people.
    """

    chain: ChainInfo
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    input_scale: Annotated[float, Field(gt=0)]
    activation_scale: Annotated[float, Field(gt=0)]
    layers: tuple[Layer, ...]
    results: tuple[int, ...]
    operators: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check shapes, levels and scales of every layer, and that values fit their primes.

        Raises:
            PlanError: they contradict each other.
            ParameterError: the chain is above the security table.
        """
        chain = self.chain.parameters
        sizes = [prod(t.shape) for t in self.inputs]
        left = [len(chain.primes)] * len(sizes)
        scales = [self.input_scale] * len(sizes)
        for number, layer in enumerate(self.layers):
            if not layer.sources or any(s >= len(sizes) for s in layer.sources):
                raise PlanError(f"layer {number} reads a value that does not exist yet")
            if layer.columns != sum(sizes[s] for s in layer.sources):
                raise PlanError(f"layer {number} has {layer.columns} columns, and its sources have other sizes")
            if layer.primes > min(left[s] for s in layer.sources) or layer.primes_left < 1:
                raise PlanError(f"layer {number} has more primes than its sources, or too few for its activation")
            if layer.kind == "sum" and (
                layer.activation != "none" or any(not _same(scales[s], layer.scale) for s in layer.sources)
            ):
                raise PlanError(f"layer {number} adds values of other scales than its own")
            if (layer.activation == "none") != (layer.degree == 0) or (layer.activation == "square") > (
                layer.degree == 2
            ):
                raise PlanError(f"layer {number} has an activation of another degree than it says")
            if layer.activation == "square":
                dropped = chain.primes[layer.primes_left : layer.primes]
                if not _same(layer.scale**2 / prod(map(float, dropped)), self.activation_scale):
                    raise PlanError(f"the square of layer {number} does not end at the scale of activations")
            sizes.append(layer.rows)
            left.append(layer.primes_left)
            scales.append(layer.scale if layer.activation == "none" else self.activation_scale)
        expected = [prod(t.shape) for t in self.outputs]
        if len(self.results) != len(expected) or any(
            not len(self.inputs) <= r < len(sizes) or sizes[r] != e for r, e in zip(self.results, expected, strict=True)
        ):
            raise PlanError("an output of a deep block does not exist, or has another shape")
        check_scales(self)

    @property
    def input_count(self) -> int:
        """Ciphertexts of an upload."""
        return sum(prod(t.shape) for t in self.inputs)

    @property
    def output_count(self) -> int:
        """Ciphertexts of an answer."""
        return sum(prod(t.shape) for t in self.outputs)

    @property
    def key_rows(self) -> int:
        """Rows of the relinearisation keys that an upload begins with."""
        primes = len(self.chain.primes)
        return primes * 2 * (primes + 1)

    @property
    def rows_up(self) -> int:
        """Rows of an upload: polynomials modulo one prime each."""
        return self.key_rows + self.input_count * 2 * len(self.chain.primes)

    @property
    def rows_down(self) -> int:
        """Rows of an answer."""
        return self.output_count * 2 * self.result_primes

    @property
    def result_primes(self) -> int:
        """Primes of the ciphertexts that come back."""
        return min(self.layers[r - len(self.inputs)].primes_left for r in self.results)

    def result_scale(self, output: int) -> float:
        """Scale of an output's ciphertexts."""
        layer = self.layers[self.results[output] - len(self.inputs)]
        return layer.scale if layer.activation == "none" else self.activation_scale

    def own_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return those of the arrays that belong to its layers."""
        prefixes = tuple(f"{layer.name}." for layer in self.layers)
        return {name: array for name, array in arrays.items() if name.startswith(prefixes)}

    def check_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Check that the arrays of every layer are there and fit, and that no value can outgrow its primes.

        Raises:
            PlanError: they don't, or one can.
        """
        for layer in self.layers:
            _check_layer(layer, arrays)
        check_headroom(self, arrays)


def _same(left: float, right: float) -> bool:
    return abs(left - right) <= _SAME * right


def _check_layer(layer: Layer, arrays: Mapping[str, NDArray[Any]]) -> None:
    def array(suffix: str, dtype: Any, shape: tuple[int, ...] | None) -> NDArray[Any]:
        name = f"{layer.name}.{suffix}"
        found = arrays.get(name)
        if found is None or found.dtype != dtype or (shape is not None and found.shape != shape) or found.ndim == 0:
            raise PlanError(f"array {name!r} of a deep block is missing or does not fit")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise PlanError(f"array {name!r} of a deep block holds values that are not usable")
        return found

    pointers = array("indptr", np.int32, (layer.rows + 1,))
    indices, weights = array("indices", np.int32, None), array("weights", np.int32, None)
    if pointers[0] != 0 or pointers[-1] != len(indices) or np.any(np.diff(pointers) < 1) or indices.ndim != 1:
        raise PlanError(f"the matrix of {layer.name!r} is damaged, or has a row of nothing")
    if indices.shape != weights.shape or (len(indices) and not 0 <= indices.min() <= indices.max() < layer.columns):
        raise PlanError(f"the matrix of {layer.name!r} is damaged")
    if len(weights) and np.abs(weights.astype(np.int64)).max() > CHAIN_WEIGHT_LIMIT:
        raise PlanError(f"a weight of {layer.name!r} is too large")
    if layer.kind == "weighted":
        array("bias", np.float64, (layer.rows,))
    if layer.activation == "square":
        array("shift", np.float64, (layer.rows,))
    if layer.activation == "polynomial":
        array("coefficients", np.float64, (layer.rows, layer.degree + 1))


def layer_matrix(layer: Layer, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return the integer matrix of a layer, dense, shape (rows, columns)."""
    pointers, indices = arrays[f"{layer.name}.indptr"], arrays[f"{layer.name}.indices"]
    dense = np.zeros((layer.rows, layer.columns))
    np.add.at(dense, (np.repeat(np.arange(layer.rows), np.diff(pointers)), indices), arrays[f"{layer.name}.weights"])
    return dense


def evaluate_deep(
    block: DeepBlock, arrays: Mapping[str, NDArray[Any]], inputs: list[NDArray[np.float64]]
) -> list[NDArray[np.float64]]:
    """Evaluate a deep block in float64 with its integer weights and its polynomials: what ciphertexts approach.

    Args:
        block: the block.
        arrays: of its layers.
        inputs: one array an input, divided by its range, shape (samples, *shape).

    Returns:
        One array an output in the units of its layer, shape (samples, *shape).
    """
    samples = len(inputs[0])
    values = [np.asarray(x, np.float64).reshape(samples, -1) for x in inputs]
    scales = [block.input_scale] * len(values)
    for layer in block.layers:
        joined = np.concatenate([values[s] * scales[s] for s in layer.sources], axis=1)
        v = joined @ layer_matrix(layer, arrays).T / layer.scale
        if layer.kind == "weighted":
            v = v + arrays[f"{layer.name}.bias"]
        if layer.activation == "square":
            v = (v + arrays[f"{layer.name}.shift"]) ** 2
        elif layer.activation == "polynomial":
            coefficients = arrays[f"{layer.name}.coefficients"]
            total = np.broadcast_to(coefficients[:, -1], v.shape)
            for power in range(layer.degree - 1, -1, -1):
                total = total * v + coefficients[:, power]
            v = total
        values.append(v)
        scales.append(layer.scale if layer.activation == "none" else block.activation_scale)
    return [values[r].reshape(samples, *t.shape) for r, t in zip(block.results, block.outputs, strict=True)]
