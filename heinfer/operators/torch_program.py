"""Evaluate a linear program on residues, exactly, on a device of PyTorch: what `residues` does, with the same bits.

    request --(8 bytes a residue)--> device --(all steps)--> answer --(8 bytes a residue)--> host

Worked example: a 3x3 convolution of 64 channels of 56x56. Residues are cut into limbs once, padded, and seen through a
strided view as 576 x 3136 patches, limb by limb; what the view shows is copied tile by tile, so that patches never take
more than the device's working memory, and multiplied. Only elementwise operators, copies and products of matrices are
used: no convolution of a library, which may be free to choose an inexact algorithm (Winograd's, FFT).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.operators.backends import LoadedProgram
from heinfer.operators.program import Arrays, Program
from heinfer.operators.steps import Conv, MatMul, Scale, Shape, Step, Sum, Take, Window, WindowSum
from heinfer.operators.torch_device import WORKING_WORDS, TorchDevice, join_limb_sums, multiply_mod
from heinfer.operators.torch_products import LimbProducts, Limbs, faster_limbs, make_products
from heinfer.ring import ROW_SUM_LIMIT, WEIGHT_LIMIT, ModularMatrix, RingParameters, checked_weights
from heinfer.ring.parameters import LIMB_BITS

Residues = NDArray[np.int64]
#: From all values so far, shape (samples, elements) each, to the step's own value.
Operator = Callable[[Sequence[torch.Tensor]], torch.Tensor]
#: Products that exist already: steps may share an array.
Products = dict[tuple[str, str, int], LimbProducts]
_WORD_BYTES: Final = 8
#: Outputs, inputs and columns of the product that a device is tried with, by its kind. A GPU's is large enough for its
#: library to choose what it chooses for layers.
_TRIAL: Final = {"cpu": (33, 4608, 49), "cuda": (512, 4608, 3136)}


class TorchBackend:
    """Programs on one device; see `heinfer.operators.backends.Backend`.

    Args:
        device: where.
        limbs: kind of products; None: what the device multiplies faster, measured when the first program comes.
    """

    def __init__(self, device: TorchDevice, limbs: Limbs | None = None) -> None:
        self.device = device
        self._limbs = limbs
        self._checked: set[int] = set()

    @property
    def slots(self) -> int:
        """One: a device is used by one evaluation at a time, and what waits is evaluated together."""
        return 1

    @property
    def limbs(self) -> Limbs | None:
        """Kind of products; None before it is known."""
        return self._limbs

    def load(self, program: Program, arrays: Arrays, parameters: RingParameters) -> LoadedProgram:
        """Make a program ready to run; the first one of a ring tries the device.

        Raises:
            PlanError: an array is missing or does not fit.
            ParameterError: weights that no server multiplies with, or the device's arithmetic is not exact.
            InputError: no room on the device.
        """
        if self._limbs is None:
            self._limbs = faster_limbs(self.device, parameters)
        if parameters.modulus not in self._checked:
            check_device(self.device, self._limbs, parameters)
            self._checked.add(parameters.modulus)
        return TorchProgram(program, arrays, parameters, self.device, self._limbs)


class TorchProgram:
    """A server program with its weights on a device; immutable and safe to share between threads.

    Args:
        program: server program (no `Shift`, no `Rescale`).
        arrays: integer weights and index maps.
        parameters: ring.
        device: where.
        limbs: kind of products.

    Raises:
        PlanError: an array is missing or does not fit.
        ParameterError: a weight that is not an integer or too large, or a step that belongs to the node.
        InputError: no room on the device.
    """

    def __init__(
        self, program: Program, arrays: Arrays, parameters: RingParameters, device: TorchDevice, limbs: Limbs
    ) -> None:
        program.check_arrays(arrays)
        self.program = program
        self._device = device
        compiler = _Compiler(arrays, program.shapes, parameters, device, limbs)
        self._run = [compiler.compile(step) for step in program.steps]

    def evaluate_joined(self, residues: Residues) -> Residues:
        """Evaluate the program on inputs that lie one after the other: see `ResidueProgram.evaluate_joined`."""
        sizes = [prod(shape) for shape in self.program.inputs]
        if residues.dtype != np.int64 or residues.ndim != 2 or residues.shape[1] != sum(sizes):
            raise ParameterError(
                f"expected int64 of shape (samples, {sum(sizes)}), found {residues.dtype} {residues.shape}"
            )
        with self._device.lock, torch.inference_mode():
            joined = self._device.upload(np.ascontiguousarray(residues))
            values = list(torch.split(joined, sizes, dim=1))
            for run in self._run:
                values.append(run(values))
            found = torch.cat([values[number] for number in self.program.outputs], dim=1)
            return np.ascontiguousarray(found.cpu().numpy())


class _Compiler:
    """Makes steps ready to run on a device."""

    def __init__(
        self, arrays: Arrays, shapes: Sequence[Shape], parameters: RingParameters, device: TorchDevice, limbs: Limbs
    ) -> None:
        self._arrays, self._shapes, self._parameters = arrays, shapes, parameters
        self._device, self._limbs = device, limbs
        self._products: Products = {}

    def compile(self, step: Step) -> Operator:
        """Return a step as a function of all values so far."""
        match step:
            case Conv():
                return self._conv(step)
            case MatMul():
                return self._matmul(step)
            case Scale():
                return self._scale(step)
            case Take():
                return self._take(step)
            case Sum():
                modulus = self._parameters.modulus
                return lambda values: _add(step, values, modulus)
            case WindowSum():
                return self._window_sum(step)
            case _:
                raise ParameterError(f"a {step.kind} belongs to the node, found in a server's program")

    def _shared(self, step: Conv | MatMul) -> LimbProducts:
        """Products of a step, made once per array and use."""
        group = step.group if isinstance(step, Conv) else 1
        key = (step.kind, step.weights, group)
        if key not in self._products:
            array = self._arrays[step.weights]
            whole = array.T if isinstance(step, MatMul) else array.reshape(array.shape[0], prod(array.shape[1:]))
            weights = checked_weights(whole)
            matrices = weights.reshape(group, weights.shape[0] // group, weights.shape[1])
            self._products[key] = make_products(self._limbs, matrices, self._parameters, self._device)
        return self._products[key]

    def _conv(self, step: Conv) -> Operator:
        source, elements = self._shapes[step.source], prod(step.shape)
        inputs = source[0] // step.group * prod(step.window.kernel)
        if elements == 0 or inputs == 0:
            return lambda values: values[step.source].new_zeros((len(values[step.source]), elements))
        products = self._shared(step)
        return lambda values: _convolve(step, products, source, values[step.source])

    def _matmul(self, step: MatMul) -> Operator:
        inputs, elements = self._shapes[step.source][-1], prod(step.shape)
        if elements == 0 or inputs == 0:
            return lambda values: values[step.source].new_zeros((len(values[step.source]), elements))
        products = self._shared(step)

        def run(values: Sequence[torch.Tensor]) -> torch.Tensor:
            rows = values[step.source].reshape(-1, inputs)
            out = rows.new_empty((len(rows), step.shape[-1]))
            for part in _pieces(len(rows), _words(products, inputs, step.shape[-1])):
                limbs = products.split(rows[part]).permute(2, 0, 1)[None]  # (1, inputs, limbs, rows)
                out[part] = products.multiply(limbs)[0].T
            return out.reshape(-1, elements)

        return run

    def _scale(self, step: Scale) -> Operator:
        weights = checked_weights(self._arrays[step.weights].reshape(-1, 1))[:, 0]
        modulus = self._parameters.modulus
        whole = self._device.keep(weights, torch.int64)
        part = self._device.keep(weights / modulus)
        return lambda values: multiply_mod(values[step.source], whole, part, modulus)

    def _take(self, step: Take) -> Operator:
        if step.indices is None:
            return lambda values: torch.cat([values[s] for s in step.sources], dim=1)
        indices = self._arrays[step.indices]
        size = sum(prod(self._shapes[s]) for s in step.sources)
        kept = self._device.keep(np.where(indices < 0, size, indices).astype(np.int64))  # -1: the zero that is added

        def run(values: Sequence[torch.Tensor]) -> torch.Tensor:
            sources = [values[s] for s in step.sources]
            zero = sources[0].new_zeros((len(sources[0]), 1))
            return torch.cat([*sources, zero], dim=1).index_select(1, kept)

        return run

    def _window_sum(self, step: WindowSum) -> Operator:
        source, modulus, elements = self._shapes[step.source], self._parameters.modulus, prod(step.shape)

        def run(values: Sequence[torch.Tensor]) -> torch.Tensor:
            # A window sees at most 2**26 residues that are not padding, so sums of limbs are below 2**51.
            planes = _padded(values[step.source].reshape(-1, *source), step.window)
            high, low = (
                _windows(part, step.window).sum(dim=(2, 3))
                for part in (planes >> LIMB_BITS, planes & (2**LIMB_BITS - 1))
            )
            return join_limb_sums(high, low, modulus).reshape(-1, elements)

        return run


def _add(step: Sum, values: Sequence[torch.Tensor], modulus: int) -> torch.Tensor:
    total = torch.zeros_like(values[step.sources[0]])
    for source, sign in zip(step.sources, step.signs, strict=True):
        total = torch.remainder(total + sign * values[source], modulus)
    return total


def _convolve(step: Conv, products: LimbProducts, source: Shape, x: torch.Tensor) -> torch.Tensor:
    """Convolve x, shape (samples, elements): limbs, padding, patches of some samples and lines at a time, products."""
    lines, width = step.window.output
    channels = source[0] // step.group
    inputs, outputs = channels * prod(step.window.kernel), step.shape[0] // step.group
    out = x.new_empty((len(x), step.group, outputs, lines, width))
    words = _words(products, step.group * inputs, step.group * outputs)
    for samples in _pieces(len(x), words * lines * width):
        limbs = products.split(x[samples].reshape(-1, *source))
        count = limbs.shape[1]
        planes = _padded(limbs.reshape(-1, *source), step.window)
        view = _windows(planes, step.window)
        view = view.view(products.limbs, count, step.group, channels, *view.shape[2:])
        for part in _pieces(lines, words * width * count):
            # (limbs, samples, groups, channels, kernel, lines, width) to (groups, inputs, limbs, positions)
            patches = view[..., part, :].permute(2, 3, 4, 5, 0, 1, 6, 7)
            found = products.multiply(patches.reshape(step.group, inputs, products.limbs, -1))
            found = found.reshape(step.group, outputs, count, -1, width)
            out[samples, :, :, part] = found.permute(2, 0, 1, 3, 4)
    return out.reshape(len(x), prod(step.shape))


def _words(products: LimbProducts, inputs: int, outputs: int) -> int:
    """Working memory of a column, in words of 8 bytes: its limbs, twice, and its sums, three times."""
    of_limb, of_sum = products.word_bytes
    return products.limbs * (2 * inputs * of_limb + 3 * outputs * of_sum) // _WORD_BYTES + 1


def _pieces(count: int, words: int) -> Iterator[slice]:
    """Cut [0, count) so that a piece, of `words` an element, fits into working memory; one element at least."""
    step = max(1, min(count, WORKING_WORDS // max(1, words)))
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _padded(planes: torch.Tensor, window: Window) -> torch.Tensor:
    """Pad planes, shape (count, channels, height, width), to what the windows read; negative pads crop.

    What a plan says of bottom and right does not matter: the last window of a sum may end beyond it, on zeros.
    """
    extents, inside, outside = [], [], []
    for axis in range(2):
        extent = (window.output[axis] - 1) * window.strides[axis]
        extent += (window.kernel[axis] - 1) * window.dilations[axis] + 1
        pad = window.pads[axis]
        start = max(0, -pad)
        stop = max(start, min(planes.shape[2 + axis], extent - pad))
        extents.append(extent)
        inside.append(slice(start, stop))
        outside.append(slice(start + pad, stop + pad))
    made = planes.new_zeros((*planes.shape[:2], *extents))
    made[:, :, outside[0], outside[1]] = planes[:, :, inside[0], inside[1]]
    return made


def _windows(planes: torch.Tensor, window: Window) -> torch.Tensor:
    """See padded planes as windows: shape (count, channels, kernel height, kernel width, lines, width), no copy."""
    count, channels, height, width = planes.shape
    (sy, sx), (dy, dx) = window.strides, window.dilations
    strides = (channels * height * width, height * width, dy * width, dx, sy * width, sx)
    return planes.as_strided((count, channels, *window.kernel, *window.output), strides)


def check_device(device: TorchDevice, limbs: Limbs, parameters: RingParameters) -> None:
    """Check a device's arithmetic: extremes, and a large product, against the native one; about a second.

    A library that emulates float64 products may be accurate and still not exact; this is where it is noticed.

    Raises:
        ParameterError: a product is wrong.
    """
    outputs, inputs, columns = _TRIAL[device.device.type]
    generator = np.random.default_rng(0)
    full = ROW_SUM_LIMIT // WEIGHT_LIMIT
    trials = [
        (np.stack([np.full(2 * full, sign * WEIGHT_LIMIT) for sign in (1, -1)]), np.full((2 * full, 9), -1)),
        (
            generator.integers(-WEIGHT_LIMIT, WEIGHT_LIMIT + 1, (outputs, inputs)),
            generator.integers(0, 1 << 62, (inputs, columns)),
        ),
    ]
    trial = device.for_trials()
    for weights, drawn in trials:
        residues = np.remainder(drawn, parameters.modulus)
        products = make_products(limbs, checked_weights(weights)[None], parameters, trial)
        with torch.inference_mode():
            split = products.split(trial.upload(residues)[None])
            found = products.multiply(split.permute(1, 2, 0, 3))[0].cpu().numpy()
        if not np.array_equal(found, ModularMatrix(weights, parameters).multiply(residues)):
            raise ParameterError(
                f"self-test of {device.name}: expected exact {limbs.value} products modulo {parameters.modulus}, found "
                "wrong ones: its library approximates them (emulated float64, fast modes); turn that off, or leave "
                "--device out"
            )
