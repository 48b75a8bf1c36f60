"""Evaluate a linear program on residues, exactly: what the untrusted server runs.

Homomorphic evaluation of y = W x is the plain operator W applied to integers modulo q, to b and to a alike; so a tensor
of ciphertexts is a tensor of residues with more samples. Inside, every value is one C-contiguous array of shape
(samples, elements): a query of one sample is computed like a float tensor of its shape, in about twice the time.

Convolutions are in `convolutions`, matrices in `matrices`, operators without them in `movements`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.operators.convolutions import compile_conv
from heinfer.operators.matrices import compile_matmul
from heinfer.operators.movements import (
    add_values,
    by_tiles,
    join_sources,
    scale_elements,
    sum_windows,
    take_elements,
)
from heinfer.operators.program import Arrays, Program
from heinfer.operators.steps import Conv, MatMul, Scale, Shape, Step, Sum, Take, WindowSum
from heinfer.operators.windows import window_geometry
from heinfer.ring import ModularMatrix, RingParameters, checked_weights

Residues = NDArray[np.int64]
#: From all values so far, shape (samples, elements) each, to the step's own value.
Operator = Callable[[Sequence[Residues]], Residues]
#: Matrices that exist already: steps may share an array, and its checked copy is the largest thing in memory.
Matrices = dict[tuple[str, str, int], list[ModularMatrix]]
_WEIGHT_BYTES, _MAP_BYTES = 8, 4


class ResidueProgram:
    """A server program with its integer weights, ready to run; immutable and safe to share between threads.

    Args:
        program: server program (no `Shift`, no `Rescale`).
        arrays: integer weights and index maps.
        parameters: ring.

    Raises:
        PlanError: an array is missing or does not fit.
        ParameterError: a weight that is not an integer or too large, or a step that belongs to the node.
    """

    def __init__(self, program: Program, arrays: Arrays, parameters: RingParameters) -> None:
        program.check_arrays(arrays)
        self.program = program
        shapes, matrices = program.shapes, Matrices()
        self._output_shapes = program.output_shapes
        self._run = [_compile(step, arrays, shapes, parameters, matrices) for step in program.steps]

    def evaluate(self, inputs: Sequence[Residues]) -> list[Residues]:
        """Evaluate the program.

        Args:
            inputs: int64 in [0, q), one array a program input, shape (samples, *shape), any strides; C-contiguous ones
                are not copied. The range is not checked here but where residues are unpacked.

        Returns:
            int64 in [0, q), one array an output, shape (samples, *shape), C-contiguous.
        """
        if len(inputs) != len(self.program.inputs):
            raise ParameterError(f"expected {len(self.program.inputs)} inputs, found {len(inputs)}")
        samples = inputs[0].shape[0]
        values: list[Residues] = []
        for x, shape in zip(inputs, self.program.inputs, strict=True):
            if x.dtype != np.int64 or x.shape != (samples, *shape):
                raise ParameterError(f"expected int64 {(samples, *shape)}, found {x.dtype} {x.shape}")
            values.append(np.ascontiguousarray(x).reshape(samples, prod(shape)))
        for run in self._run:
            values.append(run(values))
        return [
            values[o].reshape(samples, *shape)
            for o, shape in zip(self.program.outputs, self._output_shapes, strict=True)
        ]

    def evaluate_joined(self, residues: Residues) -> Residues:
        """Evaluate the program on inputs that lie one after the other, as they travel.

        Args:
            residues: int64 in [0, q), shape (samples, elements of all inputs), any strides.

        Returns:
            int64 in [0, q), shape (samples, elements of all outputs).
        """
        samples, inputs, first = len(residues), [], 0
        for shape in self.program.inputs:
            inputs.append(residues[:, first : first + prod(shape)].reshape(samples, *shape))
            first += prod(shape)
        outputs = [y.reshape(samples, -1) for y in self.evaluate(inputs)]
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=1)


def copy_bytes(program: Program, arrays: Arrays) -> int:
    """Return about how many bytes a `ResidueProgram` takes: weights as float64, maps as int32."""
    names = {s.weights: _WEIGHT_BYTES for s in program.steps if isinstance(s, Conv | MatMul | Scale)}
    names |= {s.indices: _MAP_BYTES for s in program.steps if isinstance(s, Take) and s.indices is not None}
    return sum(arrays[name].size * size for name, size in names.items() if name in arrays)


def compile_step(step: Step, arrays: Arrays, shapes: Sequence[Shape], parameters: RingParameters) -> Operator:
    """Make one step of a server program ready to run, for callers that evaluate only some.

    Args:
        step: any but `Shift` and `Rescale`.
        arrays: integer weights and index maps, checked by `Program.check_arrays`.
        shapes: shapes of all values that the step's sources may name (`Program.shapes`).
        parameters: ring.

    Returns:
        A function from the values so far, C-contiguous int64 in [0, q) of shape (samples, elements) each, to the
        step's value, of the same kind; values that the step does not read may be anything. Safe to share.

    Raises:
        ParameterError: a weight that is not an integer or too large, or a step that belongs to the node.
    """
    return _compile(step, arrays, shapes, parameters, {})


def _compile(
    step: Step, arrays: Arrays, shapes: Sequence[Shape], parameters: RingParameters, matrices: Matrices
) -> Operator:
    modulus, elements = parameters.modulus, prod(step.shape)
    match step:
        case Conv():
            convolve = compile_conv(step, _shared_matrices(step, arrays, parameters, matrices), shapes[step.source])
            return lambda values: convolve(values[step.source])
        case MatMul():
            matrix = _shared_matrices(step, arrays, parameters, matrices)[0]
            multiply = compile_matmul(step, matrix, arrays[step.weights])
            return lambda values: multiply(values[step.source])
        case Scale():
            weights = checked_weights(arrays[step.weights].reshape(-1, 1))[:, 0]
            return lambda values: by_tiles(values[step.source], elements, scale_elements, weights, modulus)
        case Take(indices=None):
            return lambda values: join_sources(step.sources, values)
        case Take(indices=str(name)):
            indices = np.array(arrays[name], np.int32, order="C")
            return lambda values: by_tiles(join_sources(step.sources, values), elements, take_elements, indices)
        case Sum():
            return lambda values: add_values(step, values, modulus)
        case WindowSum():
            geometry = window_geometry(step.window, shapes[step.source])
            return lambda values: by_tiles(values[step.source], elements, sum_windows, geometry, modulus)
        case _:
            raise ParameterError(f"a {step.kind} belongs to the node, found in a server's program")


def _shared_matrices(
    step: Conv | MatMul, arrays: Arrays, parameters: RingParameters, matrices: Matrices
) -> list[ModularMatrix]:
    """Matrices of a step, one a group, made once per array and use."""
    group = step.group if isinstance(step, Conv) else 1
    key = (step.kind, step.weights, group)
    if key not in matrices:
        weights = arrays[step.weights]
        whole = weights.T if isinstance(step, MatMul) else weights.reshape(weights.shape[0], prod(weights.shape[1:]))
        matrices[key] = [ModularMatrix(part, parameters) for part in np.split(whole, group)]
    return matrices[key]
