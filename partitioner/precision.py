"""How many digits the weights of a block get, so that its error bound is at most what was asked for.

    requires  the full program of a block, its real weights, and a precision or none
    ensures   integers: without a precision one digit of 15 bits; with one the cheapest form whose bound is within it,
              or the most precise form where none is

Every digit is a row more for each output: the server's work and its answer are as many times as long, the upload stays.
Digits of fewer bits keep row sums small, so that inputs have finer scales and the noise weighs less; more digits leave
less of the weights. A dense layer of 4608 inputs and weights of one magnitude has a bound of 5e-2 with 15 bits, where
rounding rules; two digits of 15 bits have 3e-4, where the noise rules, two of 12 bits 6e-5, three of 10 bits 1e-5.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from heinfer.errors import Offence, UnsupportedModelError
from heinfer.operators import Program
from heinfer.operators.program import Arrays
from heinfer.plan import Block
from heinfer.ring import RingParameters
from partitioner.scaling import Quantised, quantise_program

#: Bits of a digit that are tried where one digit of 15 does not do, by how many digits there are: from where the noise
#: rules to where rounding does.
DIGIT_BITS: Final[dict[int, tuple[int, ...]]] = {
    2: (15, 14, 13, 12, 11, 10),
    3: (12, 11, 10, 9, 8),
    4: (9, 8, 7, 6),
}


def quantise_to(program: Program, arrays: Arrays, parameters: RingParameters, precision: float | None) -> Quantised:
    """Quantise a block.

    Args:
        program: full program.
        arrays: real weights and index maps.
        parameters: ring.
        precision: what the error bound for inputs of magnitude 1 should be at most; None: whatever one digit gives.

    Returns:
        The first form whose bound is within the precision; where none is, the one with the smallest bound.

    Raises:
        ScaleConflictError: values of different scales are added, whatever the weights' scales.
    """
    best = quantise_program(program, arrays)
    least = best.unit_bound(parameters)
    if precision is None or least <= precision:
        return best
    for digits, choices in DIGIT_BITS.items():
        before = inf
        for bits in choices:
            found = quantise_program(program, arrays, digits, bits)
            bound = found.unit_bound(parameters)
            if bound <= precision:
                return found
            if bound < least:
                best, least = found, bound
            if bound > before:  # with fewer bits rounding grows faster than the noise falls
                break
            before = bound
    return best


def check_precision(blocks: Sequence[Block], precision: float | None) -> None:
    """Check the blocks of a model against the precision asked for.

    Raises:
        UnsupportedModelError: a block's bound is above it.
    """
    over = {i: block for i, block in enumerate(blocks) if precision is not None and block.unit_bound > precision}
    if not over:
        return
    least = max(block.unit_bound for block in over.values())
    offences = [
        Offence(
            f"block {index}",
            ", ".join(block.operators),
            f"its bound is {block.unit_bound:.1e} at best, with {block.digits} digits of {block.digit_bits} bits",
        )
        for index, block in over.items()
    ]
    raise UnsupportedModelError(  # 5 % more is never rounded below the bound
        f"expected error bounds of at most {precision:.1e} for inputs of magnitude 1, which some blocks can't have; "
        f"ask for a precision of {1.05 * least:.1e}, or put these operators on the node:",
        offences,
    )
