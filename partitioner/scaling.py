"""Scales of the weights of one block, and its integer matrix.

    requires  the full program of a block and its real weights
    ensures   int16 weights, one scale an output row, and the row norms of every output; values that are added on the
              server share their scale

Every row gets the finest scale that 16 bits allow. Rows that meet in a sum take the coarser of their scales; where rows
can't be matched one to one, the whole block takes one scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.operators import Program, ScaleConflictError, analyse
from heinfer.operators.program import Arrays
from heinfer.operators.steps import WEIGHTED, Conv, MatMul, Rescale, Scale, Step, Sum, Take, sources_of
from heinfer.ring import RowNorms, quantise, weight_scale

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quantised:
    """Integer weights and index maps for the server; norms of every output for the node; L."""

    arrays: Mapping[str, NDArray[Any]]
    norms: tuple[RowNorms, ...]
    row_sum: int


def quantise_program(program: Program, arrays: Arrays) -> Quantised:
    """Choose scales and quantise.

    Raises:
        ScaleConflictError: values of different scales are added, whatever the weights' scales.
    """
    largest = {s.weights: _largest(s, arrays[s.weights]) for s in program.steps if isinstance(s, WEIGHTED)}
    try:
        return _quantise(program, arrays, _tied(program, largest))
    except ScaleConflictError:
        top = max(float(np.max(values, initial=0.0)) for values in largest.values())
        return _quantise(program, arrays, {name: np.full_like(values, top) for name, values in largest.items()})


def _quantise(program: Program, arrays: Arrays, largest: Mapping[str, Floats]) -> Quantised:
    scales = {name: weight_scale(values) for name, values in largest.items()}
    server: dict[str, NDArray[Any]] = {}
    factors = {}
    for step in program.steps:
        match step:
            case Conv():
                server[step.weights] = quantise(arrays[step.weights], scales[step.weights].reshape(-1, 1, 1, 1))
            case MatMul() | Scale():
                server[step.weights] = quantise(arrays[step.weights], scales[step.weights])
            case Take(indices=str(name)):
                server[name] = arrays[name]
            case Rescale():
                factors[step.values] = np.asarray(arrays[step.values], np.float64)
            case _:
                pass
    norms = tuple(analyse(program, server, scales, factors, arrays))
    row_sum = max(float(np.max(n.l1, initial=0.0)) for n in norms)
    return Quantised(server, norms, round(row_sum))


def _largest(step: Conv | MatMul | Scale, weights: NDArray[Any]) -> Floats:
    """Return the largest |weight| of every output row: channel of Conv, column of MatMul, element of Scale."""
    absolute = np.abs(np.asarray(weights, np.float64))
    match step:
        case Conv():
            return np.asarray(absolute.max(axis=(1, 2, 3)))
        case MatMul():
            return np.asarray(absolute.max(axis=0))
        case Scale():
            return absolute


def _tied(program: Program, largest: Mapping[str, Floats]) -> dict[str, Floats]:
    """Let weighted steps whose results are added share their rows' largest weights."""
    result = dict(largest)
    origins: list[frozenset[str]] = [frozenset()] * len(program.inputs)
    groups: list[frozenset[str]] = []
    for step in program.steps:
        merged = frozenset().union(*(origins[s] for s in sources_of(step)))
        origins.append(_own(step) or merged)
        if isinstance(step, Sum):
            touching = [g for g in groups if g & merged]
            groups = [g for g in groups if not g & merged] + [merged.union(*touching)]
    for names in groups:
        members = [result[name] for name in names]
        if len({m.shape for m in members}) == 1:
            joint = np.max(members, axis=0)
            result.update(dict.fromkeys(names, joint))
        else:
            top = max(float(np.max(m, initial=0.0)) for m in members)
            result.update({name: np.full_like(result[name], top) for name in names})
    return result


def _own(step: Step) -> frozenset[str]:
    return frozenset((step.weights,)) if isinstance(step, WEIGHTED) else frozenset()
