"""Count what goes up for weights that read one value in one block: cut such a block, and see.

    shape of the value, what its readers emit  -->  a program of one input  -->  residues of one sample's upload

Passes that compare graphs ask this, since uploads have no formula of their own. Convolutions of one value share the
plane that all of them reach, padding included; where it fits no ciphertext, each uploads bands of its own plane, and
only equal ones are shared.

Worked example: 2 channels of 6x6. A 3x3 convolution with padding 1 reads 2 x 8 x 8 = 128 values, one of 1x1 reads 72,
with stride 2 it reads 18. Two of them in one block read 128; in two blocks 128 and 72, or 128 and 18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from heinfer.operators import Program, outlines
from heinfer.ring import RingParameters
from partitioner.lowering import Builder
from partitioner.preparing import cost
from partitioner.shapes import Shape

#: Appends steps to a builder, given the numbers of what they read; returns the number of the result.
Emit = Callable[[Builder, Sequence[int]], int]


def values_up(shape: Shape, readers: Sequence[Emit]) -> int:
    """Return the residues that one sample sends up for a block of one input, with the default ring.

    Args:
        shape: of the input, per sample.
        readers: operators with weights that read it.

    Returns:
        The upload in prepared mode; without that mode, the values of the input.
    """
    if not readers:
        return 0
    builder = Builder("", [shape])
    outputs = tuple(emit(builder, [0]) for emit in readers)
    program = Program((shape,), tuple(builder.steps), outputs).for_server()
    found = min(outlines(program, RingParameters.default().degree), key=lambda o: cost(program, o), default=None)
    return prod(shape) if found is None else found.values_up
