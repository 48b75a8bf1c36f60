"""Sums of weighted vectors in registers: the inner loop of direct convolutions.

Worked example: 4 outputs by 4 positions by both limbs are 8 vectors of accumulators. For every input two vectors are
loaded and 4 weights broadcast; that is 32 multiply-adds for 6 loads, and nothing is stored until the end.

Compilers do not find this shape in a loop over scalars, so it is written in LLVM's vector types, which every processor
has (LLVM cuts them to what the machine offers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils as untyped_cgutils
from numba.core import types
from numba.extending import intrinsic

cgutils: Any = untyped_cgutils  # has no types
#: Positions per vector.
LANES: Final = 4

_DOUBLE: Final = ir.DoubleType()
_VECTOR: Final = ir.VectorType(_DOUBLE, LANES)
_INDEX: Final = ir.IntType(64)


def _weighted_sums(outputs: int) -> Any:
    """Make the function of `sum_one` and `sum_four` for a number of outputs."""

    def typed(context: Any, *arguments: Any) -> tuple[Any, Callable[..., Any]]:
        integers = [a if isinstance(a, types.Array) else types.int64 for a in arguments]
        return types.void(*integers), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        planes, at, lower, offsets, inputs, weights, weight, sums, row, column = (
            context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )

        def vector_at(array: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(array, [index]), _VECTOR.as_pointer())

        # Fused where the processor fuses, two instructions elsewhere; sums of integers below 2**53 are exact both ways.
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f64"
        )
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first_lane = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(2 * outputs)]  # become registers
        with cgutils.for_range(builder, inputs, intp=_INDEX) as loop:
            position = builder.add(at, builder.load(builder.gep(offsets, [loop.index])))
            limbs = [builder.load(vector_at(planes, p), align=8) for p in (position, builder.add(position, lower))]
            first = builder.add(weight, builder.mul(loop.index, _INDEX(outputs)))
            for output in range(outputs):
                scalar = builder.load(builder.gep(weights, [builder.add(first, _INDEX(output))]))
                lane = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
                factor = builder.shuffle_vector(lane, undefined, first_lane)
                for total, limb in zip(totals[2 * output : 2 * output + 2], limbs, strict=True):
                    builder.store(builder.call(multiply_add, [factor, limb, builder.load(total)]), total)
        for number, total in enumerate(totals):
            target = builder.add(column, builder.mul(row, _INDEX(number)))
            builder.store(builder.load(total), vector_at(sums, target), align=8)
        return context.get_dummy_value()

    def declared(  # numba reads the names of the arguments here
        context: Any,
        planes: Any,
        at: Any,
        lower: Any,
        offsets: Any,
        inputs: Any,
        weights: Any,
        weight: Any,
        sums: Any,
        row: Any,
        column: Any,
    ) -> Any:
        return typed(context, planes, at, lower, offsets, inputs, weights, weight, sums, row, column)

    return intrinsic(declared)


#: sum_four(planes, at, lower, offsets, inputs, weights, weight, sums, row, column), for kernels only: unchecked.
#:
#: For 4 outputs o, upper (l = 0) and lower (l = 1) limbs and `LANES` positions p, writes
#: sums[(2 * o + l) * row + column + p] = sum over k < inputs of
#: weights[weight + 4 * k + o] * planes[at + offsets[k] + l * lower + p].
#: All arrays are one-dimensional and C-contiguous: float64, but int64 for offsets.
sum_four = _weighted_sums(4)
#: The same for one output.
sum_one = _weighted_sums(1)
