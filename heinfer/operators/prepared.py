"""How a block is cut for prepared mode: what the node does before the upload, what the server runs, where values lie.

    block inputs --(front: node)--> server inputs, padded --(server: weighted steps, then the rest)--> outputs

In prepared mode a ciphertext's polynomial a is fixed and public, and only b travels, one residue a value. The server
runs ordinary operators on tensors of residues. Planes, ciphertexts and coefficients exist for the node alone: element i
of an upload is coefficient `positions[i] % N` of ciphertext `positions[i] // N`, each used once.

Worked example: a 3x3 convolution of 16 channels of 32x32 with padding 1, at N = 2048. The server gets a tensor of
16 x 34 x 34 masked residues, padding included, and convolves it without padding. A plane of 34 * 34 = 1156 positions
fills one ciphertext; output (y, x) of a channel is read at coefficient 34 * y + x of that channel's hint times secret.

Both sides derive the cut from the plan's program, degree and choice of dense hints, by the same function
(`heinfer.operators.cutting`), so it is not written down.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.program import Program
from heinfer.operators.steps import Step, Take, array_of
from heinfer.ring import COEFFICIENT_BYTES

Maps = Mapping[str, NDArray[Any]]


class HintKind(enum.Enum):
    """How the node gets W(a s) for a weighted step.

    POLYNOMIAL: one polynomial an output channel (or column of a MatMul over tokens), read at some coefficients.
    DENSE: one row of N residues an output element, times the secret's coefficients; serves every linear map.
    ELEMENTWISE: the integer weights themselves, one an output.
    """

    POLYNOMIAL = "polynomial"
    DENSE = "dense"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True, slots=True)
class Hint:
    """The hint of one weighted step of the server's program.

    Attributes:
        step: position of the step in the program.
        kind: how corrections are made.
        rows: polynomials, or dense rows, or weights.
        reads: POLYNOMIAL: coefficients that are read of every polynomial, int64; else empty.
        row_stride: POLYNOMIAL: output elements between polynomials.
        read_stride: POLYNOMIAL: output elements between reads.
        first_ciphertext: of the step's server input.
        ciphertexts: how many that input has.
        planes: POLYNOMIAL: planes of the input that share a ciphertext.
        plane: POLYNOMIAL: positions of a plane: of a phase of a channel, or of a feature of all tokens.
        width: POLYNOMIAL: positions of a row of a plane.
        phases: POLYNOMIAL: remainders of row and column numbers that lie in planes of their own, down and across.
    """

    step: int
    kind: HintKind
    rows: int
    first_ciphertext: int
    ciphertexts: int
    reads: NDArray[np.int64]
    row_stride: int = 1
    read_stride: int = 1
    planes: int = 1
    plane: int = 1
    width: int = 1
    phases: tuple[int, int] = (1, 1)

    def row_bytes(self, degree: int) -> float:
        """Bytes of a row of this hint as it is kept in a bundle."""
        return 2 if self.kind is HintKind.ELEMENTWISE else degree * COEFFICIENT_BYTES


@dataclass(frozen=True, slots=True)
class Outline:
    """What a cut would be, without its arrays: enough to compare cuts.

    Attributes:
        degree: N of the block's ciphertexts.
        dense: steps of the block's program that have dense hints by choice, in order.
        hints: one a weighted step of the cut; their places in its program are not known yet.
        ciphertexts: how many polynomials a there are.
        values_up: residues of one sample's upload.
        values_down: residues of one sample's answer.
        joined: residues that are put together from the results of bands, or of parts of the tokens.
    """

    degree: int
    dense: tuple[int, ...]
    hints: tuple[Hint, ...]
    ciphertexts: int
    values_up: int
    values_down: int
    joined: int

    @property
    def hint_bytes(self) -> int:
        """Bytes of all hints as they are kept in a bundle."""
        return _hint_bytes(self.hints, self.degree)


@dataclass(frozen=True, slots=True)
class PreparedForm:
    """A block's program, cut for prepared mode.

    Attributes:
        degree: N of the block's ciphertexts.
        front: steps that the node runs on the scaled integers of the block's inputs; empty where `gather` does all.
        gathered: values that `gather` refers to, joined: numbers of the block's inputs and front steps.
        gather: int32, one an uploaded value: which element of the joined values it is, -1 for padding.
        positions: int64, one an uploaded value: ciphertext * N + coefficient. No position occurs twice.
        ciphertexts: how many polynomials a there are.
        program: what the server runs; its inputs are the uploaded tensors, one after the other.
        arrays: index maps that the cut adds to the block's arrays (bands of rows put together again).
        hints: one a weighted step of `program`, in order.
        dense: steps of the block's own program that have dense hints by choice, in order.
        joined: residues that are put together from the results of bands, or of parts of the tokens.
    """

    degree: int
    front: tuple[Step, ...]
    gathered: tuple[int, ...]
    gather: NDArray[np.int32]
    positions: NDArray[np.int64]
    ciphertexts: int
    program: Program
    arrays: Maps
    hints: tuple[Hint, ...]
    dense: tuple[int, ...]
    joined: int

    @property
    def values_up(self) -> int:
        """Residues of one sample's upload."""
        return len(self.gather)

    @property
    def values_down(self) -> int:
        """Residues of one sample's answer."""
        return sum(prod(shape) for shape in self.program.output_shapes)

    @property
    def hint_bytes(self) -> int:
        """Bytes of all hints as they are kept in a bundle."""
        return _hint_bytes(self.hints, self.degree)


def _hint_bytes(hints: Sequence[Hint], degree: int) -> int:
    return round(sum(hint.rows * hint.row_bytes(degree) for hint in hints))


def map_names(program: Program) -> tuple[str, ...]:
    """Return the names of the index maps of a server program: all that `prepare_form` needs of a block's arrays."""
    return tuple(dict.fromkeys(s.indices for s in program.steps if isinstance(s, Take) and s.indices is not None))


def hint_names(program: Program, hint: Hint) -> str:
    """Return the name of the weights that a hint belongs to."""
    name = array_of(program.steps[hint.step])
    assert name is not None  # hints belong to weighted steps
    return name
